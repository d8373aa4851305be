"""Runs on conversations with no image or several: balanced by cost, in the order of the data, and resumed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaModel

from hyper_parallel.errors import Contradiction
from hyper_parallel.trainer import Job, run_start
from tests.e2e.runs import CONFIG, assert_same_curve, curve, rows, train
from tests.media.records import ANSWERS
from tests.media.tiny_models import write_images, write_lines, write_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


def _record(number: int, num_images: int) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "<image>" * num_images + "what is this"},
        {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
    ]
    return {"messages": turns, "images": ["pictures/0.png"] * num_images}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with no image, with one, or with six."""
    folder = tmp_path_factory.mktemp("balance")
    write_model("llava", folder / "model")
    write_images(folder, [(20, 20)])
    draws = random.Random(0)
    records = [_record(number, draws.choice((0, 0, 1, 1, 1, 6))) for number in range(48)]
    source = write_lines(folder / "train.jsonl", records)
    (folder / "recipe.yaml").write_text(
        f"model: {{path: {folder / 'model'}}}\nstage: sft\n"
        f"data: {{source: {source}, seq_len: 160, packing: false, cache_dir: {folder / 'cache'}}}\n"
        "training: {steps: 3, microbatch: 1, accumulation_steps: 4, dtype: float64}\n"
        "checkpoint: {export: false}\n"
    )
    return folder


def test_balanced_ranks_repeat_the_order_of_the_data(place: Path) -> None:
    train(place, place / "given", "parallel.dp_shard=2", "data.balance=none")
    train(place, place / "cost", "parallel.dp_shard=2", "training.steps=1", "checkpoint.every=1")
    train(place, place / "cost", "parallel.dp_shard=2", report=True)  # resumed in the middle
    assert_same_curve(curve(place / "cost"), curve(place / "given"))
    assert "balance" not in rows(place / "given" / "metrics.jsonl")[0]
    measured = [row["balance"] for row in rows(place / "cost" / "metrics.jsonl")]
    assert len(measured) == 3
    for balance in measured:
        assert 1 <= balance["balanced"] <= balance["in_order"]
        assert balance["media_tokens"] > 0
    assert sum(b["balanced"] for b in measured) < 0.85 * sum(b["in_order"] for b in measured)
    (note,) = (n for n in json.loads((place / "cost" / "plan.json").read_text())["notes"] if "balance" in n)
    assert "the slowest of 2 ranks computes 1." in note
    assert "images and audio: slowest rank over mean" in (place / "cost" / "report.html").read_text()


@pytest.mark.slow
def test_ranks_with_other_costs_train_on_every_record_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of torchrun fit costs each by itself; those of rank 0 determine the order of all."""
    train_rank = run_start.train_rank

    def other_costs(job: Job, rank: int, *arguments: Any) -> Any:
        return train_rank(replace(job, media_costs=(0, 1 - rank)), rank, *arguments)

    monkeypatch.setattr(run_start, "train_rank", other_costs)
    train(place, tmp_path / "cost", "parallel.dp_shard=2")
    monkeypatch.undo()
    train(place, tmp_path / "given", "parallel.dp_shard=2", "data.balance=none")
    assert_same_curve(curve(tmp_path / "cost"), curve(tmp_path / "given"))


@pytest.mark.slow
def test_a_balanced_run_goes_on_with_another_number_of_ranks_and_a_saved_plan(place: Path, tmp_path: Path) -> None:
    batch = ("training.accumulation_steps=null", "training.tokens_per_step=1280")
    train(
        place,
        tmp_path / "run",
        "training.steps=1",
        "checkpoint.every=1",
        "parallel.dp_shard=2",
        *batch,
    )
    saved = tmp_path / "run" / "plan.json"
    train(place, tmp_path / "saved", "--plan", str(saved), "training.steps=1", *batch)
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("run", "saved")]
    notes = [[n for n in plan["notes"] if n.startswith("data.balance")] for plan in plans]
    assert len(notes[0]) == 1
    assert notes[0] == notes[1]
    train(place, tmp_path / "run", "parallel.dp_shard=1", "checkpoint.export=true", *batch)
    train(place, tmp_path / "given", "parallel.dp_shard=1", "data.balance=none", *batch)
    assert_same_curve(curve(tmp_path / "run"), curve(tmp_path / "given"))
    assert (tmp_path / "run" / "export" / "config.json").exists()


@pytest.fixture(scope="module")
def alone(place: Path) -> list[tuple[float, float]]:
    train(place, place / "alone", "parallel.dp_shard=1", "training.accumulation_steps=5")
    return curve(place / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tower", "language"),
    [("dp_shard", "tp_x"), ("dp_replicate", "tp_x"), ("dp_replicate", "pp")],
)
def test_towers_get_microbatches_by_cost_and_repeat_the_order_of_the_data(
    place: Path, alone: list[tuple[float, float]], tower: str, language: str
) -> None:
    out = place / f"{tower}_{language}"
    parts = f"{{vision: {{{tower}: 2, ranks: [0, 1]}}, language: {{{language}: 2}}}}"
    train(place, out, f"parallel.submodels={parts}", "training.accumulation_steps=5")
    assert_same_curve(curve(out), alone)
    measured = [row["balance"] for row in rows(out / "metrics.jsonl")]
    if language == "pp":  # the schedule gives all microbatches to one rank, and only their order can change
        assert all(b["predicted_s"] <= b["predicted_in_order_s"] for b in measured)
    else:
        assert sum(b["balanced"] for b in measured) < sum(b["in_order"] for b in measured)


@pytest.mark.slow
def test_an_encoder_that_runs_once_per_image_trains_when_later_steps_have_more(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's parameters belong to the root of the model, which is gathered once per pass."""
    together = LlavaModel.get_image_features

    def per_image(self: LlavaModel, pixel_values: Any, **options: Any) -> Any:
        parts = [together(self, pixel_values=one[None], **options) for one in pixel_values]
        parts[0].pooler_output = [image for part in parts for image in part.pooler_output]
        return parts[0]

    monkeypatch.setattr(LlavaModel, "get_image_features", per_image)
    counts = [1] * 10 + [2] * 4
    write_lines(place / "growing.jsonl", [_record(number, n) for number, n in enumerate(counts)])
    options = (
        f"data.source={place / 'growing.jsonl'}",
        "data.shuffle=false",
        "data.holdout=0",
        "training.steps=6",
        "training.tokens_per_step=320",
        "training.accumulation_steps=null",
    )
    train(place, tmp_path / "one", "parallel.dp_shard=1", *options)
    for name, order in (("two", "true"), ("agreed", "false")):
        train(place, tmp_path / name, "parallel.dp_shard=2", f"parallel.one_order={order}", *options)
        assert_same_curve(curve(tmp_path / name), curve(tmp_path / "one"))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (("data.streaming=true", "data.holdout=0"), "a stream[\\s\\S]*data.balance=auto"),
        (("stage=dpo", "data.packing=null"), "stage: sft[\\s\\S]*data.balance=auto"),
        (
            ("model.path=TEXT", "data.tokenizer=MODEL", "data.source=WORDS"),
            "records have none[\\s\\S]*data.balance=auto",
        ),
    ],
)
def test_records_without_costs_are_refused_before_training(place: Path, overrides: tuple[str, ...], match: str) -> None:
    (place / "text.json").write_text(json.dumps(CONFIG))
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "one"}]
    write_lines(place / "words.jsonl", [{"messages": turns}] * 8)
    paths = {"TEXT": "text.json", "MODEL": "model", "WORDS": "words.jsonl"}
    words = [
        word.replace(name, str(place / paths[name])) if (name := word.partition("=")[2]) in paths else word
        for word in overrides
    ]
    with pytest.raises(Contradiction, match=f"HP104[\\s\\S]*{match}"):
        train(place, place / "refused", "parallel.dp_shard=1", "data.balance=cost", *words)
    assert not (place / "refused" / "metrics.jsonl").exists()
