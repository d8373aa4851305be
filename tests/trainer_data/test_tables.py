"""Datasets and tables with columns: the same documents in whichever form they come."""

import json

import pytest

from hyper_parallel.config import Data
from hyper_parallel.errors import Contradiction, NoData
from hyper_parallel.trainer.data.sources import resolve

pytestmark = pytest.mark.torch

TEXTS = ["one, two", 'three "four"\nfive', "6"]


def texts(source, stage="pt", **values):
    return [d.text for d in resolve(Data(source=str(source), **values), stage).documents()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A dataset with splits, as `save_to_disk` and as a folder of files with a card."""
    import datasets

    root = tmp_path_factory.mktemp("saved")
    splits = {"train": TEXTS, "test": ["held out"]}
    datasets.disable_progress_bars()
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()})
    both.save_to_disk(str(root / "dict"))
    both["train"].save_to_disk(str(root / "table"))
    folder = root / "folder"
    folder.mkdir()
    for name, rows in splits.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nabout\n")
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of `datasets`, never asked for over a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.parametrize("form", ["table", "dict", "folder"])
def test_every_form_of_a_dataset_gives_the_same_documents(saved, cache, form):
    assert texts(saved / form) == TEXTS
    if form != "table":
        assert texts(saved / form, split="test") == ["held out"]


def test_a_name_is_read_from_the_cache_and_one_that_is_not_there_says_what_was_tried(saved, cache):
    from datasets.packaged_modules.json.json import Json

    files = {"train": [str(saved / "folder" / "train.jsonl")]}
    built = Json(cache_dir=str(cache), dataset_name="name", config_name="main", data_files=files, hash="a")
    built.download_and_prepare()
    (made,) = (cache / "name").iterdir()
    (cache / "user___name").mkdir()
    made.rename(cache / "user___name" / "main")
    assert texts("user/name") == texts("user/name", name="main", split="train") == TEXTS
    assert texts("user/name", split="train[1:2]") == TEXTS[1:2]
    for values in ({"name": "other"}, {"split": "tests"}):
        with pytest.raises(NoData, match="cannot be loaded") as caught:
            texts("user/name", **values)
        assert "main" in caught.value.got or "train" in caught.value.got
    with pytest.raises(NoData, match="HP602") as caught:
        texts("user/none")
    assert f"the cache {cache}, the hub (offline)" in caught.value.allowed


def test_a_split_that_is_not_there_names_those_there_are(saved):
    with pytest.raises(NoData, match="cannot be loaded") as caught:
        texts(saved / "dict", split="dev")
    assert (caught.value.allowed, caught.value.hint) == (["test", "train"], "data.split=train")


def test_a_split_of_what_is_no_dataset_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(Contradiction, match="selects a part of a dataset"):
        texts(tmp_path / "a.txt", split="train")


@pytest.mark.parametrize(("suffix", "mark"), [("csv", ","), ("tsv", "\t")])
def test_a_table_has_columns(tmp_path, suffix, mark):
    path = tmp_path / f"a.{suffix}"
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    path.write_text(f"id{mark}body\n" + "".join(f"7{mark}{text}\n" for text in quoted))
    assert texts(path, text_key="body") == TEXTS
    assert texts(path, format="text") == [path.read_text()]
    with pytest.raises(NoData) as caught:
        texts(path)
    assert caught.value.got == ["body", "id"]
    assert caught.value.hint == "data.text_key=body"


def test_prompts_and_completions_are_conversations(tmp_path):
    records = [
        {"prompt": "Q", "completion": "A"},
        {
            "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
        },
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    first, second = resolve(Data(source=str(path)), "sft").documents()
    assert [(m["role"], m["content"]) for m in first.conversation.messages] == [
        ("user", "Q"),
        ("assistant", "A"),
    ]
    assert second.conversation.messages == (
        {"role": "system", "content": "S"},
        *first.conversation.messages,
    )
    # Where the text has its own key, it is what pre-training reads.
    path.write_text(json.dumps({**records[0], "text": "whole"}) + "\n")
    assert texts(path) == ["whole"]
