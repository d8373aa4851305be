"""Runs that end early: a rank is lost or frozen, a signal comes; what they leave, and what goes on from it."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hyper_parallel.errors import SnapshotsTooLarge
from tests.e2e.runs import (
    CURVE,
    command,
    curve,
    make_place,
    published,
    rows,
    start,
    train,
    wait_for_steps,
    wait_until,
)

pytestmark = pytest.mark.e2e
LAUNCHERS = {
    "local": ("-m", "hyper_parallel"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hyper_parallel"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("train"))


@pytest.mark.slow
def test_when_a_rank_dies_the_run_ends_with_its_name(place):
    out = place / "killed"
    with start(place, out, "parallel.dp_shard=3", "training.tokens_per_step=192", "training.microbatch=2",
                "training.steps=100000", "checkpoint.every=5") as process:  # fmt: skip
        wait_for_steps(process, out, 8)
        wait_until(process, lambda: published(out))  # saved beside the steps, on a slow disk later
        ranks = sorted(child.pid for child in psutil.Process(process.pid).children())
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert process.returncode == 1
    assert "error[HP601]: rank 1 failed (killed by SIGKILL)" in errors
    assert sum(line.startswith(("rank 0:", "rank 2:")) for line in errors.splitlines()) == 2
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert [r["step"] for r in rows(out / "metrics.jsonl")][:8] == list(range(1, 9))
    names = published(out)
    assert names
    assert all((out / "checkpoints" / name / "manifest.json").exists() for name in names)


@pytest.mark.slow
def test_killed_and_frozen_ranks_and_damaged_checkpoints_change_nothing(tmp_path):
    """A short `make chaos`: curves bit for bit, the right rank to blame, no step lost after a save."""
    words = ["--faults", "3", "--only", "kill,stop,flip", "--dir", str(tmp_path)]
    tool = [sys.executable, str(Path(__file__).parents[2] / "tools" / "chaos.py"), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] == {"kill": 1, "stop": 1, "flip": 1}
    losses = ("steps_lost", "wrong_results", "hangs", "uncoded", "wrong_blame", "runs_ended")
    assert not any(result[kind] for kind in losses)


FREEZES = """
import os, signal
from pathlib import Path
from hyper_parallel.trainer import Callback

class Freezes(Callback):
    def freeze(self, where):
        if self.rank == 1 and not (mark := Path({marks!r}) / where).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_train_begin(self, job):
        self.freeze("begin")

    def on_save(self, step):
        self.freeze("save")
"""


@pytest.mark.slow
def test_a_rank_that_freezes_outside_of_steps_is_found_as_soon(place, tmp_path, monkeypatch, caplog):
    """At the start and in a checkpoint, where a busy rank has half an hour."""
    (tmp_path / "mine_freezes.py").write_text(FREEZES.format(marks=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    words = ("training.timeout_s=2", "training.max_restarts=2", "checkpoint.every=2", *CURVE)
    mine = ("parallel.dp_shard=2", "training.callbacks=[mine_freezes.Freezes]")
    train(place, tmp_path / "frozen", *words, *mine)
    said = re.findall(r"(rank . is stopped by a signal) \(no progress for \d s\), in (.*?)[;\n]", caplog.text)
    assert said == [("rank 1 is stopped by a signal", where) for where in ("start", "checkpoint")]
    assert [r["step"] for r in rows(tmp_path / "frozen" / "metrics.jsonl")] == [1, 2, 3, 4]


LOST = """
import os, signal
from pathlib import Path
from hyper_parallel.trainer import Callback

class Lost(Callback):
    def on_step_end(self, step, metrics):
        if self.rank == 1 and step in {steps} and not (mark := Path({marks!r}) / f"lost{{step}}").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_lost_rank_costs_one_step_where_every_step_has_a_snapshot(place, tmp_path, monkeypatch, caplog):
    words = ("parallel.dp_shard=2", "training.steps=8", "checkpoint.every=3", *CURVE)
    train(place, tmp_path / "whole", *words)
    first, second = sorted(random.Random(26).sample(range(2, 8), 2))
    (tmp_path / "mine_lost.py").write_text(LOST.format(steps={first, second}, marks=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    mine = ("checkpoint.snapshot_every=1", "training.callbacks=[mine_lost.Lost]")
    folders = set(Path("/dev/shm").glob("hyper_parallel-lost-*"))
    train(place, tmp_path / "lost", *words, *mine, "training.max_restarts=2")
    assert caplog.text.count("rank 1 failed (killed by SIGKILL)") == 2
    resumes = json.loads((tmp_path / "lost" / "run.json").read_text())["resumes"]
    assert [resume["step"] for resume in resumes] == [first - 1, second - 1]
    assert curve(tmp_path / "lost") == curve(tmp_path / "whole")  # bitwise
    assert [r["step"] for r in rows(tmp_path / "lost" / "metrics.jsonl")] == list(range(1, 9))
    assert set(Path("/dev/shm").glob("hyper_parallel-lost-*")) == folders

    monkeypatch.setattr("hyper_parallel.trainer.snapshots.MEMORY", tmp_path / "none")
    with pytest.raises(SnapshotsTooLarge) as caught:
        train(place, tmp_path / "large", *words, "checkpoint.snapshot_every=1")
    assert "needed" in caught.value.got
    assert not (tmp_path / "large" / "config.yaml").exists()


@pytest.mark.parametrize("launcher", ["local", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_command_that_goes_on(place, tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out, word = place / f"ended {launcher}", LAUNCHERS[launcher]
    with start(place, out, "parallel.dp_shard=2", "training.steps=100000", launcher=word) as run:
        wait_for_steps(run, out, 2)
        ranks = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        # A terminal sends its interrupt to all; a scheduler tells the first process.
        os.killpg(run.pid, signal.SIGINT) if launcher == "local" else run.terminate()
        _, errors = run.communicate(timeout=60)
    (saved,) = published(out)
    done = rows(out / "metrics.jsonl")[-1]["step"]
    assert saved == f"step_{done:08d}"
    assert f"ended after step {done}, whose checkpoint is saved" in errors
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert not (out / "export").exists()
    if launcher == "local":
        assert run.returncode == 130
        assert not list(tmp_path.glob("*hyper_parallel*"))
        hint = errors.rpartition("hint: hyper-parallel ")[2]
        command(*shlex.split(hint), f"training.steps={done + 1}", "--no-calibrate", *CURVE)
        assert [r["step"] for r in rows(out / "metrics.jsonl")] == list(range(1, done + 2))
    else:
        assert "hint: torchrun --standalone --nproc-per-node=2 -m hyper_parallel train" in errors


@pytest.mark.slow
def test_a_second_signal_stops_at_once(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = place / "at_once"
    # A step of the largest batch takes long enough for two signals.
    with start(place, out, "training.tokens_per_step=2097152", "training.microbatch=8") as run:
        wait_until(run, lambda: (out / "eval.jsonl").exists() and rows(out / "eval.jsonl"))
        run.send_signal(signal.SIGHUP)
        time.sleep(1.2)
        run.terminate()
        _, errors = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "SIGHUP: the run ends" in errors
    assert "before a checkpoint was saved" in errors
    assert not list(tmp_path.glob("*hyper_parallel*"))


def test_a_checkpoint_is_saved_when_the_minutes_are_over(place, tmp_path):
    train(place, tmp_path, "checkpoint.every_minutes=1.0e-9", "checkpoint.keep=9", *CURVE)
    assert sorted(published(tmp_path)) == [f"step_{step:08d}" for step in range(1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_signal_ends_a_step_that_waits_and_names_the_rank(place, tmp_path, launcher):
    (tmp_path / "waiting.py").write_text(
        "import time\n"
        "from hyper_parallel.trainer import Callback\n"
        "class Wait(Callback):\n"
        "    def on_step_end(self, step, row):\n"
        "        if self.rank == 1 and step == 3:\n"
        "            time.sleep(1000)\n"
    )
    words = ("parallel.dp_shard=2", "training.callbacks=[waiting.Wait]", *CURVE)
    out = tmp_path / "out"
    with start(place, out, *words, path=tmp_path, launcher=LAUNCHERS[launcher]) as run:
        wait_for_steps(run, out, 2)
        time.sleep(2)
        run.terminate()
        signalled = time.monotonic()
        _, errors = run.communicate(timeout=100)
    assert time.monotonic() - signalled < 25  # torchrun itself kills after 30
    assert re.search(r"error\[HP620\]: rank 1 is in \w+ \(waiting\.py:6\)", errors)
    assert "rank 0 waits for all_reduce" in errors
    if launcher == "local":
        assert run.returncode == 143
