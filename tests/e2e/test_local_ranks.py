"""A run that this machine cannot hold is refused before a rank starts, and an interrupt ends one that starts."""

import os
import shlex
import signal
import time

import psutil
import pytest

from hyper_parallel.errors import DeviceUnavailable
from hyper_parallel.runtime import Deadlines, launch, start_capacity
from hyper_parallel.topology import rank_capacity
from hyper_parallel.topology.cpu_machine import CPU_RANK_BYTES
from hyper_parallel.trainer.decoding import Sampling
from hyper_parallel.trainer.generation_ranks import generate_on_ranks
from tests.e2e.runs import CURVE, command, curve, make_place, start, train, wait_until

pytestmark = pytest.mark.e2e
TOO_MANY = 8 * max(16, 4 * (os.cpu_count() or 1))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("ranks"))


def layout(ranks):
    return (f"parallel.dp_shard={ranks}", f"training.tokens_per_step={128 * ranks}")


@pytest.mark.parametrize(
    "launcher",
    [(), ("launch.launcher=torchrun",), ("launch.launcher=ray",)],
    ids=["local", "torchrun", "ray"],
)
def test_more_ranks_than_the_machine_runs_are_refused_with_commands_that_work(place, tmp_path, monkeypatch, launcher):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = psutil.Process().children()
    with pytest.raises(DeviceUnavailable, match=rf"needs {TOO_MANY:,} ranks on this") as caught:
        train(place, tmp_path / "run", *layout(TOO_MANY), *launcher)
    assert caught.value.code == "HP502"
    assert psutil.Process().children() == before
    assert not (tmp_path / "run").exists()
    dry, cluster, *local = caught.value.hint.split(", or ")
    assert local == ["launch.oversubscribe=true"] * (TOO_MANY <= 256)
    assert "--launcher slurm launch.nnodes=" in cluster
    shown = command(*shlex.split(dry)[1:]).stdout
    assert f"dp_shard={TOO_MANY}" in shown
    assert "--launcher slurm launch.nnodes=" in shown
    assert "fork" not in shown


def test_generation_starts_no_more_ranks_than_the_machine_runs():
    with pytest.raises(DeviceUnavailable, match=f"needs {TOO_MANY:,} ranks on this"):
        generate_on_ranks("export", ["1"], Sampling(), f"dp_replicate={TOO_MANY}")


def test_capacity_follows_accelerators_cores_and_free_memory():
    assert (rank_capacity(8).num_ranks, rank_capacity(8).is_cpu) == (8, False)
    cpu = rank_capacity(0)
    most = max(16, 4 * len(os.sched_getaffinity(0)))
    free = psutil.virtual_memory().available // CPU_RANK_BYTES
    assert cpu.is_cpu
    assert cpu.num_ranks == most or cpu.num_ranks <= min(most, free + 3)
    oversubscribed = start_capacity(oversubscribe=True)
    assert not oversubscribed.is_cpu or 256 <= oversubscribed.num_ranks <= max(256, most)


def test_a_plan_that_exceeds_this_machine_is_followed_by_a_dry_run(place):
    model = str(place / "model.json")
    large = command("plan", model, "-t", "dgx-h100", "--devices", str(TOO_MANY)).stdout
    assert large.rstrip().endswith("train recipe.yaml --dry-run")
    small = command("plan", model, "--devices", "1").stdout
    assert small.rstrip().endswith("train recipe.yaml")


@pytest.mark.slow
def test_oversubscribed_ranks_train(place, tmp_path):
    ranks = rank_capacity(0).num_ranks + 1
    words = ("training.steps=2", "training.microbatch=4", *CURVE)
    train(place, tmp_path / "many", *layout(ranks), *words, "launch.oversubscribe=true")
    assert len(curve(tmp_path / "many")) == 2


WAITS = """
import time
from pathlib import Path
from hyper_parallel.trainer import Callback

class Waits(Callback):
    def on_train_begin(self, job):
        (Path(__file__).parent / f"rank_{self.rank}").touch()
        time.sleep(1000)
"""


def test_an_interrupt_during_the_start_ends_all_ranks(place, tmp_path):
    (tmp_path / "mine_waits.py").write_text(WAITS)
    words = (*layout(2), "training.callbacks=[mine_waits.Waits]", *CURVE)
    with start(place, tmp_path / "run", *words, path=tmp_path) as run:
        wait_until(run, lambda: len(list(tmp_path.glob("rank_?"))) == 2)
        ranks = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        interrupted = time.monotonic()
        _, errors = run.communicate(timeout=60)
    assert time.monotonic() - interrupted < 10
    assert run.returncode == 130
    assert "all ranks were stopped before a checkpoint was saved" in errors
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_an_interrupt_while_ranks_are_forked_starts_no_more():
    own = psutil.Process()
    before, most = own.children(), []

    def asked():
        most.append(len(own.children()) - len(before))
        return most[-1] >= 3

    with pytest.raises(KeyboardInterrupt):
        launch(lambda _: time.sleep(1000), 64, deadlines=Deadlines(600, 600), ending=asked)
    assert most == [0, 1, 2, 3]
    assert own.children() == before
