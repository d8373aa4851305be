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
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ForkUnsafe, HyperParallelError, RankFailed

INIT_METHOD = "HYPER_PARALLEL_INIT_METHOD"
"""Environment variable that tells a forked rank how to meet the others."""

_OMP_PAUSE_SOFT = 1  # settings stay
_TOKENIZERS = "TOKENIZERS_PARALLELISM"
_GRACE_S = 2.0
_STACKS_S = 0.5
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    when: float
    how: str


def preload() -> None:
    """Import what every rank would otherwise import on its own; idempotent."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.distributed.tensor.parallel  # noqa: F401


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
    preload()
    _check_fork()
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_") as scratch:
        logs = Path(log_dir) if log_dir else Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        _end_openmp_threads()
        pids: dict[int, int] = {}
        try:
            with _serial_tokenizers():
                for rank in range(world_size):
                    pid = os.fork()
                    if pid == 0:
                        echo = rank == echo_rank
                        _child(fn, rank, world_size, Path(scratch), logs, threads, echo)
                    pids[pid] = rank
        except BaseException as error:
            _kill(pids)
            if not isinstance(error, OSError):
                raise
            raise RankFailed(
                f"rank {len(pids)} of {world_size} could not be started; the others were stopped",
                got=error.strerror,
                hint="fewer ranks, or a higher limit of processes and memory (ulimit -u, ulimit -v)",
            ) from error
        failures = _wait(pids, timeout_s)
        if failures:
            _raise_first(failures, Path(scratch), logs)
        return [
            pickle.loads((Path(scratch) / f"result_{r}").read_bytes()) for r in range(world_size)
        ]


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
        if before is None:
            del os.environ[_TOKENIZERS]
        else:
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
        _die_with_parent()
        if not echo:
            log = os.open(logs / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        faulthandler.register(
            signal.SIGUSR1, file=2
        )  # asked for by the parent when this rank hangs
        import torch

        torch.set_num_threads(threads)
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                INIT_METHOD: f"file://{scratch / 'store'}",
            }
        )
        torch.manual_seed(rank)
        result = fn(rank)
        (scratch / f"result_{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException as error:
        _record(error, rank, scratch, echo)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    """Have the kernel kill this rank when the parent ends, however it ends (Linux; prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _record(error: BaseException, rank: int, scratch: Path, echo: bool) -> None:
    if not echo:  # what the parent raises reaches the same terminal
        traceback.print_exc()
    text = traceback.format_exc()
    coded = error if isinstance(error, HyperParallelError) else None
    partial = scratch / f"error_{rank}.part"
    partial.write_bytes(pickle.dumps((time.time(), text, coded)))
    partial.rename(scratch / f"error_{rank}")


def _wait(pids: dict[int, int], timeout_s: float | None) -> list[_Failure]:
    """Reap all ranks; after the first failure or the deadline, kill what is left."""
    running = dict(pids)
    failures: list[_Failure] = []
    deadline = time.monotonic() + timeout_s if timeout_s else None
    try:
        while running:
            for pid, rank in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del running[pid]
                    code = os.waitstatus_to_exitcode(status)
                    if code:
                        how = (
                            f"killed by {signal.Signals(-code).name}"
                            if code < 0
                            else f"exit code {code}"
                        )
                        failures.append(_Failure(rank, time.monotonic(), how))
            if (failures and deadline is None) or (
                failures and deadline and deadline > failures[0].when + _GRACE_S
            ):
                deadline = failures[0].when + _GRACE_S
            if running and deadline is not None and time.monotonic() > deadline:
                how = (
                    "stopped because another rank failed"
                    if failures
                    else f"not finished after {timeout_s} s"
                )
                if not failures:
                    _ask_for_stacks(running)
                failures += [_Failure(rank, time.monotonic(), how) for rank in running.values()]
                break
            time.sleep(_POLL_S)
    except BaseException as stop:
        if not isinstance(stop, KeyboardInterrupt | SystemExit):  # a time limit of the caller
            _ask_for_stacks(running)
        raise
    finally:
        _kill(running)
    return failures


def _kill(pids: Iterable[int]) -> None:
    """End ranks at once and reap them."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _ask_for_stacks(pids: Iterable[int]) -> None:
    """Have ranks that hang write where they are into their logs."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)


def _raise_first(failures: list[_Failure], scratch: Path, logs: Path) -> None:
    """Raise the failure that came first by the ranks' own clocks, the others one line each."""
    recorded = {}
    for failure in failures:
        path = scratch / f"error_{failure.rank}"
        if path.exists():
            recorded[failure.rank] = pickle.loads(path.read_bytes())
    # A killed rank leaves no record and makes the others fail in their next collective: it came first.
    killed = [f.rank for f in failures if f.how.startswith("killed by")]
    first = (
        killed[0]
        if killed
        else min(recorded, key=lambda r: recorded[r][0], default=failures[0].rank)
    )
    _, text, coded = recorded.get(first, (0.0, "", None))
    if coded is not None:
        raise coded
    hows = {f.rank: f.how for f in failures}
    if not text:
        text = _log(logs, first)[-4000:]
    others = [
        f"rank {r}: {_last_line(recorded.get(r), how, _log(logs, r))}"
        for r, how in hows.items()
        if r != first
    ]
    detail = "\n".join([text.rstrip(), *others]).strip()
    raise RankFailed(
        f"rank {first} failed ({hows[first]})\n{detail}", where=f"{logs}/rank_{first}.log"
    )


def _log(logs: Path, rank: int) -> str:
    path = logs / f"rank_{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _last_line(record: tuple[float, str, object] | None, how: str, log: str) -> str:
    """What a rank failed with; of one that hangs, how and where its main thread stands."""
    lines = record[1].strip().splitlines() if record else []
    if lines:
        return lines[-1][:200]
    _, current, stack = log.rpartition("Current thread")
    where = stack.splitlines()[1:2] if current else []
    return ", in ".join([how, *(line.strip() for line in where)])
