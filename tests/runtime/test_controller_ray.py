"""The same programs with an actor of Ray for every rank."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hyper_parallel.errors import MissingDependency
from tests.runtime.own_roles import CALLS, ROOT, alive, answered, by_role, oracle, ran  # noqa: F401

PROGRAM = """
import json, sys
from pathlib import Path
from tests.runtime.own_roles import run
checksum, controller = run(Path(sys.argv[1]), "ray", **json.loads(sys.argv[2]))
print(json.dumps([checksum, {name: role.restarts for name, role in controller.roles.items()}]))
"""
GROUPS = """
import json
import hyper_parallel as hp
from tests.runtime.test_controller import Group
with hp.Controller("ray") as controller:
    pair, alone = controller.start(Group, ranks=2), controller.start(Group, name="Alone")
    said = [pair.call("total").result(), alone.call("total").result()]
    for size in (1, 2):
        pair.resize(size)
        said.append(pair.call("total").result())
print(json.dumps(said))
"""


def run_on_ray(folder, program=PROGRAM, **fate):
    """In a process of its own; its exit status, and what it says."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), json.dumps(fate)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    said = done.stdout.strip().splitlines()
    return done.returncode, json.loads(said[-1]) if said else None


def test_without_the_package_the_engine_is_refused(monkeypatch) -> None:
    from hyper_parallel import Controller

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match="`ray`"):
        Controller("ray")


@pytest.mark.cluster
def test_actors_of_a_role_are_a_group_of_their_own(tmp_path) -> None:
    pytest.importorskip("ray")
    assert run_on_ray(tmp_path, GROUPS) == (0, [[3, 2], [1, 1], [1, 1], [3, 2]])


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_actor_is_started_again(number, tmp_path, oracle) -> None:  # noqa: F811
    pytest.importorskip("ray")
    fate = {"role": "Learner", "at": 3, "number": int(number), "timeout_s": 15.0}
    status, (checksum, restarts) = run_on_ray(tmp_path, **fate)
    assert status == 0
    assert checksum == oracle
    assert restarts == {"Learner": 1, "Sampler": 0, "Scorer": 0}
    assert by_role(answered(tmp_path)) == CALLS
    assert by_role(ran(tmp_path)) == CALLS | {"Learner": CALLS["Learner"] + 1}


@pytest.mark.cluster
def test_a_killed_program_goes_on_on_ray(tmp_path, oracle) -> None:  # noqa: F811
    pytest.importorskip("ray")
    fate = {"role": "Scorer", "at": 2, "who": "controller", "when": "after"}
    assert run_on_ray(tmp_path, **fate) == (-signal.SIGKILL, None)
    first, known = ran(tmp_path), answered(tmp_path)
    pids = {int(line.split()[0]) for line in (tmp_path / "ran").read_text().splitlines()}
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    status, (checksum, _) = run_on_ray(tmp_path, **fate)
    assert status == 0
    assert checksum == oracle
    assert by_role(answered(tmp_path)) == CALLS
    again = {call: n for call, n in ran(tmp_path).items() if n > 1}
    assert again == dict.fromkeys(first - known, 2)
