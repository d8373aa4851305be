"""`hyper-parallel train --launcher`: the same run, started by torchrun, Slurm and Ray."""

import os
import shlex
import socket
import subprocess
import sys

import pytest

from hyper_parallel.errors import (
    Contradiction,
    DegreesMismatch,
    LauncherIncomplete,
    LauncherMissing,
)
from hyper_parallel.runtime.launchers import _tasks, first_host, join_srun
from tests.e2e import slurm
from tests.e2e.runs import (
    CURVE,
    assert_same_curve,
    curve,
    make_place,
    start,
    train,
    wait_for_steps,
)
from tests.e2e.two_hosts import HOSTS, on_host, power_off, running, two_hosts

pytestmark = pytest.mark.e2e
TWO = ("parallel.dp_shard=2", "training.steps=3", *CURVE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("launchers"))


@pytest.fixture(scope="module")
def local(place):
    train(place, place / "local", *TWO)
    return curve(place / "local")


def test_torchrun_on_several_machines_needs_a_place_to_meet(place, tmp_path):
    degrees = ("parallel.dp_shard=4", "training.microbatch=2")
    nodes = ("--launcher=torchrun", "launch.nnodes=2", *degrees, "--dry-run")
    with pytest.raises(Contradiction) as caught:
        train(place, tmp_path, *nodes)
    assert caught.value.hint.startswith("set `launch.rdzv_endpoint=")
    shown = train(place, tmp_path, *nodes, "launch.rdzv_endpoint=n1:29500").stdout
    assert (
        "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:29500 --nproc-per-node=2 "
        f"-m hyper_parallel train {place}/recipe.yaml output_dir={tmp_path}"
    ) in shown
    with pytest.raises(DegreesMismatch) as caught:
        train(place, tmp_path, *nodes, "launch.rdzv_endpoint=n1:29500", "launch.nnodes=3")
    assert caught.value.hint == "launch.nnodes=2 launch.nproc_per_node=2"
    with pytest.raises(Contradiction):
        train(place, tmp_path, "launch.nnodes=2")


def test_auto_plans_for_the_ranks_of_all_machines(place, tmp_path):
    nodes = ("launch.nnodes=2", "launch.nproc_per_node=3", "parallel=auto")
    shown = train(place, tmp_path, "--launcher=ray", *nodes, "training.tokens_per_step=192",
                  "training.microbatch=null", "--dry-run").stdout  # fmt: skip
    assert "start 6 actors of Ray on 2 machines" in shown


def test_without_sbatch_the_script_is_written_and_named(place, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    options = ("launch.partition=gpu", "launch.time=1:00:00", "launch.sbatch=[--gpus-per-node=1]")
    words = ("--launcher=slurm", "launch.nnodes=2", *options, *TWO)
    shown = train(place, tmp_path / "dry run", *words, "--dry-run").stdout
    assert not (tmp_path / "dry run").exists()
    with pytest.raises(LauncherMissing) as caught:
        train(place, tmp_path / "dry run", *words)
    script = tmp_path / "dry run" / "job.sbatch"
    assert caught.value.where == str(script)
    text = script.read_text()
    assert text in shown
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--time=1:00:00",
        "--gpus-per-node=1",
    ):
        assert f"#SBATCH {line}\n" in text
    assert not subprocess.run(["/bin/bash", "-n", str(script)], check=False).returncode
    assert shlex.split(text.splitlines()[-1])[:4] == [
        "srun",
        sys.executable,
        "-m",
        "torch.distributed.run",
    ]


def test_lists_of_hosts_in_short_form():
    assert first_host("gpu[03-05,9],login") == "gpu03"
    assert first_host("rack[2,4]n[1-8].cluster") == "rack2n1.cluster"
    assert first_host("a,b[1-2]") == "a"
    assert _tasks("4(x2),3") == [4, 4, 3]


def test_variables_of_srun_are_those_of_a_rank(monkeypatch):
    said = {**slurm.JOB, "SLURM_STEP_ID": "1", "SLURM_NTASKS": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
            "SLURM_PROCID": "2"}  # fmt: skip
    monkeypatch.setattr(os, "environ", dict(said))
    with pytest.raises(LauncherIncomplete, match="SLURM_TASKS_PER_NODE"):
        join_srun()
    os.environ["SLURM_TASKS_PER_NODE"] = "2,1"
    join_srun()
    found = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    assert found == {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "30243"}  # fmt: skip


@pytest.mark.cluster
def test_processes_of_srun_are_ranks(place, local, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", slurm.install(tmp_path / "bin"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = [sys.executable, "-m", "hyper_parallel", "train", str(place / "recipe.yaml"), *TWO]
    done = subprocess.run(["srun", *words, f"output_dir={tmp_path}/run"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert_same_curve(curve(tmp_path / "run"), local)


@pytest.mark.cluster
def test_a_job_of_slurm_is_the_same_run(place, local, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", slurm.install(tmp_path / "bin"))
    out = tmp_path / "a run"
    with start(place, out, "--launcher=slurm", "launch.nnodes=2", *TWO) as process:
        said, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert said == "Submitted batch job 4242\n"
    assert "2 ranks" in (out / "logs" / "slurm-4242.log").read_text()
    assert_same_curve(curve(out), local)


@pytest.mark.cluster
def test_actors_of_ray_are_the_same_run(place, local, tmp_path):
    pytest.importorskip("ray")
    with start(place, tmp_path, "--launcher=ray", *TWO) as process:
        _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert_same_curve(curve(tmp_path), local)


FOUR = ("parallel.dp_shard=4", "training.microbatch=2", *CURVE)


def on_both(place, hosts, out, *overrides):
    """The same command on two hosts."""
    meet = ("launch.nnodes=2", "launch.rdzv_endpoint=hp-left:29500")
    words = [sys.executable, "-m", "hyper_parallel", "train", str(place / "recipe.yaml")]
    words += ["--launcher=torchrun", *meet, *FOUR, f"output_dir={out}", *overrides]
    return [on_host(host, hosts, *words) for host in HOSTS]


@pytest.mark.cluster
def test_torchrun_on_two_hosts_is_the_same_run(place, tmp_path):
    with two_hosts(tmp_path) as hosts:
        for process in on_both(place, hosts, tmp_path / "two", "training.steps=3"):
            said, _ = process.communicate(timeout=200)
            assert process.returncode == 0, said
    train(place, tmp_path / "one", *FOUR, "training.steps=3")
    assert_same_curve(curve(tmp_path / "two"), curve(tmp_path / "one"))


@pytest.mark.cluster
@pytest.mark.parametrize("gone", HOSTS)
def test_a_host_that_is_lost_ends_the_run_on_the_other_with_its_name(place, tmp_path, gone):
    (left,) = {*HOSTS} - {gone}
    with two_hosts(tmp_path) as hosts:
        runs = dict(
            zip(
                HOSTS,
                on_both(place, hosts, tmp_path / "run", "training.steps=9999999"),
                strict=True,
            )
        )
        wait_for_steps(runs[left], tmp_path / "run", 4)
        power_off(gone)
        said, _ = runs[left].communicate(timeout=90)
        assert not running(left)
        runs[gone].communicate(timeout=10)
    assert runs[left].returncode == 1
    ranks = {"hp-left": "the rendezvous host hp-left", "hp-right": "hp-right (ranks 2 to 3)"}
    assert f"error[HP631]: the connection to {ranks[gone]} is lost" in said


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
DIES = """
import os, signal
from hyper_parallel.trainer import Callback
class Dies(Callback):
    def on_step_end(self, step, row):
        if (self.rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 2, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.cluster
def test_an_actor_that_dies_is_named_by_its_machine_and_started_again(place, local, tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "dying.py").write_text(DIES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    cluster = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    words = ("--launcher=ray", "launch.nnodes=2", "checkpoint.every=1", "checkpoint.asynchronous=false",
             "training.max_restarts=1", "training.callbacks=[dying.Dies]")  # fmt: skip
    try:
        words += (f"launch.ray_address={cluster.stdout.readline().strip()}",)
        with start(place, tmp_path / "run", *words, *TWO, path=tmp_path) as process:
            _, errors = process.communicate(timeout=180)
    finally:
        cluster.communicate("", timeout=60)
    assert process.returncode == 0, errors
    assert f"[HP601] rank 1 on {socket.gethostname()} died" in errors
    assert "resumed from" in errors
    assert_same_curve(curve(tmp_path / "run"), local)
