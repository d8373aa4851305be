"""Batches with images or audio: loss and gradients of plain transformers on the processor's own output."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import hyper_parallel as hp
from hyper_parallel.backends.torch.forward_variants import KeepFloat64
from hyper_parallel.config import Data
from hyper_parallel.trainer.data import Batch, Batches, Order, PackedData, prepare
from tests.media.records import ANSWERS, write_data
from tests.media.tiny_models import (
    MEDIA,
    needs_torchvision,
    write_images,
    write_lines,
    write_model,
    write_recordings,
)
from tests.slow import slow_cells

transformers = pytest.importorskip("transformers")


def _prepared(folder: Path, family: str, kind: str = "image") -> PackedData:
    needs_torchvision(family)
    write_model(family, folder / "model")
    write_data(folder, kind=kind)
    return _prepared_again(folder)


def _prepared_again(folder: Path) -> PackedData:
    source = folder / "train.jsonl"
    data = Data(source=str(source), seq_len=320, holdout=0.0, packing=False, cache_dir=str(folder / "cache"))
    return prepare(data, stage="sft", model_path=str(folder / "model"), seed=0, progress=False)


def _batch(packed: PackedData) -> Batch:
    batches = Batches(packed.train, sequences_per_step=4, order=Order(shuffle=False))
    (batch,) = batches.microbatches(0, 0, 1, 4, 1)
    return batch


def _model(folder: Path) -> Any:
    cls = transformers.AutoModelForMultimodalLM
    model = cls.from_pretrained(folder, dtype=torch.float64).train()
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        # Without this attribute of its language model's output, its forward raises in transformers 5.24.
        model.language_model.register_forward_hook(_with_image_outputs)
    return model


def _with_image_outputs(module: object, args: object, output: Any) -> None:
    output.image_outputs = None


def _inputs(batch: Batch) -> dict[str, Tensor]:
    arrays = {"input_ids": batch.input_ids, "shift_labels": batch.shift_labels, **batch.media}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def _turn(role: str, *parts: Any) -> dict[str, Any]:
    texts = (
        {"type": "text", "text": p}
        if isinstance(p, str)
        else {"type": "audio", "audio": p}
        if isinstance(p, np.ndarray)
        else {"type": "image", "image": p}
        for p in parts
    )
    return {"role": role, "content": list(texts)}


def _items(folder: Path, kind: str) -> list[Any]:
    if kind == "image":
        return [Image.open(folder / f"pictures/{i}.png").convert("RGB") for i in range(3)]
    items = []
    for i in range(3):
        with wave.open(str(folder / f"sounds/{i}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        items.append((samples / 2**15).astype(np.float32))
    return items


def _expected(folder: Path, model: Any, kind: str) -> float:
    """Return the loss of single conversations as the processor returns them, and accumulate its gradients."""
    processor = transformers.AutoProcessor.from_pretrained(folder / "model")
    a, b, c = _items(folder, kind)
    one, two, three, four = (_turn("assistant", answer) for answer in ANSWERS)
    conversations = [
        [_turn("user", a, " and ", b, "\nwhat is this"), one],
        [_turn("user", c, "\nwhat is this"), two],
        [_turn("user", a, "digit"), three, _turn("user", "and", c), four],
        [_turn("user", "what is the digit"), one],
    ]
    count, total = 0, torch.zeros((), dtype=torch.float64)
    for turns in conversations:
        inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        labels, begin = [-100] * len(ids), 0
        for turn in turns[1::2]:
            text = turn["content"][0]["text"] + "<|im_end|>"
            answer = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            size = len(answer)
            begin = next(i for i in range(begin, len(ids)) if ids[i : i + size] == answer)
            labels[begin : begin + size] = answer
            count, begin = count + size, begin + size
        values = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        with KeepFloat64():
            logits = model(**values).logits[0, :-1]
            targets = torch.tensor(labels[1:])
            total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (total / count).backward()
    return float(total.detach() / count)


CASES = [(family, kind) for family, kinds in MEDIA.items() for kind in kinds]
SLOW = (
    "qwen2_5_vl",
    "internvl",
    "llava_next",
    "idefics3",
    "mistral3",
    "gemma3",
    "llama4",
    "qwen2_5_omni_thinker",
)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_loss_and_gradients_are_those_of_the_processors_own_output(tmp_path: Path, family: str, kind: str) -> None:
    batch = _batch(_prepared(tmp_path, family, kind))
    plain, model = _model(tmp_path / "model"), _model(tmp_path / "model")
    expected = _expected(tmp_path, plain, kind)
    hp.parallelize(model, hp.plan_of(model, ""), hp.World.join("cpu"))
    loss = float(hp.forward_backward(model, [_inputs(batch)]))
    assert loss == pytest.approx(expected, rel=1e-10)
    towers = 0
    for name, parameter in plain.named_parameters():
        gradient = dict(model.named_parameters())[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            towers += any(word in name for word in ("vision", "visual", "audio"))
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)
    assert towers > 0


def test_a_batch_of_images_recordings_both_and_none_repeats_its_rows(tmp_path: Path) -> None:
    needs_torchvision("qwen2_5_omni_thinker")
    write_model("qwen2_5_omni_thinker", tmp_path / "model")
    images = write_images(tmp_path, ((20, 20), (36, 24)))
    sounds = write_recordings(tmp_path, (4000, 9000))
    asked = {
        "<image>what is this": {"images": images[:1]},
        "<audio>what is this": {"audios": sounds[:1]},
        "<audio> and <image>": {"audios": sounds[1:], "images": images[1:]},
        "what is this": {},
    }
    answer = {"role": "assistant", "content": "seven"}
    records = [{"messages": [{"role": "user", "content": text}, answer], **media} for text, media in asked.items()]
    write_lines(tmp_path / "train.jsonl", records)
    packed = _prepared_again(tmp_path)
    batches = Batches(packed.train, sequences_per_step=4, order=Order(shuffle=False))
    model = _model(tmp_path / "model")
    hp.parallelize(model, hp.plan_of(model, ""), hp.World.join("cpu"))
    whole, single = (
        hp.forward_backward(model, [_inputs(part) for part in batches.microbatches(0, 0, 1, *cut)])
        for cut in ((4, 1), (1, 4))
    )
    assert float(whole) == pytest.approx(float(single), rel=1e-10)


def _answers(batch: Batch) -> list[list[int]]:
    rows = (labels[labels >= 0].tolist() for labels in batch.shift_labels)
    return list(rows)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_targets_are_the_answers_whatever_the_media_become(tmp_path: Path, family: str, kind: str) -> None:
    packed = _prepared(tmp_path, family, kind)
    batch = _batch(packed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(packed.tokenizer_dir)
    one, two, three, four = (f"{answer}<|im_end|>" for answer in ANSWERS)
    expected = [one, two, three + four, one]
    assert [tokenizer.decode(row) for row in _answers(batch)] == expected
    assert batch.position_ids is None
    assert batch.num_real is not None
    assert batch.num_real[0] > batch.num_real[3]


def test_swapped_images_change_the_loss(tmp_path: Path) -> None:
    first = _batch(_prepared(tmp_path, "llava"))
    model = _model(tmp_path / "model")
    pictures = tmp_path / "pictures"
    (pictures / "0.png").rename(pictures / "swapped.png")
    (pictures / "2.png").rename(pictures / "0.png")
    (pictures / "swapped.png").rename(pictures / "2.png")
    (tmp_path / "train.jsonl").touch()
    second = _batch(_prepared_again(tmp_path))
    with torch.no_grad():
        losses = [
            float(model(**_inputs(batch), labels=_inputs(batch)["shift_labels"]).loss) for batch in (first, second)
        ]
    assert (first.input_ids == second.input_ids).all()
    assert abs(losses[0] - losses[1]) > 1e-4


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("family", MEDIA)
def test_two_hundred_steps_of_any_mixture_on_two_ranks_end(tmp_path: Path, family: str) -> None:
    needs_torchvision(family)
    write_model(family, tmp_path / "model")
    source = write_data(tmp_path, kind=MEDIA[family][0])
    lines = source.read_text().splitlines(keepends=True)
    chosen = np.random.default_rng(0).integers(0, len(lines), 400)
    source.write_text("".join(lines[i] for i in chosen))
    packed = _prepared_again(tmp_path)
    batches = Batches(packed.train, sequences_per_step=2, order=Order(shuffle=False))

    def losses(world: Any, layout: str) -> list[float]:
        model = _model(tmp_path / "model")
        hp.parallelize(model, hp.plan_of(model, layout), world)
        rank, size = hp.data_share(model)
        found = []
        for step in range(200):
            parts = batches.microbatches(step, rank, size, 1, 2 // size)
            found.append(float(hp.forward_backward(model, [_inputs(part) for part in parts])))
            model.zero_grad()
        return found

    expected = losses(hp.World.join("cpu"), "")

    def rank(number: int) -> list[float]:
        with hp.World.join("cpu") as world:
            return losses(world, "dp_shard=2")

    for found in hp.launch(rank, 2, timeout_s=500):
        assert found == pytest.approx(expected, rel=1e-10)


LAYOUTS = ("dp_shard=2", "dp_replicate=2", "dp_shard=2 zero=1", "tp=2", "pp=2")
STEPS = ("iitt", "ttit", "tttt", "iiii", "titi")
"""Rows of each step with an item (i) or text only (t); the first two belong to rank 0 of two data ranks."""


@slow_cells("llava", "qwen2_audio", *SLOW)
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("family", MEDIA)
def test_ranks_with_and_without_media_repeat_one_rank(tmp_path: Path, family: str) -> None:
    needs_torchvision(family)
    write_model(family, tmp_path / "model")
    source = write_data(tmp_path, kind=MEDIA[family][-1])
    (_, pictured, _, text) = source.read_text().splitlines(keepends=True)
    source.write_text("".join(pictured if kind == "i" else text for kind in "".join(STEPS)))
    packed = _prepared_again(tmp_path)
    batches = Batches(packed.train, sequences_per_step=4, order=Order(shuffle=False))

    def found(layout: str, world: Any) -> list[tuple[float, dict[str, Tensor | None]]]:
        model = _model(tmp_path / "model")
        hp.parallelize(model, hp.plan_of(model, layout), world)
        rank, size = hp.data_share(model)
        results = []
        for step in range(len(STEPS)):
            parts = batches.microbatches(step, rank, size, 1, 4 // size)
            loss = float(hp.forward_backward(model, [_inputs(part) for part in parts]))
            grads = {
                n: None if p.grad is None else getattr(p.grad, "full_tensor", p.grad.clone)()
                for n, p in model.named_parameters()
            }
            model.zero_grad()
            results.append((loss, grads))
        return results

    expected = found("", hp.World.join("cpu"))

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            for layout in LAYOUTS:
                for (loss, grads), (wanted, right) in zip(found(layout, world), expected, strict=True):
                    assert loss == pytest.approx(wanted, rel=1e-10), layout
                    for name, gradient in grads.items():
                        assert (gradient is None) == (right[name] is None), (layout, name)
                        if gradient is not None:
                            torch.testing.assert_close(gradient, right[name], rtol=1e-10, atol=1e-12)

    hp.launch(rank, 2, timeout_s=200)
