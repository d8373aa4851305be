"""Continuations of prompts with images or audio: those of transformers' own generation, with and without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image

from hyper_parallel.backends.torch.decode_slots import GrowingPasses
from hyper_parallel.errors import BadValue, Contradiction, NoData
from hyper_parallel.trainer.data import encode_parts
from hyper_parallel.trainer.decoding import Sampling
from hyper_parallel.trainer.generation import Generator
from hyper_parallel.trainer.generation_memory import DeviceMemory
from tests.media.tiny_models import (
    MEDIA,
    needs_torchvision,
    write_images,
    write_model,
    write_recordings,
)
from tests.slow import slow_cells

transformers = pytest.importorskip("transformers")

CASES = [(family, kind) for family, kinds in MEDIA.items() for kind in kinds]
FAST = (("llava", "image"), ("qwen2_audio", "audio"))
GREEDY = Sampling(8, temperature=0.0)


def _turns(folder: Path, kind: str) -> list[dict[str, Any]]:
    names = write_images(folder, ((20, 20), (36, 24)))
    if kind == "audio":
        names = write_recordings(folder, (4000, 9000))
    items = [{"type": kind, kind: str(folder / name)} for name in names]
    return [{"role": "user", "content": [*items, {"type": "text", "text": "what is this"}]}]


def _loaded(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image", "image": Image.open(part["image"]).convert("RGB")}
    if part["type"] == "audio":
        return {"type": "audio", "audio": soundfile.read(part["audio"], dtype="float32")[0]}
    return part


def _expected(folder: Path, turns: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of greedy decoding by transformers alone."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float64)
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        # Without this attribute of its language model's output, its forward raises in transformers 5.24.
        model.language_model.register_forward_hook(lambda module, args, output: setattr(output, "image_outputs", None))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    parts = [_loaded(part) for part in turns[0]["content"]]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    doubles = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.eval().generate(**doubles, **options)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@slow_cells(*[case for case in CASES if case not in FAST])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: tuple[str, str]) -> None:
    family, kind = case
    needs_torchvision(family)
    write_model(family, tmp_path / "model")
    turns = _turns(tmp_path, kind)
    expected = _expected(tmp_path / "model", turns)
    generator = Generator(tmp_path / "model", device="cpu", dtype="float64")
    generator.model.generation_config.eos_token_id = None
    ids, media = encode_parts(generator.tokenizer, turns)
    for cached in (True, False):
        passes = GrowingPasses(generator.model, media.arrays, media.per_token)
        passes._caches = cached
        logits, tokens = passes.read_tokens([0], [ids], [0]), []
        for _ in expected:
            tokens.append(int(logits.argmax()))
            logits = passes.read_tokens([0], [tokens[-1:]], [len(ids) + len(tokens) - 1])
        assert tokens == expected, cached
    stop = generator.tokenizer.eos_token_id
    until = expected[: expected.index(stop)] if stop in expected else expected
    assert list(generator.generate(turns, GREEDY, chat=True).token_ids) == until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_model("llava", folder / "model")
    write_images(folder, ((20, 20), (36, 24)))
    return folder


def _command(*words: object) -> Any:
    from typer.testing import CliRunner

    from hyper_parallel.cli import application

    return CliRunner().invoke(application("generate"), ["generate", *map(str, words)])


def test_the_command_shows_an_image_to_the_model(place: Path) -> None:
    words = (place / "model", "--prompt", "what is this", "--temperature", 0, "--json")
    one, two, text = (
        json.loads(_command(*words, "--max-new-tokens", 4, *image).stdout)
        for image in (
            ("--image", place / "pictures/0.png"),
            ("--image", place / "pictures/1.png"),
            ("--chat",),
        )
    )
    assert one["num_prompt_tokens"] > text["num_prompt_tokens"]
    assert one["logprobs"] != two["logprobs"]


def test_media_without_support_are_refused(place: Path) -> None:
    turns = _turns(place, "image")
    memory = DeviceMemory.parse("64MiB", None, None, "local")
    within = Generator(place / "model", device="cpu", memory=memory)
    with pytest.raises(Contradiction, match="--device-memory does not support"):
        within.generate(turns, GREEDY, chat=True)
    generator = Generator(place / "model", device="cpu")
    with pytest.raises(BadValue, match="cannot be batched"):
        generator.generate_batch([turns], GREEDY, chat=True)  # type: ignore[list-item]
    missing = _command(place / "model", "--prompt", "what", "--image", place / "no.png").exception
    assert isinstance(missing, NoData)
    assert "no.png" in str(missing.got)
    assert missing.hint is None
    with pytest.raises(BadValue, match="--image needs --prompt"):
        raise _command(place / "model", "--image", "a.png").exception
