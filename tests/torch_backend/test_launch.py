"""Local ranks: what they inherit, what they say when they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel.errors import (
    BadValue,
    CollectiveMismatch,
    ForkUnsafe,
    RankFailed,
    RankHung,
    RestartsUsedUp,
)
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import Deadlines, World, launch, with_restarts
from hyper_parallel.runtime.supervision import (
    HangDetector,
    Heartbeat,
    HeartbeatBoard,
    HeartbeatWriter,
    hang,
)


def _sleep_forever(_: int) -> None:
    time.sleep(100)


def test_a_launch_without_ranks_is_refused() -> None:
    with pytest.raises(BadValue, match="at least one rank"):
        launch(print, 0)


def test_ranks_that_hang_are_stopped_and_say_where_they_stand() -> None:
    with pytest.raises(RankFailed) as failure:
        launch(lambda rank: rank and _sleep_forever(rank), 3, timeout_s=3)
    text = str(failure.value)
    assert "rank 1 failed (not finished after 3 s)" in text
    assert text.count("in _sleep_forever") == 2  # rank 1 in full, rank 2 in a line
    assert "rank 0" not in text


def test_a_rank_that_is_stopped_before_its_first_word_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(board: HeartbeatBoard, rank: int) -> HeartbeatWriter:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return HeartbeatWriter(board, rank)

    monkeypatch.setattr("hyper_parallel.runtime.local_launch.HeartbeatWriter", stopped)

    def body(rank: int) -> None:
        with World.join("cpu"):
            torch.distributed.barrier()

    with pytest.raises(RankHung, match="rank 1 is stopped by a signal"):
        launch(body, 2, deadlines=Deadlines(step_s=1, first_step_s=60))


def test_the_rank_that_raised_is_named_first_though_its_group_closes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others fail when its connections close, and may have said so before it has written its own failure."""
    leave = World.leave

    def slowly(world: World) -> None:
        leave(world)
        time.sleep(0.5 * world.rank)

    monkeypatch.setattr(World, "leave", slowly)

    def body(rank: int) -> None:
        with World.join("cpu"):
            torch.distributed.barrier()
            if rank == 1:
                raise ArithmeticError("the cause")
            torch.distributed.barrier()

    with pytest.raises(RankFailed, match="rank 1 failed") as failure:
        launch(body, 2, timeout_s=60)
    assert "ArithmeticError: the cause" in failure.value.what.partition("rank 0:")[0]


def test_the_rank_that_is_elsewhere_is_the_culprit_and_not_the_one_that_waits_for_it() -> None:
    def body(rank: int) -> None:
        with World.join("cpu") as world:
            assert world.heartbeat is not None
            for step in (1, 2):
                world.heartbeat.begin_step(step)
                world.heartbeat.begin_phase("forward")
                if step == 2 and rank == 1:
                    _sleep_forever(rank)
                torch.distributed.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankHung) as found:
        launch(body, 2, deadlines=Deadlines(step_s=2, first_step_s=60))
    assert time.monotonic() - start < 2 + 15
    what, stack = found.value.what.split("\n", 1)
    assert what.startswith("rank 1 is in _sleep_forever (test_launch.py:")
    assert "in step 2, forward of microbatch 1; the others wait for it" in what
    assert "in _sleep_forever" in stack.splitlines()[1]
    (other,) = found.value.others
    assert other.startswith("rank 0 waits for all_reduce over all ranks (no progress")


def _beat(note: str) -> Heartbeat:
    return Heartbeat(pid=1, beats=9, begun=3, step=3, microbatch=0, phase="optimizer", note=note)


@pytest.mark.parametrize(
    ("notes", "states", "culprits", "says"),
    [
        (["waits for a", "waits for a", "waits for a"], "SRT", (2,), "rank 6 is stopped"),
        (
            ["waits for a", "", "waits for a"],
            "SRS",
            (1,),
            "rank 5 reports no position (no progress for 8 s)",
        ),
        (
            ["", "waits for a", "waits for a"],
            "SXS",
            (1,),
            "rank 5 has ended without an error message",
        ),
        (["waits for a", "waits for b", "waits for a"], "SSS", (), "all ranks wait"),
    ],
)
def test_culprits(notes, states, culprits, says) -> None:
    """Stopped before gone before anywhere else; nobody where all wait. Slot 0 is rank 4 here."""
    found = hang([_beat(n) for n in notes], [9.0, 8.0, 7.0], dict(enumerate(states)), first=4)
    assert found.culprits == tuple(4 + slot for slot in culprits)
    assert found.description.startswith(says)
    assert len(found.other_states) == (2 if culprits else 3)


def test_a_pause_of_the_whole_machine_is_no_hang(tmp_path: Path, monkeypatch) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    HeartbeatWriter(board, 0)
    watch = HangDetector(board, Deadlines(step_s=10, first_step_s=10))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch.poll([0]) is None
    now += 3600
    assert watch.poll([0]) is None
    looks = 0
    while watch.poll([0]) is None:
        now, looks = now + 1, looks + 1
    assert looks == 9  # two seconds of the pause count, and more than ten are needed


def test_a_stopped_process_is_found_in_any_phase_and_a_pause_is_forgiven(tmp_path: Path, monkeypatch) -> None:
    """Outside of steps, where a busy rank may take a hundred times longer; seconds of two pauses do not add up."""
    board = HeartbeatBoard(tmp_path / "board", 1)
    watch = HangDetector(board, Deadlines(step_s=10, first_step_s=1000))
    with subprocess.Popen(["sleep", "60"]) as other:
        pulse = HeartbeatWriter(board, 0)
        pulse._numbers[0] = other.pid
        pulse.begin_phase("export")
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now)

        def looks(most: int, number: signal.Signals) -> int:
            nonlocal now
            other.send_signal(number)
            time.sleep(0.1)
            for poll in range(most):
                now += 1
                if (found := watch.poll([0])) is not None:
                    assert found.description == "rank 0 is stopped by a signal (no progress for 11 s), in export"
                    assert found.stopped == (0,)
                    return poll + 1
            return 0

        assert looks(100, signal.SIGCONT) == 0
        assert looks(9, signal.SIGSTOP) == 0
        assert looks(1, signal.SIGCONT) == 0
        assert looks(20, signal.SIGSTOP) == 11
        other.kill()


@pytest.mark.slow
def test_lost_ranks_are_started_again_so_often_and_not_more() -> None:
    def body(rank: int, number: int) -> int:
        if rank == 1 and number < 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def attempt(number: int, lost: int = 0) -> list[int]:
        return launch(lambda rank: body(rank, number - lost), 2, deadlines=Deadlines(60, 60))

    assert with_restarts(attempt, 1) == [1, 1]
    with pytest.raises(RestartsUsedUp) as found:
        with_restarts(lambda number: attempt(number, 1), 1)
    assert "rank 1 failed (killed by SIGKILL); the ranks were started 2 times" in found.value.what


def test_collectives_that_do_not_fit_are_named_before_they_hang() -> None:
    def body(rank: int) -> None:
        with World.join("cpu", debug=True):
            torch.distributed.all_reduce(torch.ones(2))
            torch.distributed.all_reduce(torch.ones(3 + rank))

    with pytest.raises(CollectiveMismatch, match=r"Detected mismatch.*TensorShape=\[[34]\]"):
        launch(body, 2, timeout_s=60)


def test_results_come_in_rank_order() -> None:
    assert launch(lambda rank: rank * rank, 3, timeout_s=30) == [0, 1, 4]


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, started = os.fork, []

    def failing_fork() -> int:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", failing_fork)
    with pytest.raises(RankFailed, match="rank 2 of 4 could not be started"):
        launch(_sleep_forever, 4)
    for pid in started:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def test_a_closed_world_leaves_no_threads_to_forked_ranks() -> None:
    """Its groups hang in torch's caches; a rank that inherits one hangs when it drops it."""
    with World.join("cpu") as world:
        mesh = world.mesh(Strategy())["dp_shard"]
        weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        total = (weight @ weight).full_tensor().sum()
        with pytest.raises(ForkUnsafe, match="rank 0 of 1"):
            launch(lambda rank: rank, 1)
    assert total == 64
    del world, mesh, weight
    assert launch(lambda rank: rank, 1, timeout_s=30) == [0]
    assert not [name for name in _threads() if "gloo" in name]


@pytest.mark.slow
def test_no_rank_is_forked_while_another_thread_computes() -> None:
    """The fork would wait for the lock of BLAS, as long as the thread computes."""
    ended, matrix = threading.Event(), np.ones((600, 600))

    def compute() -> None:
        while not ended.is_set():
            matrix @ matrix

    thread = threading.Thread(target=compute, name="busy")
    idle = threading.Thread(target=ended.wait, name="idle")
    thread.start()
    idle.start()
    try:
        with pytest.raises(ForkUnsafe, match="thread busy") as found:
            launch(lambda rank: rank, 1, timeout_s=30)
        assert "idle" not in str(found.value)
    finally:
        ended.set()
        thread.join()
        idle.join()
    assert launch(lambda rank: rank, 1, timeout_s=30) == [0]


def test_ranks_compute_with_threads_after_a_parent_that_did() -> None:
    """OpenMP's pool of the parent has no threads in a rank, which would wait for them for ever."""
    values = torch.arange(1 << 20, dtype=torch.float64)  # enough that a sum is divided
    before = torch.get_num_threads(), len(_threads())
    try:
        torch.set_num_threads(3)
        total = values.sum()
        assert len(_threads()) > before[1]
        found = launch(lambda rank: (float(values.sum()), len(_threads()) > 2), 2, threads=3, timeout_s=180)
        assert found == [(float(total), True)] * 2
        assert values.sum() == total
    finally:
        torch.set_num_threads(before[0])


@pytest.mark.slow
def test_ranks_tokenize_after_a_parent_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    def ids(_: int) -> list[list[int]]:
        return [found.ids for found in words.encode_batch(["a b", "b c"] * 50)]

    assert launch(ids, 2, timeout_s=180) == [ids(0)] * 2
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert launch(ids, 1, timeout_s=180) == [[[0, 1], [1, 2]] * 50]
