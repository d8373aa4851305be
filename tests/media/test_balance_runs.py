"""Runs on conversations with no image or several: balanced by cost, in the order of the data, and resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hyper_parallel.errors import Contradiction
from tests.e2e.runs import CONFIG, assert_same_curve, curve, rows, train
from tests.media.records import ANSWERS
from tests.media.tiny_models import write_images, write_lines, write_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with no image, with one, or with six."""
    folder = tmp_path_factory.mktemp("balance")
    write_model("llava", folder / "model")
    (name,) = write_images(folder, [(20, 20)])
    draws = random.Random(0)
    records = []
    for number in range(48):
        used = [name] * draws.choice((0, 0, 1, 1, 1, 6))
        turns = [
            {"role": "user", "content": "<image>" * len(used) + "what is this"},
            {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
        ]
        records.append({"messages": turns, "images": used})
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
    (note,) = (
        n for n in json.loads((place / "cost" / "plan.json").read_text())["notes"] if "balance" in n
    )
    assert "the slowest of 2 ranks computes 1." in note
    assert (
        "images and audio: slowest rank over mean" in (place / "cost" / "report.html").read_text()
    )


@pytest.mark.slow
def test_towers_get_microbatches_by_cost_and_repeat_the_order_of_the_data(place: Path) -> None:
    train(place, place / "alone", "parallel.dp_shard=1", "training.accumulation_steps=5")
    for number, tower in enumerate(
        ("dp_shard: 2, ranks: [0, 1]", "dp_replicate: 2, ranks: [0, 1]")
    ):
        for name, language in (("tp", "tp_x: 2"), ("pp", "pp: 2")):
            if (number, name) == (0, "pp"):
                continue
            out = place / f"tower_{name}{number}"
            parts = f"parallel.submodels={{vision: {{{tower}}}, language: {{{language}}}}}"
            train(place, out, parts, "training.accumulation_steps=5")
            assert_same_curve(curve(out), curve(place / "alone"))
            measured = [row["balance"] for row in rows(out / "metrics.jsonl")]
            assert sum(b["balanced"] for b in measured) < sum(b["in_order"] for b in measured)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (("data.streaming=true", "data.holdout=0"), "a stream[\\s\\S]*data.balance=auto"),
        (("stage=dpo", "data.packing=null"), "stage: sft[\\s\\S]*data.balance=auto"),
        (
            ("model.path=TEXT", "data.tokenizer=MODEL", "data.source=WORDS"),
            "these have none[\\s\\S]*data.balance=auto",
        ),
    ],
)
def test_records_without_costs_are_refused_before_training(
    place: Path, overrides: tuple[str, ...], match: str
) -> None:
    (place / "text.json").write_text(json.dumps(CONFIG))
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "one"}]
    write_lines(place / "words.jsonl", [{"messages": turns}] * 8)
    paths = {"TEXT": "text.json", "MODEL": "model", "WORDS": "words.jsonl"}
    words = [
        word.replace(name, str(place / paths[name]))
        if (name := word.partition("=")[2]) in paths
        else word
        for word in overrides
    ]
    with pytest.raises(Contradiction, match=f"HP104[\\s\\S]*{match}"):
        train(place, place / "refused", "parallel.dp_shard=1", "data.balance=cost", *words)
    assert not (place / "refused" / "metrics.jsonl").exists()
