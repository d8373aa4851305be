"""What the `training` section lets a user choose: optimizer, callbacks, profiles; through the command."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hyper_parallel.errors import (
    BadValue,
    CollectiveMismatch,
    Contradiction,
    NotImportable,
    RanksDisagree,
)
from tests.e2e.runs import CONFIG, assert_same_curve, curve, rows, train, write_functions

pytestmark = pytest.mark.e2e

MINE = '''
import torch
from hyper_parallel.trainer import Callback

class Halved(torch.optim.SGD):
    """SGD with half the learning rate."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2
        super().step(closure)

class Stops(Callback):
    """Writes down what it is called with, and stops after step 3."""

    def _note(self, *what):
        with open(f"told{self.rank}.txt", "a") as file:
            print(*what, file=file)

    def on_train_begin(self, job):
        self._note("begin", job.recipe.training.steps)

    def on_step_end(self, step, metrics):
        self._note("step", step, metrics["loss"])
        return step == 3 and self.rank == 1

    def on_evaluate(self, step, metrics):
        self._note("evaluate", step)

    def on_save(self, step):
        self._note("save", step)

    def on_train_end(self, step):
        self._note("end", step)

class Unequal(Callback):
    """Calls a collective with other shapes on every rank."""

    def on_step_end(self, step, metrics):
        if step == 2:
            torch.distributed.all_reduce(torch.ones(4 + self.rank))
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    write_functions(tmp_path / "text.txt", 300)
    recipe = {
        "model": {"path": str(tmp_path / "model.json")},
        "data": {
            "source": str(tmp_path / "text.txt"), "seq_len": 32, "vocab_size": 300,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "steps": 4, "dtype": "float64", "tokens_per_step": 128, "warmup_steps": 1,
            "eval_tokens": 64, "weight_decay": 0.0, "lr": 0.01, "lr_schedule": "constant",
        },
        "parallel": {"dp_shard": 1},
        "checkpoint": {"export": False},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_optimizers_learn_the_same_on_every_layout_and_after_a_checkpoint(place: Path) -> None:
    one = {}
    for name in ("sgd", "muon", "adafactor"):
        train(place, place / name, f"training.optimizer={name}")
        one[name] = curve(place / name)
        assert one[name][-1][0] < one[name][0][0]
    assert len({losses[-1][0] for losses in one.values()}) == 3
    plan = (place / "muon" / "plan.json").read_text()
    assert "optimizer states and time of muon are predicted as for adamw" in plan
    half = ("training.optimizer=mine_of_a_test.Halved", "training.lr=0.02")
    train(place, place / "own", *half, "parallel.dp_shard=2")
    assert_same_curve(curve(place / "own"), one["sgd"])
    train(place, place / "parts", "training.optimizer=muon", "training.steps=2")
    train(place, place / "parts", "training.optimizer=muon", "parallel.pp=2")
    assert_same_curve(curve(place / "parts"), one["muon"])
    # Rows and columns of a replicated matrix; its states are read again by one rank.
    whole = ("training.optimizer=adafactor", "parallel.dp_shard=1")
    train(place, place / "replicas", *whole, "training.steps=2", "parallel.dp_replicate=2")
    train(place, place / "replicas", *whole)
    assert_same_curve(curve(place / "replicas"), one["adafactor"])


def test_a_callback_sees_the_run_and_stops_it(place: Path) -> None:
    train(
        place, place / "out", "training.callbacks=[mine_of_a_test.Stops]", "parallel.dp_shard=2",
        "checkpoint.every=2", "training.profile={start: 2, steps: 5, ranks: all}", "training.steps=9",
        report=True,
    )  # fmt: skip
    metrics = rows(place / "out" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]  # one rank asked, both have stopped
    losses = [f"step {row['step']} {row['loss']}" for row in metrics]
    told = [
        "begin 9",
        "evaluate 0",
        *losses[:2],
        "save 2",
        losses[2],
        "evaluate 3",
        "save 3",
        "end 3",
    ]
    for rank in range(2):
        assert (place / f"told{rank}.txt").read_text().splitlines() == told
        trace = json.loads((place / "out" / "profile" / f"rank{rank}.json").read_text())
        assert any("optim" in event.get("name", "").lower() for event in trace["traceEvents"])


def test_collectives_that_do_not_fit_are_named_when_the_recipe_asks(place: Path) -> None:
    with pytest.raises(CollectiveMismatch, match=r"ALLREDUCE, TensorShape=\[[45]\]") as found:
        train(
            place, place / "out", "training.callbacks=[mine_of_a_test.Unequal]",
            "training.debug_collectives=true", "parallel.dp_shard=2",
        )  # fmt: skip
    assert "Detected mismatch between collectives on ranks" in found.value.what
    assert [row["step"] for row in rows(place / "out" / "metrics.jsonl")] == [1]


@pytest.mark.slow
def test_a_rank_that_computes_other_bits_is_named(place: Path, monkeypatch) -> None:
    checked = ("training.check_ranks_every=2", "training.deterministic=true", "training.steps=3")
    train(place, place / "plain", "parallel.dp_shard=2", "training.steps=3")
    train(place, place / "checked", *checked, "parallel.dp_shard=2")
    assert curve(place / "checked") == curve(place / "plain")

    forward, calls = Qwen3MLP.forward, []

    def faulty(self, x):
        """Rank 1 adds the least bit, of three ranks always, of two from time to time."""
        calls.append(x)
        y = forward(self, x)
        bad = os.environ["RANK"] == "1" and (os.environ["WORLD_SIZE"] == "3" or len(calls) % 5 == 0)
        return y * (1 + 2**-52) if bad else y

    monkeypatch.setattr(Qwen3MLP, "forward", faulty)
    three = ("parallel.dp_shard=3", "training.tokens_per_step=96")
    for ranks, how in ((three, "the other ranks agree"), (("parallel.dp_shard=2",), "a repeat on")):
        with pytest.raises(RanksDisagree, match=rf"rank 1 computed a bitwise different .*; {how}") as found:
            train(place, place / how, *checked, *ranks)
        assert found.value.where == "step 2"


@pytest.mark.slow
def test_float16_scales_the_loss_and_a_resumed_run_goes_on_with_its_scale(place: Path) -> None:
    half = "training.dtype=fp16"
    train(place, place / "half", half, "training.steps=2")
    train(place, place / "half", half, "parallel.dp_shard=2")
    train(place, place / "whole", "training.dtype=float32")
    metrics = rows(place / "half" / "metrics.jsonl")
    scales = [row["loss_scale"] for row in metrics]
    assert scales[0] == 65536.0
    for row, then in zip(metrics[1:], metrics, strict=False):
        assert row["loss_scale"] == then["loss_scale"] / (2 if then["skipped"] else 1)
    assert metrics[-1]["skipped"] == 0
    plain = curve(place / "whole")
    for row, (loss, _) in zip(metrics, plain, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=2e-3)
    assert "loss_scale" not in rows(place / "whole" / "metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("error", "overrides", "says"),
    [
        (BadValue, ["training.optimizer=adamx"], "unknown optimizer `adamx`"),
        (NotImportable, ["training.optimizer=mine_of_a_test.Nothing"], "has no attribute"),
        (NotImportable, ["training.optimizer=mine_of_a_test.Stops"], "torch.optim.optimizer.Optimizer"),
        (NotImportable, ["training.callbacks=[no_such_module.Mine]"], "No module named"),
        (BadValue, ["training.optimizer_args={nesterof: true}"], "nesterof"),
        (BadValue, ["training.optimizer=torch.optim.LBFGS"], "training.optimizer=adamw"),
        (Contradiction, ["training.optimizer=muon", "parallel.tp=2"], "tp=2"),
        (Contradiction, ["training.optimizer=adafactor", "parallel.dp_shard=2"], "dp_shard=2"),
        (Contradiction, ["training.optimizer=torch.optim.Adafactor", "parallel.tp=2"], "tp=2"),
        (Contradiction, ["training.optimizer=torch.optim.Rprop", "parallel.dp_shard=2"], "on sharded parameters"),
        (Contradiction, ["training.optimizer=torch.optim.Rprop", "parallel.dp_replicate=2"], "on replicated"),
        (Contradiction, ["training.optimizer=torch.optim.SparseAdam"], "dense"),
        (Contradiction, ["training.optimizer=sgd", "offload.budget=1GiB"], "offload supports"),
        (Contradiction, ["training.dtype=float16", "offload.budget=1GiB"], "training.dtype=bfloat16"),
        (Contradiction, ["training.profile={start: 4, steps: 2}"], "training.profile.start=3"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_ranks_start(place, error, overrides, says) -> None:
    with pytest.raises(error, match=re.escape(says)):
        train(place, place / "out", *overrides)
    assert not (place / "out" / "metrics.jsonl").exists()
