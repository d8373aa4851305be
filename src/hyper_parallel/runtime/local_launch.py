"""Launch of local ranks as forks of a parent process that has already imported torch.

Imports dominate the start of a rank: 12 s for 8 torchrun workers on two cores, 0.4 s for forked ranks. Forked ranks
also share the parent's code pages. The parent must not have a process group or an initialized accelerator when it
forks. A fork copies no threads, so ranks would wait forever for threads of OpenMP and `tokenizers`. The OpenMP threads
are therefore ended before the fork, and `tokenizers` runs serially in ranks.

Each rank redirects standard output and error to its log file, runs `fn(rank)`, and ends with `os._exit`. Exit handlers
of the parent therefore do not run in ranks. When a rank fails, the other ranks are killed after a short grace time, and
the first failure is raised in full. With deadlines, the parent also monitors the heartbeats of the ranks, and kills all
ranks if one hangs.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import re
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue, HyperParallelError, RankFailed, written
from hyper_parallel.runtime.fork_server import begin_forked, fork_rank, prepare_fork, serial_tokenizers
from hyper_parallel.runtime.scratch_folders import scratch_folder
from hyper_parallel.runtime.supervision import (
    BOARD_VARIABLE,
    Deadlines,
    Hang,
    HangDetector,
    HeartbeatBoard,
    HeartbeatWriter,
    WaitReporter,
)
from hyper_parallel.serde import create_file

INIT_METHOD: Final = "HYPER_PARALLEL_INIT_METHOD"
"""Environment variable with the rendezvous method of a forked rank."""

_GRACE_S: Final = 2.0
_GRACE_OF_KILLED_S: Final = 0.5  # shorter, because a killed rank writes no record
_QUIET_POLL_S: Final = 2.0  # without deadlines; the end of a rank interrupts the wait
_POLL_S: Final = 0.25  # detects a frozen rank well within a second after its deadline
_LINES_OF_STACK: Final = 16  # number of lines in an error; the log contains the full stack
_STACKS_S: Final = 0.5
_LENGTH: Final = struct.Struct("<Q")
_STACK: Final = re.compile(r"^(?:Current t|T)hread 0x.*\n(?:  File .*\n)*", re.MULTILINE)
"""Stack of a thread in the output of faulthandler, in which the main thread is the last."""


@dataclass(frozen=True, slots=True)
class _Record:
    """Result of a rank or, after a failure, time, traceback and coded error (None: the exception had no code)."""

    result: Any = None
    failed_at: float = math.inf
    trace: str = ""
    coded: HyperParallelError | None = None


def launch(
    fn: Callable[[int], Any],
    world_size: int,
    *,
    log_dir: str | Path | None = None,
    timeout_s: float | None = None,
    threads: int = 1,
    echo_rank: int | None = None,
    deadlines: Deadlines | None = None,
    worlds: Sequence[int] = (),
    ending: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Run `fn(rank)` on `world_size` forked ranks and return their results in rank order.

    Args:
        fn: Function of the rank; may be a closure. The result must be picklable.
        world_size: Number of ranks.
        log_dir: Directory of the log files `rank_<n>.log`; None: a temporary directory, removed at the end.
        timeout_s: Seconds after which unfinished ranks are killed and RankFailed is raised; None: no limit.
        threads: CPU threads per rank.
        echo_rank: Rank that writes to the parent's standard output and error instead of a log file; None: no rank.
        deadlines: Maximum time of a rank in a phase of a step. None: no limit; a line reports ranks that wait long.
        worlds: Sizes of several worlds (process groups), in rank order; (): a single world of all ranks.
        ending: Function that returns whether a signal asks ranks to end; without `deadlines`, called only at the start.

    Raises:
        BadValue: HP102 for fewer than one rank.
        KeyboardInterrupt: All ranks were killed because `ending` returned True before the first step.
        ForkUnsafe: HP605 when torch.distributed is initialized, or another thread of this process computes.
        RankHung: HP620 when a rank exceeds its deadline; the error names the rank that caused the hang.
        RankFailed: HP601 with the first traceback when a rank cannot start, fails or exceeds `timeout_s`.
        HyperParallelError: Coded error of the rank that failed first, or HP105 when `log_dir` cannot be created.
    """
    if world_size < 1:
        raise BadValue("`launch` needs at least one rank", got=f"world_size={world_size}", allowed="1 and more")
    with scratch_folder() as scratch, _Records(world_size) as records:
        with written(logs := Path(log_dir or scratch)):
            logs.mkdir(parents=True, exist_ok=True)
        board = HeartbeatBoard(scratch / "board", world_size)
        watch = WaitReporter(board) if deadlines is None else HangDetector(board, deadlines, ending=ending)
        prepare_fork()
        ranks: list[ForkProcess] = []
        try:
            with serial_tokenizers():
                for rank in range(world_size):
                    if ending():
                        raise KeyboardInterrupt
                    arguments = fn, rank, worlds, scratch, None if rank == echo_rank else logs, threads, board, records
                    ranks.append(fork_rank(_child, arguments, rank, world_size))
                    if deadlines is not None:
                        board.started(rank, ranks[-1].pid or 0)
            with _places_on_sigterm(board):
                failures, hang = _wait(ranks, timeout_s, watch)
        finally:
            _kill(ranks)
        if hang is not None:
            raise _hang_error(hang, logs)
        if failures:
            _raise_first(failures, records, logs, echo_rank)
        return [records.read(rank).result for rank in range(world_size)]


def world_of_rank(rank: int, worlds: Sequence[int]) -> range:
    """Return the range of ranks in the same world as `rank`; `worlds` are the sizes of the worlds, in rank order."""
    bounds = pairwise(accumulate(worlds, initial=0))
    return next(range(first, stop) for first, stop in bounds if rank < stop)


def _kill(ranks: Sequence[ForkProcess]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()


def _hang_error(hang: Hang, logs: Path) -> HyperParallelError:
    first = logs / f"rank_{hang.culprits[0] if hang.culprits else 0}.log"
    stack = _stack(_text(first)).splitlines()[:_LINES_OF_STACK]
    return hang.error(str(first), "\n".join(stack))


class _Records:
    """Records of all ranks, in anonymous in-memory files, because a disk may be full."""

    def __init__(self, ranks: int) -> None:
        self._files = [os.memfd_create(f"hyper_parallel record {rank}") for rank in range(ranks)]

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def write(self, rank: int, record: _Record) -> None:
        """Write a record atomically: its length is written last, and `read` ignores a record without length."""
        content = pickle.dumps(record)
        with os.fdopen(self._files[rank], "r+b", closefd=False) as file:
            file.seek(_LENGTH.size)
            file.write(content)
            file.flush()
            file.seek(0)
            file.write(_LENGTH.pack(len(content)))

    def read(self, rank: int) -> _Record:
        """Return the record of a rank; an empty record if the rank has not written any."""
        with os.fdopen(self._files[rank], "rb", closefd=False) as file:
            file.seek(0)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size) or bytes(_LENGTH.size))
            record: _Record = pickle.loads(file.read(length)) if length else _Record()
        return record


def _child(
    fn: Callable[[int], Any],
    rank: int,
    worlds: Sequence[int],
    scratch: Path,
    logs: Path | None,
    threads: int,
    board: HeartbeatBoard,
    records: _Records,
) -> None:
    """Run a forked rank until its process exits; without `logs`, the rank writes to the parent's output."""
    status = 1
    try:
        begin_forked()
        if logs is not None:
            _redirect(logs / f"rank_{rank}.log")
        # The parent sends this signal when a rank hangs.
        faulthandler.register(signal.SIGUSR1, file=2)
        import torch

        torch.set_num_threads(threads)
        world = world_of_rank(rank, worlds or (board.ranks,))
        store = scratch / f"store_{world.start}"
        publish_rank(rank - world.start, len(world), rank, store, board)
        torch.manual_seed(rank)
        result = fn(rank)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # other ranks may still be opening connections to this rank
        records.write(rank, _Record(result))
        status = 0
    except BaseException as error:
        if logs is not None:  # otherwise the parent prints the error to the same terminal
            with suppress(OSError):
                traceback.print_exc()
        coded = error if isinstance(error, HyperParallelError) else None
        records.write(rank, _Record(None, stamp(error), traceback.format_exc(), coded))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def publish_rank(rank: int, size: int, local_rank: int, store: Path, board: HeartbeatBoard) -> None:
    """Set the environment variables with which a forked rank joins its world, and write its first heartbeat.

    Args:
        rank: Rank in the world.
        size: Number of ranks in the world, all on this machine.
        local_rank: Index of the rank's device, and of its slot on the board.
        store: File through which the ranks of the world rendezvous.
        board: Heartbeat slots of the machine.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        INIT_METHOD: f"file://{store}",
        BOARD_VARIABLE: f"{board.ranks} {board.path}",
    }
    HeartbeatWriter(board, local_rank)


def _redirect(log: Path) -> None:
    try:
        file = create_file(log)
    except OSError:
        file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    with file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def stamp(error: BaseException) -> float:
    """Return the time at which an error was raised, approximated by the first call of `stamp` for the error."""
    when: float = error.__dict__.setdefault("failed_at", time.time())
    return when


def _wait(
    ranks: list[ForkProcess], timeout_s: float | None, watch: HangDetector | WaitReporter
) -> tuple[dict[int, str], Hang | None]:
    """Wait for the end of all ranks, at most a grace time after the first failure.

    After `timeout_s`, or when a rank exceeds its deadline, ranks write their stacks to their log files. A HangDetector
    whose `ending` returns True before the first step leads to KeyboardInterrupt.

    Returns:
        Descriptions of failures by rank, earliest first, and the hang (None: no hang).
    """
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    failures: dict[int, str] = {}
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def ask_for_stacks(stopped: Collection[int] = ()) -> None:
        _ask_for_stacks({rank: ranks[rank] for rank in running.values()}, stopped)

    try:
        while running:
            poll_s = _POLL_S if isinstance(watch, HangDetector) else _QUIET_POLL_S
            wait_s = min(max(deadline - time.monotonic(), 0.0), poll_s)
            ended = wait(list(running), wait_s)
            for rank in map(running.pop, ended):
                ranks[rank].join()
                if code := ranks[rank].exitcode:
                    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
                    failures[rank] = killed or f"exit code {code}"
                    grace_s = _GRACE_OF_KILLED_S if killed else _GRACE_S
                    deadline = min(deadline, time.monotonic() + grace_s)
            if isinstance(watch, WaitReporter):
                watch.poll()
            elif not failures and watch.ends_start():
                raise KeyboardInterrupt
            elif not failures and (hang := watch.poll(running.values())):
                ask_for_stacks(hang.stopped)
                return {}, hang
            if not ended and time.monotonic() >= deadline:
                outcome = "stopped because another rank failed"
                if not failures:
                    outcome = f"not finished after {timeout_s} s"
                    ask_for_stacks()
                return failures | dict.fromkeys(running.values(), outcome), None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a time limit of the caller, such as a test timeout
        ask_for_stacks()
        raise
    return failures, None


@contextmanager
def _places_on_sigterm(board: HeartbeatBoard) -> Iterator[None]:
    """Print the position of every rank if SIGTERM ends this process inside the context.

    No effect if the caller has installed a handler, or outside the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(signum: int, _: Any) -> None:
        lines = WaitReporter(board).places()
        sys.stderr.write("".join(f"SIGTERM: {line}\n" for line in lines))
        sys.stderr.flush()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # ranks end with this process

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ask_for_stacks(ranks: dict[int, ForkProcess], stopped: Collection[int]) -> None:
    """Signal ranks to write their stacks to their log files.

    A rank stopped by a signal can write only after SIGCONT. All other ranks are killed before SIGCONT, because the
    step would continue otherwise.
    """
    for process in ranks.values():
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
    if not stopped:
        return
    for rank, process in ranks.items():
        if rank not in stopped:
            process.kill()
    for rank in stopped:
        os.kill(ranks[rank].pid, signal.SIGCONT)
    time.sleep(_STACKS_S)


def _raise_first(failures: dict[int, str], record_files: _Records, logs: Path, echo_rank: int | None) -> None:
    """Raise the coded error of the rank that failed first; if it has no code, RankFailed about all failed ranks."""
    records = {rank: record_files.read(rank) for rank in failures}
    # A killed rank leaves no record, and other ranks fail in their next collective, so its failure was the first.
    killed = [rank for rank, how in failures.items() if how.startswith("killed by")]
    first = killed[0] if killed else min(failures, key=lambda rank: records[rank].failed_at)
    if (coded := records[first].coded) is not None:
        raise coded
    log = {rank: _text(logs / f"rank_{rank}.log") for rank in failures}
    lasts = {rank: _last_line(records[rank], how, log[rank]) for rank, how in failures.items()}
    other_lines = [f"rank {rank}: {last}" for rank, last in lasts.items() if rank != first]
    text = (records[first].trace or _end(log[first])).rstrip()
    raise RankFailed(
        f"rank {first} failed ({failures[first]})\n" + "\n".join([text, *other_lines]).strip(),
        where="the lines above" if first == echo_rank else f"{logs}/rank_{first}.log",
    )


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _end(log: str) -> str:
    return _stack(log)[:4000] or log[-4000:]


def _stack(log: str) -> str:
    stacks: list[str] = _STACK.findall(log)
    return stacks[-1] if stacks else ""


def _last_line(record: _Record, how: str, log: str) -> str:
    if lines := record.trace.strip().splitlines():
        return lines[-1][:200]
    return ", in ".join([how, *(line.strip() for line in _stack(log).splitlines()[1:2])])
