"""Records with images: accepted forms, and one coded error for everything else, before training."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, Contradiction, HyperParallelError, NoData
from hyper_parallel.trainer.data import Batches, Order, PackedData, prepare
from hyper_parallel.trainer.data.media_kinds import KINDS
from hyper_parallel.trainer.data.media_records import content_of, take_media
from hyper_parallel.trainer.data.record_keys import RecordRules
from hyper_parallel.trainer.data.turns import read_turns
from tests.media.tiny_models import write_images, write_lines, write_model, write_recordings

_ASKED = {"role": "user", "content": "<image>what is this"}
_ANSWER = {"role": "assistant", "content": "seven"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llava", tmp_path_factory.mktemp("llava"))


def _prepare(folder: Path, model: Path, source: Path | None = None, **data: Any) -> PackedData:
    data = {"seq_len": 64, "holdout": 0.0, "packing": False, **data}
    section = Data(source=str(source or folder / "data.jsonl"), cache_dir=str(folder / "cache"), **data)
    return prepare(section, stage="sft", model_path=str(model), seed=0, progress=False)


def _turns(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, _ANSWER]}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_every_form_of_a_record_gives_the_same_tokens_and_pixels(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    records = [
        {"messages": [_ASKED, _ANSWER], "images": [name]},
        {"messages": [_ASKED, _ANSWER], "image": name},
        {"image": name, "conversations": [{"from": "human", "value": _ASKED["content"]},
                                          {"from": "gpt", "value": "seven"}]},
        _turns({"type": "image", "image": name}, _text("what is this")),
        _turns({"type": "image", "path": name}, _text("what is this")),
        _turns({"type": "image_url", "image_url": {"url": name}}, _text("what is this")),
        {**_turns({"type": "image"}, _text("what is this")), "images": [name]},
    ]  # fmt: skip
    write_lines(tmp_path / "data.jsonl", records)
    alpaca = {"instruction": _ASKED["content"], "output": "seven", "images": [name]}
    write_lines(tmp_path / "alpaca.jsonl", [alpaca])
    parts = []
    for file in ("data.jsonl", "alpaca.jsonl"):
        packed = _prepare(tmp_path, model, tmp_path / file)
        batches = Batches(packed.train, sequences_per_step=1, order=Order(shuffle=False))
        parts += [batches.microbatches(i, 0, 1, 1, 1)[0] for i in range(len(packed.train))]
    assert len(parts) == len(records) + 1
    for part in parts:
        assert (part.input_ids == parts[0].input_ids).all()
        assert (part.media["pixel_values"] == parts[0].media["pixel_values"]).all()


def test_parquet_with_encoded_images_is_read_like_files(tmp_path: Path, model: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (name,) = write_images(tmp_path, ((20, 20),))
    content = (tmp_path / name).read_bytes()
    rows = [{"messages": [_ASKED, _ANSWER], "images": [{"bytes": content, "path": "gone.png"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    pixels = []
    for file in ("data.parquet", "data.jsonl"):
        packed = _prepare(tmp_path, model, tmp_path / file)
        (batch,) = Batches(packed.train, sequences_per_step=1).microbatches(0, 0, 1, 1, 1)
        pixels.append(batch.media["pixel_values"])
    np.testing.assert_array_equal(*pixels)


@pytest.mark.parametrize("listed", [False, True])
def test_image_columns_of_a_saved_dataset_are_read_like_files(tmp_path: Path, model: Path, listed: bool) -> None:
    datasets = pytest.importorskip("datasets")
    (name,) = write_images(tmp_path, ((20, 20),))
    content = {"bytes": (tmp_path / name).read_bytes(), "path": None}
    feature = datasets.List(datasets.Image()) if listed else datasets.Image()
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"messages": datasets.List(turn), "images": feature})
    row = {"messages": [_ASKED, _ANSWER], "images": [content] if listed else content}
    datasets.Dataset.from_list([row], features=features).save_to_disk(tmp_path / "saved")
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    pixels = []
    for source in ("saved", "data.jsonl"):
        packed = _prepare(tmp_path, model, tmp_path / source)
        (batch,) = Batches(packed.train, sequences_per_step=1).microbatches(0, 0, 1, 1, 1)
        pixels.append(batch.media["pixel_values"])
    np.testing.assert_array_equal(*pixels)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"images": ["pictures/0.png"] * 2}, "placeholders for them"),
        ({"images": []}, "placeholders for them"),
        ({"images": ["../secret.png"]}, "outside of the media folder"),
        ({"images": ["/etc/passwd"]}, "outside of the media folder"),
        ({"images": ["https://example.org/a.png"]}, "outside of the media folder"),
        ({"images": ["link.png"]}, "outside of the media folder"),
        ({"images": ["missing.png"]}, "cannot be read"),
        ({"images": ["pictures"]}, "cannot be read"),
        ({"images": ["data.jsonl"]}, "cannot be decoded"),
        ({"images": [{"bytes": None, "path": None}]}, "no file name"),
        ({"videos": ["a.mp4"], "images": ["pictures/0.png"]}, "videos"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, _ANSWER]},
         "`video`, not text"),
        ({"messages": [_ASKED, {"role": "assistant", "content": "<image>"}], "images": ["pictures/0.png"] * 2},
         "an answer contains an image"),
    ],
)  # fmt: skip
def test_a_bad_image_is_one_coded_error_with_file_and_line(
    tmp_path: Path, model: Path, record: dict[str, Any], match: str
) -> None:
    folder = tmp_path / "data"
    write_images(folder, ((20, 20),))
    shutil.copy(folder / "pictures/0.png", tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    good = {"messages": [_ASKED, _ANSWER], "images": ["pictures/0.png"]}
    write_lines(folder / "data.jsonl", [good, {"messages": [_ASKED, _ANSWER], **record}])
    with pytest.raises(HyperParallelError, match=match) as caught:
        _prepare(folder, model)
    assert isinstance(caught.value, NoData | BadValue)
    assert "data.jsonl" in str(caught.value.where)
    assert "2" in str(caught.value.where)


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path, model: Path) -> None:
    from PIL import Image

    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": ["large.png"]}])
    with pytest.raises(NoData, match="pixels"):
        _prepare(tmp_path, model)


def test_media_dir_names_the_folder_of_the_images(tmp_path: Path, model: Path) -> None:
    write_images(tmp_path / "media", ((20, 20),))
    record = {"messages": [_ASKED, _ANSWER], "images": ["pictures/0.png"]}
    write_lines(tmp_path / "data.jsonl", [record])
    with pytest.raises(NoData, match="cannot be read"):
        _prepare(tmp_path, model)
    assert len(_prepare(tmp_path, model, media_dir=str(tmp_path / "media")).train) == 1


def test_an_absolute_path_is_read_inside_the_media_folder_only(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path / "media", ((20, 20),))
    record = {"messages": [_ASKED, _ANSWER], "images": [str(tmp_path / "media" / name)]}
    source = write_lines(tmp_path / "data" / "data.jsonl", [record])
    with pytest.raises(NoData, match="outside of the media folder") as caught:
        _prepare(tmp_path, model, source)
    key, _, value = str(caught.value.hint).partition("=")
    assert key == "data.media_dir"
    assert len(_prepare(tmp_path, model, source, media_dir=value).train) == 1


def test_files_of_a_prompt_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(b"png")
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image", "path": str(tmp_path / "a.png")},
    ]
    rules = RecordRules(media_kinds=(KINDS["image"],))
    turns = read_turns([{"role": "user", "content": tuple(parts)}], rules, "prompt")
    _, files = take_media(turns, {}, rules, "prompt")
    assert [content_of(file, "prompt") for file in files] == [b"png"] * 3


def test_a_column_with_another_name_is_named_in_columns(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "chart": name}])
    packed = _prepare(tmp_path, model, columns={"images": "chart"})
    assert packed.train.has_media


def test_a_long_conversation_with_images_is_counted_and_left_out(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    record = {"messages": [_ASKED, _ANSWER], "images": [name]}
    long = {"messages": [_ASKED, {"role": "assistant", "content": "seven " * 80}], "images": [name]}
    write_lines(tmp_path / "data.jsonl", [record, long])
    counts = _prepare(tmp_path, model).counts[0]
    assert (counts.used, counts.cut, sum(counts.dropped.values())) == (1, 0, 1)
    write_lines(tmp_path / "data.jsonl", [long])
    with pytest.raises(NoData, match="longer than data") as caught:
        _prepare(tmp_path, model)
    assert caught.value.hint is not None
    _prepare(tmp_path, model, seq_len=int(caught.value.hint.partition("=")[2]))


def test_an_image_that_changes_after_preparation_is_refused_and_the_hint_works(tmp_path: Path, model: Path) -> None:
    names = write_images(tmp_path, ((20, 20), (36, 24)))
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": names[:1]}])
    _prepare(tmp_path, model)
    shutil.copy(tmp_path / names[1], tmp_path / names[0])
    packed = _prepare(tmp_path, model)
    assert packed.cached
    with pytest.raises(NoData, match="changed") as caught:
        Batches(packed.train, sequences_per_step=1).microbatches(0, 0, 1, 1, 1)
    assert str(caught.value.hint).startswith("data.cache_dir=")
    again = prepare(
        Data(
            source=str(tmp_path / "data.jsonl"),
            seq_len=64,
            holdout=0.0,
            cache_dir=str(tmp_path / "other"),
        ),
        stage="sft",
        model_path=str(model),
        seed=0,
        progress=False,
    )
    Batches(again.train, sequences_per_step=1).microbatches(0, 0, 1, 1, 1)
    assert again.fingerprint != packed.fingerprint


def test_packing_is_not_applied_to_images_and_is_refused_beside_them(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    record = {"messages": [_ASKED, _ANSWER], "images": [name]}
    write_lines(tmp_path / "data.jsonl", [record] * 3)
    packed = _prepare(tmp_path, model, packing=True, seq_len=256)
    assert len(packed.train) == 3
    assert any("padded" in note for note in packed.notes)
    asked = {"role": "user", "content": "what"}
    write_lines(tmp_path / "text.jsonl", [{"messages": [asked, _ANSWER]}] * 3)
    sources = [{"source": str(tmp_path / f)} for f in ("data.jsonl", "text.jsonl")]
    section = {"source": sources, "holdout": 0.0, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(Contradiction, match="packed") as caught:
        prepare(Data(**section), stage="sft", model_path=str(model), seed=0, progress=False)
    assert caught.value.hint == "data.packing=false data.mask_documents=null"
    joined = prepare(Data(**section, packing=False), stage="sft", model_path=str(model), seed=0, progress=False)
    batches = Batches(joined.train, sequences_per_step=6, order=Order(shuffle=False))
    (batch,) = batches.microbatches(0, 0, 1, 6, 1)
    assert batch.media["pixel_values"].shape[0] == 3
    parts = batches.microbatches(0, 0, 1, 1, 6)
    assert sum("pixel_values" in part.media for part in parts) == 3


def test_images_need_a_processor(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "processor_config.json").unlink()
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    with pytest.raises(NoData, match="preprocessor_config"):
        _prepare(tmp_path, tmp_path / "model")


def test_the_template_of_an_older_processor_is_used(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    older = tmp_path / "older"
    shutil.copytree(model, older)
    template = (older / "chat_template.jinja").read_text()
    (older / "chat_template.jinja").unlink()
    (older / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    parts = []
    for directory in (model, older):
        packed = _prepare(tmp_path, directory)
        parts += Batches(packed.train, sequences_per_step=1).microbatches(0, 0, 1, 1, 1)
    assert (parts[0].input_ids == parts[1].input_ids).all()
    assert (parts[0].media["pixel_values"] == parts[1].media["pixel_values"]).all()


def test_a_template_that_drops_images_is_refused(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(BadValue, match="writes nothing for an image"):
        _prepare(tmp_path, model, chat_template=str(template))


def test_prepared_data_of_records_with_images_is_found_again(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    write_lines(tmp_path / "data.jsonl", [{"messages": [_ASKED, _ANSWER], "images": [name]}])
    first, second = _prepare(tmp_path, model), _prepare(tmp_path, model)
    assert (first.cached, second.cached) == (False, True)
    assert first.fingerprint == second.fingerprint
    lines = (second.train.directory / "train_media.jsonl").read_text().splitlines()
    assert str(tmp_path) not in lines[0]
    assert json.loads(lines[0])["media"][0]["name"] == name


def test_unreadable_media_are_counted_and_left_out_where_the_recipe_says_so(tmp_path: Path, model: Path) -> None:
    (name,) = write_images(tmp_path, ((20, 20),))
    (tmp_path / "text.png").write_text("not an image")
    good = {"messages": [_ASKED, _ANSWER], "images": [name]}
    bad = [{**good, "images": images} for images in (["no.png"], ["text.png"], [name, name], [])]
    bad += [{**good, "images": [7]}]
    for record in bad:
        write_lines(tmp_path / "data.jsonl", [good, record])
        with pytest.raises(NoData, match="HP602") as caught:
            _prepare(tmp_path, model)
        assert caught.value.hint == "data.bad_media=skip"
    write_lines(tmp_path / "data.jsonl", [good, *bad, good])
    packed = _prepare(tmp_path, model, bad_media="skip")
    assert len(packed.train) == 2
    (counts,) = packed.counts
    assert (counts.read, counts.used, [*counts.dropped.values()]) == (7, 2, [5])
    assert any("5 conversations left out" in note for note in packed.notes)
    write_lines(tmp_path / "data.jsonl", bad)
    with pytest.raises(NoData, match="cannot be read") as caught:
        _prepare(tmp_path, model, bad_media="skip")
    assert caught.value.hint is None
    # Files outside of the media folder are a fault of the recipe, not of a file.
    write_lines(tmp_path / "data.jsonl", [good, {**good, "images": ["../x.png"]}])
    with pytest.raises(NoData, match="outside of the media folder"):
        _prepare(tmp_path, model, bad_media="skip")


# Audio


@pytest.fixture(scope="module")
def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen2_audio", tmp_path_factory.mktemp("qwen2_audio"))


def test_every_form_of_a_recording_gives_the_same_features(tmp_path: Path, hearing_model: Path) -> None:
    (name,) = write_recordings(tmp_path, (8000,))
    content = base64.b64encode((tmp_path / name).read_bytes()).decode()
    asked = {"role": "user", "content": "<audio>what is this"}
    records = [
        {"messages": [asked, _ANSWER], "audios": [name]},
        {"messages": [asked, _ANSWER], "audio": name},
        {"messages": [asked, _ANSWER], "audio_path": name},
        _turns({"type": "audio", "audio": name}, _text("what is this")),
        _turns({"type": "audio", "audio_url": name}, _text("what is this")),
        _turns({"type": "audio_url", "audio_url": {"url": name}}, _text("what is this")),
        _turns({"type": "input_audio", "input_audio": {"data": content, "format": "wav"}},
               _text("what is this")),
    ]  # fmt: skip
    write_lines(tmp_path / "data.jsonl", records)
    packed = _prepare(tmp_path, hearing_model)
    batches = Batches(packed.train, sequences_per_step=1, order=Order(shuffle=False))
    parts = [batches.microbatches(i, 0, 1, 1, 1)[0] for i in range(len(packed.train))]
    assert len(parts) == len(records)
    for part in parts:
        assert (part.input_ids == parts[0].input_ids).all()
        assert (part.media["input_features"] == parts[0].media["input_features"]).all()


def test_recordings_of_other_rates_and_of_two_channels_become_those_of_the_model(
    tmp_path: Path, hearing_model: Path
) -> None:
    asked = {"role": "user", "content": "<audio>what is this"}
    for name, rate, channels in (("a.wav", 16000, 1), ("b.flac", 48000, 1), ("c.ogg", 22050, 2)):
        seconds = np.arange(rate // 2) / rate
        tone = np.sin(2 * np.pi * 440 * seconds) / 2
        soundfile.write(tmp_path / name, np.stack([tone] * channels, 1), rate)
    files = ("a.wav", "b.flac", "c.ogg")
    write_lines(tmp_path / "data.jsonl", [{"messages": [asked, _ANSWER], "audio": file} for file in files])
    batches = Batches(_prepare(tmp_path, hearing_model).train, sequences_per_step=3, order=Order(shuffle=False))
    (batch,) = batches.microbatches(0, 0, 1, 3, 1)
    assert (batch.input_ids == batch.input_ids[0]).all()
    one, *others = batch.media["input_features"]
    for other in others:  # the tone is the loudest band at the same times
        assert (one.argmax(0) == other.argmax(0)).mean() > 0.9


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"audio": "no.wav"}, "a recording cannot be read"),
        ({"audio": "../secret.wav"}, "a recording is outside of the media folder"),
        ({"audio": "text.wav"}, "a recording cannot be decoded"),
        ({"audio": "empty.wav"}, "no samples"),
        ({"audio": "slow.wav"}, "more than"),
        ({"audio": "fast.wav"}, "samples per second"),
        ({"audio": "nan.wav"}, "not numbers"),
        ({"audios": ["sounds/0.wav", "sounds/0.wav"]}, "placeholders for them"),
        ({"audio": "sounds/0.wav", "image": "x.png"}, "image"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<audio>"}],
          "audio": "sounds/0.wav"}, "an answer contains a recording"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?"}}]}, _ANSWER]},
         "not encoded as base64"),
    ],
)  # fmt: skip
def test_a_bad_recording_is_one_coded_error_with_file_and_line(
    tmp_path: Path, hearing_model: Path, record: dict[str, Any], match: str
) -> None:
    folder = tmp_path / "data"
    write_recordings(folder, (4000,))
    shutil.copy(folder / "sounds/0.wav", tmp_path / "secret.wav")
    (folder / "text.wav").write_text("not a recording")
    write_recordings(folder / "none", (0,))
    shutil.copy(folder / "none/sounds/0.wav", folder / "empty.wav")
    samples = np.zeros(5000, np.float32)
    # A rate of 1 makes gigabytes of the samples; a rate of 2^31 makes a filter of gigabytes.
    soundfile.write(folder / "slow.wav", samples, 1)
    soundfile.write(folder / "fast.wav", samples, 2**31 - 1)
    soundfile.write(folder / "nan.wav", samples + np.nan, 16000, subtype="FLOAT")
    asked = {"role": "user", "content": "<audio>what is this"}
    good = {"messages": [asked, _ANSWER], "audio": "sounds/0.wav"}
    write_lines(folder / "data.jsonl", [good, {"messages": [asked, _ANSWER], **record}])
    with pytest.raises(NoData, match=match) as caught:
        _prepare(folder, hearing_model)
    assert "data.jsonl" in str(caught.value.where)
    assert "2" in str(caught.value.where)


def test_a_model_of_images_refuses_recordings_by_name(tmp_path: Path, model: Path) -> None:
    (name,) = write_recordings(tmp_path, (4000,))
    asked = {"role": "user", "content": "<audio>what is this"}
    write_lines(tmp_path / "data.jsonl", [{"messages": [asked, _ANSWER], "audio": name}])
    with pytest.raises(NoData, match="`audio`"):
        _prepare(tmp_path, model)


def test_a_processor_that_ignores_recordings_is_refused(tmp_path: Path, hearing_model: Path) -> None:
    """A processor whose call reads texts alone would train on answers to nothing."""
    shutil.copytree(hearing_model, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|audio_bos|><|AUDIO|><|audio_eos|>", "(sound)"))
    (name,) = write_recordings(tmp_path, (4000,))
    asked = {"role": "user", "content": "<audio>what is this"}
    write_lines(tmp_path / "data.jsonl", [{"messages": [asked, _ANSWER], "audio": name}])
    with pytest.raises(BadValue, match="the processor of the model"):
        _prepare(tmp_path, tmp_path / "model")
