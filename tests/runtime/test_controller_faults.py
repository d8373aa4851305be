"""Programs of several roles end with the same weights whatever is killed or frozen, and ask nothing twice."""

import random
import signal
from multiprocessing import get_context

import pytest

from hyper_parallel.errors import RankFailed, RestartsUsedUp
from tests.runtime.own_roles import CALLS, STEPS, alive, answered, by_role, oracle, ran, run  # noqa: F401
from tests.slow import slow_cells

pytestmark = pytest.mark.dist
DRAWN = random.Random(20261125)


def test_processes_are_the_same_program(tmp_path, oracle):  # noqa: F811
    checksum, _ = run(tmp_path)
    assert checksum == oracle
    assert by_role(ran(tmp_path)) == by_role(answered(tmp_path)) == CALLS


def test_ahead_by_one_is_the_same_program_on_both(tmp_path, oracle):  # noqa: F811
    folders = [tmp_path / engine for engine in ("inline", "processes")]
    for folder in folders:
        folder.mkdir()
    (one, _), (many, _) = [run(folder, folder.name, staleness=1) for folder in folders]
    assert one == many != oracle
    assert answered(folders[0]) == answered(folders[1])


@slow_cells("Sampler-2-before", "Scorer-1-after")
@pytest.mark.parametrize(
    ("role", "at", "when"),
    [(role, DRAWN.randint(1, calls), DRAWN.choice(["before", "after"])) for role, calls in CALLS.items()],
)
def test_a_killed_role_is_started_again(role, at, when, tmp_path, oracle):  # noqa: F811
    checksum, controller = run(tmp_path, role=role, at=at, when=when)
    assert (tmp_path / f"accident-{role}-{at}").exists()
    assert checksum == oracle
    assert controller.roles[role].restarts == 1
    assert by_role(answered(tmp_path)) == CALLS
    assert max(answered(tmp_path).values()) == 1
    assert by_role(ran(tmp_path)) == CALLS | {role: CALLS[role] + 1}


@pytest.mark.slow
def test_a_frozen_role_is_started_again(tmp_path, oracle, caplog):  # noqa: F811
    checksum, controller = run(tmp_path, timeout_s=4.0, role="Learner", at=3, number=signal.SIGSTOP)
    assert checksum == oracle
    assert controller.roles["Learner"].restarts == 1
    assert by_role(answered(tmp_path)) == CALLS
    assert "[HP620] role `Learner`: rank 0 is stopped by a signal (no progress for 4 s)" in caplog.text


@slow_cells('Scorer-2-{"role": "Learner", "numb')
@pytest.mark.parametrize(("role", "at", "torn"), [("Learner", 3, b""), ("Scorer", 2, b'{"role": "Learner", "numb')])
def test_a_killed_program_goes_on_with_its_journal(role, at, torn, tmp_path, oracle):  # noqa: F811
    fate = {"role": role, "at": at, "who": "controller", "when": "after"}
    program = get_context("fork").Process(target=run, args=(tmp_path,), kwargs=fate)
    program.start()
    program.join(60)
    assert program.exitcode == -signal.SIGKILL
    first, known = ran(tmp_path), answered(tmp_path)
    pids = {int(line.split()[0]) for line in (tmp_path / "ran").read_text().splitlines()}
    assert len(pids) == 3
    assert 0 < known.total() == first.total() - 1 < STEPS * 3
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(torn)
    checksum, controller = run(tmp_path, **fate)
    assert not [pid for pid in pids if alive(pid)]
    assert checksum == oracle
    assert by_role(answered(tmp_path)) == CALLS
    assert {call: n for call, n in ran(tmp_path).items() if n > 1} == dict.fromkeys(first - known, 2)
    assert [one.restarts for one in controller.roles.values()] == [0, 0, 0]


def test_a_role_that_is_always_lost_ends_the_program(tmp_path):
    class Doomed:
        def learn(self):
            import os

            os.kill(os.getpid(), signal.SIGKILL)

    from hyper_parallel import Controller

    with Controller(max_restarts=1) as controller:
        role = controller.start(Doomed)
        call, after = role.call("learn"), role.call("learn")
        with pytest.raises(RestartsUsedUp, match="role `Doomed`: rank 0 was killed by SIGKILL"):
            call.result()
        for later in (after, role.call("learn")):
            with pytest.raises(RestartsUsedUp):
                later.result()
    with Controller(max_restarts=0) as controller, pytest.raises(RankFailed, match="SIGKILL"):
        controller.start(Doomed).call("learn").result()
