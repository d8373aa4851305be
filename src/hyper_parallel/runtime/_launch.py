"""Start local ranks by forking a parent that has already imported torch.

Imports dominate the start of a rank (12 s for 8 torchrun workers on two cores, 0.4 s forked), and forked ranks share
the parent's code pages. The parent must not hold a process group or have touched an accelerator when it forks. It may
have used threads: a rank inherits the pools of OpenMP and of `tokenizers` without their threads, and would wait for
them for ever, so the one is ended before the fork, and ranks are told not to use the other.

Each rank runs `fn(rank)`, writes its standard output and error to its own log file, and leaves through `os._exit`, so
nothing of the parent (test runner, exit handlers) runs twice. When one rank fails the others get a short grace time
and are then killed by process id; the first failure is raised in full.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import ForkUnsafe, HyperParallelError, RankFailed

INIT_METHOD: Final = "HYPER_PARALLEL_INIT_METHOD"
"""Environment variable that tells a forked rank how to meet the others."""

_OMP_PAUSE_SOFT: Final = 1  # settings stay
_TOKENIZERS: Final = "TOKENIZERS_PARALLELISM"
_GRACE_S: Final = 2.0
_STACKS_S: Final = 0.5
_STACK: Final = "Current thread"  # how faulthandler begins the one of the main thread


@dataclass(frozen=True, slots=True)
class _Record:
    """What a rank leaves in a file: its result, or when and with what it failed."""

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
) -> list[Any]:
    """Run `fn(rank)` on `world_size` forked ranks and return their results in rank order.

    Args:
        fn: Called in each rank; may be a closure. Its result must pickle.
        world_size: Number of ranks.
        log_dir: Directory of `rank_<n>.log`; None: a temporary one.
        timeout_s: Seconds after which unfinished ranks are killed; None: no limit.
        threads: CPU threads of each rank.
        echo_rank: Rank that keeps the parent's standard output and error instead of a log file.

    Raises:
        ForkUnsafe: HP605 when this process is a member of a process group.
        RankFailed: HP601 when a rank cannot be started, or with the first failure in full and one line for each
            other rank. A coded error raised in a rank is raised again as it is.
    """
    # What every rank would otherwise import on its own.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.distributed.tensor.parallel  # noqa: F401

    _check_fork()
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_") as name:
        scratch = Path(name)
        logs = Path(log_dir) if log_dir else scratch
        logs.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        _end_openmp_threads()
        ranks: list[ForkProcess] = []
        try:
            with _serial_tokenizers():
                for rank in range(world_size):
                    given = (fn, rank, world_size, scratch, logs, threads, rank == echo_rank)
                    process = ForkProcess(target=_child, args=given)
                    _start(process, rank, world_size)
                    ranks.append(process)
            failures = _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
        if failures:
            _raise_first(failures, scratch, logs)
        return [_read(scratch, rank).result for rank in range(world_size)]


def _start(process: ForkProcess, rank: int, world_size: int) -> None:
    try:
        process.start()
    except OSError as error:
        raise RankFailed(
            f"rank {rank} of {world_size} could not be started; the others were stopped",
            got=error.strerror,
            hint="fewer ranks, or a higher limit of processes and memory (ulimit -u, ulimit -v)",
        ) from error


def _check_fork() -> None:
    """Refuse a process group of this process, and end the threads of those that were closed.

    A rank inherits the groups but not their threads: it would hang as soon as it used or dropped one. Meshes are in
    reference cycles, so a closed group lives on until the next collection.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ForkUnsafe(
            "local ranks cannot be forked from a member of a process group",
            got=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            hint="leave the world before: with World.join() as world: ...",
        )
    tasks = Path("/proc/self/task")
    if not tasks.is_dir() or len(list(tasks.iterdir())) > 1:
        gc.collect()


def _end_openmp_threads() -> None:
    """End the threads that torch's OpenMP keeps for this one; its next parallel loop starts them again.

    GNU's OpenMP remembers them in a forked child, where they are not; LLVM's and Intel's do not.
    Source: OpenMP 5.0, `omp_pause_resource_all`; torch/_C depends on the library that torch computes with.
    """
    import torch

    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except AttributeError:  # torch without OpenMP, or an OpenMP before 5.0
        return
    pause(_OMP_PAUSE_SOFT)


@contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """Keep processes forked inside from the threads of `tokenizers`.

    Without it the library prints a warning in each, and hangs when parallelism was asked for by name. It decides speed
    only, never a token.
    """
    before = os.environ.get(_TOKENIZERS)
    os.environ[_TOKENIZERS] = "false"
    try:
        yield
    finally:
        del os.environ[_TOKENIZERS]
        if before is not None:
            os.environ[_TOKENIZERS] = before


def _child(
    fn: Callable[[int], Any],
    rank: int,
    world_size: int,
    scratch: Path,
    logs: Path,
    threads: int,
    echo: bool,
) -> None:
    """Body of a rank; never returns."""
    status = 1
    try:
        gc.freeze()  # what the parent left behind is not ours to destroy
        if sys.platform == "linux":
            # The kernel kills this rank when the parent ends, however it ends: prctl(2), PR_SET_PDEATHSIG.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if not echo:
            log = os.open(logs / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, file=2)  # the parent asks when this rank hangs
        import torch

        torch.set_num_threads(threads)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            INIT_METHOD: f"file://{scratch / 'store'}",
        }
        torch.manual_seed(rank)
        result = fn(rank)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # others may still be opening connections to this rank
        _write(scratch, rank, _Record(result))
        status = 0
    except BaseException as error:
        if not echo:  # what the parent raises reaches the same terminal
            traceback.print_exc()
        coded = error if isinstance(error, HyperParallelError) else None
        _write(scratch, rank, _Record(None, stamp(error), traceback.format_exc(), coded))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def stamp(error: BaseException) -> float:
    """When an error was raised: the time of the first call, which the error keeps."""
    when: float = error.__dict__.setdefault("failed_at", time.time())
    return when


def _write(scratch: Path, rank: int, record: _Record) -> None:
    partial = scratch / f"record_{rank}.part"
    partial.write_bytes(pickle.dumps(record))
    partial.rename(scratch / f"record_{rank}")


def _read(scratch: Path, rank: int) -> _Record:
    record: _Record = pickle.loads((scratch / f"record_{rank}").read_bytes())
    return record


def _wait(ranks: list[ForkProcess], timeout_s: float | None) -> dict[int, str]:
    """Wait for all ranks, after the first failure for a grace time only; how each failed one did, first failure first.

    A rank that hangs beyond the deadline is asked where it stands.
    """
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    failures: dict[int, str] = {}
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        while running:
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            ended = wait(list(running), left)
            for rank in map(running.pop, ended):
                ranks[rank].join()
                if code := ranks[rank].exitcode:
                    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
                    failures[rank] = killed or f"exit code {code}"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ended:
                how = "stopped because another rank failed"
                if not failures:
                    how = f"not finished after {timeout_s} s"
                    _ask_for_stacks(ranks[rank] for rank in running.values())
                return failures | dict.fromkeys(running.values(), how)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a time limit of the caller
        _ask_for_stacks(ranks[rank] for rank in running.values())
        raise
    return failures


def _ask_for_stacks(ranks: Iterable[ForkProcess]) -> None:
    """Have ranks that hang write where they are into their logs."""
    for process in ranks:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _raise_first(failures: dict[int, str], scratch: Path, logs: Path) -> None:
    """Raise the failure that came first by the ranks' own clocks, the others one line each."""
    records = dict.fromkeys(failures, _Record())
    for rank in failures:
        with suppress(FileNotFoundError):  # it was killed
            records[rank] = _read(scratch, rank)
    # A killed rank leaves no record and makes the others fail in their next collective: it came first.
    killed = [rank for rank, how in failures.items() if how.startswith("killed by")]
    first = killed[0] if killed else min(failures, key=lambda rank: records[rank].failed_at)
    if (coded := records[first].coded) is not None:
        raise coded
    log = {rank: _text(logs / f"rank_{rank}.log") for rank in failures}
    others = [
        f"rank {rank}: {_last_line(records[rank], how, log[rank])}"
        for rank, how in failures.items()
        if rank != first
    ]
    text = (records[first].trace or _end(log[first])).rstrip()
    raise RankFailed(
        f"rank {first} failed ({failures[first]})\n" + "\n".join([text, *others]).strip(),
        where=f"{logs}/rank_{first}.log",
    )


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _end(log: str) -> str:
    """The last 4000 characters of a log, or those from where the main thread of a rank that hangs stands."""
    begin = max(len(log) - 4000, 0)
    stack = log.rfind(_STACK)
    return log[min(begin, stack) if stack >= 0 else begin :][:4000]


def _last_line(record: _Record, how: str, log: str) -> str:
    """What a rank failed with; of one that hangs, how and where its main thread stands."""
    if lines := record.trace.strip().splitlines():
        return lines[-1][:200]
    _, current, stack = log.rpartition(_STACK)
    where = stack.splitlines()[1:2] if current else []
    return ", in ".join([how, *(line.strip() for line in where)])
