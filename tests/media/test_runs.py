"""Runs of the command on images and audio: layouts, adapters, frozen towers, continuation, export and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2AudioForConditionalGeneration,
)

from hyper_parallel.errors import (
    Contradiction,
    HyperParallelError,
    ModelUnreadable,
    NoData,
    UnsupportedSharding,
)
from tests.e2e.runs import assert_same_curve, curve, rows, train
from tests.media.records import write_place
from tests.media.tiny_models import needs_torchvision, write_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
TRAINING = "steps: 2, tokens_per_step: 384"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("images"), TRAINING, validation=True)


def test_layouts_repeat_one_rank_and_the_export_reads_images(place: Path) -> None:
    options = ("parallel.dp_shard=1", "checkpoint.export=true", "sample_answers=64")
    train(place, place / "one", *options, report=True)
    answers = json.loads((place / "one" / "answers.json").read_text())
    assert [len(row["images"]) for row in answers] == [2, 1, 2, 0] * 3
    (image,) = answers[1]["images"]
    page = (place / "one" / "report.html").read_text()
    assert f"data:image/png;base64,{image}" in page[page.index("Held-out answers") :]
    train(place, place / "two", "parallel.dp_shard=2", "checkpoint.every=1", "training.steps=1")
    train(place, place / "two", "parallel.dp_shard=2")
    assert_same_curve(curve(place / "two"), curve(place / "one"))
    train(place, place / "stages", "parallel.pp=2")
    assert_same_curve(curve(place / "stages"), curve(place / "one"))
    model = AutoModelForImageTextToText.from_pretrained(place / "one" / "export")
    processor = AutoProcessor.from_pretrained(place / "one" / "export")
    image = np.zeros((20, 20, 3), np.uint8)
    turn = {"role": "user", "content": [{"type": "image", "image": image}]}
    inputs = processor.apply_chat_template([turn], tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


@pytest.mark.slow
def test_conversations_with_images_are_padded_although_packing_is_asked_for(place: Path) -> None:
    train(place, place / "padded", "parallel.dp_shard=1", "data.packing=false")
    train(place, place / "packed", "parallel.dp_shard=1", "data.packing=true")
    assert_same_curve(curve(place / "packed"), curve(place / "padded"))


@pytest.mark.slow
def test_recordings_train_alike_on_two_ranks_and_the_export_reads_them(tmp_path: Path) -> None:
    write_place(tmp_path, TRAINING, family="qwen2_audio", kind="audio")
    train(tmp_path, tmp_path / "one", "parallel.dp_shard=1", "checkpoint.export=true", report=True)
    train(tmp_path, tmp_path / "two", "parallel.dp_shard=2")
    assert_same_curve(curve(tmp_path / "two"), curve(tmp_path / "one"))
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "one" / "export")
    processor = AutoProcessor.from_pretrained(tmp_path / "one" / "export")
    turn = {"role": "user", "content": [{"type": "audio", "audio": np.zeros(4000, np.float32)}]}
    inputs = processor.apply_chat_template([turn], tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


@pytest.mark.slow
def test_adapters_and_a_frozen_tower_train_the_language_part(place: Path) -> None:
    frozen = "training.freeze=['model.vision_tower.*']"
    train(place, place / "frozen", "parallel.dp_shard=2", frozen)
    train(place, place / "frozen_one", "parallel.dp_shard=1", frozen)
    assert_same_curve(curve(place / "frozen"), curve(place / "frozen_one"))
    train(place, place / "lora", "parallel.dp_shard=2", "lora.r=2")
    losses = [row["loss"] for row in rows(place / "lora" / "metrics.jsonl")]
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_a_trained_tower_of_a_frozen_model_skips_microbatches_of_text(place: Path) -> None:
    """The records have 2, 1, 2 and 0 images, so the microbatches of a step differ."""
    options = ("training.freeze=['lm_head.*','model.language_model.*']", "training.microbatch=1")
    train(place, place / "tower_one", "parallel.dp_shard=1", *options)
    expected = rows(place / "tower_one" / "metrics.jsonl")
    assert all(row["grad_norm"] > 0.0 for row in expected)
    train(place, place / "tower_stages", "parallel.pp=2", *options)
    assert_same_curve(curve(place / "tower_stages"), curve(place / "tower_one"))
    norms = [row["grad_norm"] for row in rows(place / "tower_stages" / "metrics.jsonl")]
    assert norms == pytest.approx([row["grad_norm"] for row in expected], rel=1e-9)
    train(place, place / "tower_data", "parallel.dp_shard=2", *options)
    assert_same_curve(curve(place / "tower_data"), curve(place / "tower_one"))


@pytest.mark.parametrize(
    ("override", "code", "match"),
    [
        ("parallel.cp=2", UnsupportedSharding, "HP205[\\s\\S]*pixel_values[\\s\\S]*parallel.cp=1"),
        (
            "parallel.dp_shard=1 offload.max_slowdown=0.5",
            Contradiction,
            "HP104[\\s\\S]*hint: offload=null",
        ),
        ("data.streaming=true", NoData, "HP602[\\s\\S]*data.streaming=false"),
    ],
)
def test_a_layout_without_support_for_images_is_refused_before_training(
    place: Path, override: str, code: type[HyperParallelError], match: str
) -> None:
    with pytest.raises(code, match=match):
        train(place, place / "refused", *override.split())
    assert not (place / "refused" / "metrics.jsonl").exists()


def test_a_model_class_that_ignores_images_is_refused(place: Path, tmp_path: Path) -> None:
    needs_torchvision("llama4")
    write_model("llama4", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("ForConditionalGeneration", "ForCausalLM"))
    model = f"model.path={tmp_path / 'model'}"
    options = ("model.init=random", "training.tokens_per_step=96", "parallel.dp_shard=1")
    with pytest.raises(ModelUnreadable, match=r"HP305[\s\S]*pixel_values"):
        train(place, tmp_path / "run", model, *options)
