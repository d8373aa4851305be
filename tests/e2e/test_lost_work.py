"""Weights that overflow replace no good checkpoint, and a run whose directory is gone says so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from hyper_parallel.errors import LossNotFinite, OutputNotWritable, RunDirectoryLost
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.engine import step_loop
from tests.e2e.runs import command, make_place, published, rows, start, train, wait_for_steps
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e
FEW = ("training.eval_tokens=100", "training.report_to=[]", "training.warmup_steps=0")
OVERFLOWS = """
import torch
from hyper_parallel.trainer import Callback

class Overflow(torch.optim.SGD):
    '''Plain steps, and one after which a weight is infinite although loss and gradient are finite.'''

    done = 0

    def step(self, closure=None):
        super().step(closure)
        Overflow.done += 1
        if Overflow.done == 3:
            value = list(self.param_groups[0]["params"])[1].data
            getattr(value, "_local_tensor", value).view(-1)[:1].fill_({value})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("lost"))


@pytest.fixture
def overflowing(tmp_path, monkeypatch):
    """The words of a run whose third update makes a weight infinite."""
    (tmp_path / "mine_overflows.py").write_text(OVERFLOWS.replace("{value}", "float('inf')"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return ("training.optimizer=mine_overflows.Overflow", "training.steps=6", "checkpoint.every=1")


WAYS = [
    ("checkpoint.keep=1",),
    ("checkpoint.keep=1", "checkpoint.asynchronous=false", "parallel.dp_shard=2"),
    ("checkpoint.keep=1", "lora={r: 2}", "checkpoint.export=false"),
]


@slow_cells(*WAYS[1:])
@pytest.mark.parametrize("words", WAYS)
def test_weights_that_overflow_are_not_saved_and_the_hint_goes_on(place, tmp_path, overflowing, words):
    out = tmp_path / "out"
    with pytest.raises(LossNotFinite, match=r"HP604.*nothing is saved") as failed:
        train(place, out, *FEW, *overflowing, *words, "training.eval_every=0")
    assert published(out) == ["step_00000002"]
    assert re.search(r"`(model|optimizer\.state)\.\S+`", failed.value.what)
    assert "newest checkpoint: step 2" in failed.value.got
    words = shlex.split(failed.value.hint)
    assert words[:2] == ["hyper-parallel", "train"]
    assert f"{out}/config.yaml" in words
    command(*words[1:], "training.steps=4", "--no-calibrate")
    assert [r["step"] for r in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]


@slow_cells("3e38")
@pytest.mark.parametrize("lr", ["1e39", "3e38"])
def test_a_first_update_that_overflows_leaves_no_export(place, tmp_path, lr):
    out = tmp_path / "out"
    words = (
        f"training.lr={lr}",
        "training.steps=1",
        "training.warmup_steps=0",
        "training.dtype=float32",
    )
    with pytest.raises(LossNotFinite, match="HP604"):
        train(place, out, *FEW, *words)
    assert not (out / "export").exists()
    assert published(out) == []


def test_a_held_out_loss_that_is_not_finite_ends_the_run_before_it_is_saved(place, tmp_path, monkeypatch):

    honest, calls = step_loop.forward_loss, []

    def broken(*args, **more):
        calls.append(1)
        return honest(*args, **more) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(step_loop, "forward_loss", broken)
    out, words = (
        tmp_path / "out",
        ("training.eval_every=1", "checkpoint.every=1", "checkpoint.keep=5"),
    )
    with pytest.raises(LossNotFinite, match="held-out loss is not finite") as failed:
        train(place, out, *FEW, *words)
    assert failed.value.where == "evaluation after step 2"
    assert published(out) == ["step_00000001"]
    monkeypatch.undo()
    command(*shlex.split(failed.value.hint)[1:], "--no-calibrate")
    assert [r["step"] for r in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_an_export_in_a_dtype_of_a_smaller_range_is_refused(place, tmp_path):
    out = tmp_path / "out"
    words = (
        "training.lr=1e6",
        "training.steps=1",
        "training.warmup_steps=0",
        "checkpoint.export=false",
    )
    train(place, out, *FEW, *words, "data.holdout=0")
    with pytest.raises(LossNotFinite, match="not finite in float16"):
        command("checkpoint", "export", str(out), "--dtype", "float16", "--out", str(tmp_path / "half"))
    assert not (tmp_path / "half").exists()
    assert not (tmp_path / ".half.tmp").exists()
    command("checkpoint", "export", str(out), "--out", str(tmp_path / "whole"))


def removed(out: Path, place: Path) -> None:
    shutil.rmtree(out)


def moved(out: Path, place: Path) -> None:
    out.rename(place / "elsewhere")


def replaced(out: Path, place: Path) -> None:
    out.rename(place / "elsewhere")
    out.mkdir()
    (out / "thesis.txt").write_text("mine")


@slow_cells("replaced", removed, moved)
@pytest.mark.parametrize("how", [removed, moved, replaced])
def test_a_run_whose_directory_is_gone_ends_at_its_next_record(place, tmp_path, how):
    out = tmp_path / "out"
    words = (*FEW, "training.steps=100000", "checkpoint.every=5", "checkpoint.export=false")
    with start(place, out, *words) as process:
        wait_for_steps(process, out, 12)
        how(out, tmp_path)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "error[HP721]" in errors
    if how is removed:
        assert "no checkpoint is left" in errors
        assert not out.exists()
        again = (place, out)
    elif how is moved:
        assert not out.exists()
    else:
        assert os.listdir(out) == ["thesis.txt"]  # noqa: PTH208
        with pytest.raises(OutputNotWritable, match="HP105"):
            train(place, out, *FEW)
    if how is removed:
        train(*again, *FEW)
        assert [r["step"] for r in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]
        return
    step = int(re.search(r"saved up to step (\d+)", errors)[1])
    assert step == max(int(name[5:]) for name in published(tmp_path / "elsewhere"))
    hint = shlex.split(re.search(r"hint: hyper-parallel (.*)", errors)[1])
    command(*hint, "--no-calibrate", f"training.steps={step + 2}")
    assert [r["step"] for r in rows(tmp_path / "elsewhere" / "metrics.jsonl")] == list(range(1, step + 3))


REMOVES = """
import shutil
from pathlib import Path
from hyper_parallel.trainer import Callback

class Remove(Callback):
    def on_step_end(self, step, record):
        if step == 3:
            folder = Path("out/checkpoints").absolute()
            {action}
"""


def test_a_folder_of_checkpoints_that_was_removed_is_filled_again(place, tmp_path, monkeypatch):
    (tmp_path / "mine_removes.py").write_text(REMOVES.format(action="shutil.rmtree(folder)"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = (
        "training.callbacks=[mine_removes.Remove]",
        "checkpoint.every=2",
        "checkpoint.asynchronous=false",
    )
    train(place, Path("out"), *FEW, *words)
    assert published(tmp_path / "out") == ["step_00000004"]


def test_no_checkpoint_is_written_to_a_directory_that_replaced_the_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    model = torch.nn.Linear(2, 2)
    saver = Checkpointer(run / "checkpoints", keep=1, asynchronous=False, fingerprint={})
    saver.save(1, model, None, {})
    run.rename(tmp_path / "moved")
    run.mkdir()
    with pytest.raises(OutputNotWritable, match="replaced during the run"):
        saver.save(2, model, None, {})
    saver.close()
    assert not list(run.iterdir())
    assert published(tmp_path / "moved") == ["step_00000001"]


def test_a_folder_of_checkpoints_that_was_replaced_is_not_pruned(place, tmp_path, monkeypatch):
    action = "folder.rename('moved'); shutil.copytree('moved', folder)"
    (tmp_path / "mine_replaces.py").write_text(REMOVES.format(action=action))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("training.callbacks=[mine_replaces.Remove]", "checkpoint.every=2", "checkpoint.keep=1")
    with pytest.raises(OutputNotWritable, match="replaced during the run"):
        train(place, Path("out"), *FEW, *words, "checkpoint.asynchronous=false")
    assert published(tmp_path / "out") == ["step_00000002"]
    assert RunDirectoryLost.code == "HP721"
