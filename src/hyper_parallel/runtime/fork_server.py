"""What a process does before it forks ranks, and a rank first of all; `launch` says why ranks are forked."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.errors import DeviceUnavailable, ForkUnsafe, RankFailed

if TYPE_CHECKING:
    import torch

_OMP_PAUSE_SOFT: Final = 1  # settings stay
_TOKENIZERS: Final = "TOKENIZERS_PARALLELISM"
_LONGEST_WAIT_S: Final = 2.0  # idle workers of BLAS spin for some 30 ms before they sleep
_BETWEEN_LOOKS_S: Final = 0.002
_QUIET_LOOKS: Final = 5  # a thread that computes again and again is caught in one of them


def start_rank(process: ForkProcess, rank: int, world_size: int) -> None:
    """Start a process.

    Raises:
        RankFailed: HP601 when the system has no process or memory left.
    """
    try:
        process.start()
    except OSError as error:
        raise RankFailed(
            f"rank {rank} of {world_size} could not be started; the others were stopped",
            got=error.strerror,
            hint="fewer ranks, or a higher limit of processes and memory (ulimit -u, ulimit -v)",
        ) from error


def prepare_fork() -> None:
    """Import what ranks need, write out what is printed, and end or refuse threads that a rank could not do without.

    Raises:
        ForkUnsafe: HP605 when this process is a member of a process group, or another thread of it computes.
    """
    # What every rank would otherwise import on its own.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.distributed.tensor.parallel  # noqa: F401

    _check_fork()
    sys.stdout.flush()
    sys.stderr.flush()
    _end_openmp_threads()
    _check_threads()


def begin_forked() -> None:
    """First of all in a rank: leave alone what the parent holds, and end when it ends."""
    parent = multiprocessing.parent_process()
    gc.freeze()  # what the parent left behind is not ours to destroy
    gc.enable()  # the command has it off while it starts
    if sys.platform == "linux":
        # The kernel kills this rank when the parent ends, however it ends: prctl(2), PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if parent is not None and os.getppid() != parent.pid:  # it had ended before
            os._exit(1)


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


def _check_threads() -> None:
    """Refuse a thread of this process that computes: it may hold locks of its library, for which the fork waits.

    Threads that sleep are left alone: those of a notebook or of a progress bar, and idle workers of BLAS.
    """
    deadline, quiet = time.monotonic() + _LONGEST_WAIT_S, 0
    found: set[tuple[int, str]] = set()
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        now = set(_running())
        quiet, found = (0, now) if now else (quiet + 1, found)
        time.sleep(_BETWEEN_LOOKS_S)
    if quiet < _QUIET_LOOKS:
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        raise ForkUnsafe(
            "local ranks cannot be forked while another thread computes",
            got=sorted(f"thread {python.get(number, name)}" for number, name in found),
            hint="let it end before, thread.join(), or start the ranks with torchrun",
        )


def _running() -> Iterator[tuple[int, str]]:
    """Number and name of the other threads of this process that run, or are ready to."""
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            name, _, state = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            if state[0] == "R" and int(task.name) != threading.get_native_id():
                yield int(task.name), name


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


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Start the device of a rank and return it.

    Raises:
        DeviceUnavailable: HP603 when there are fewer devices than local ranks.
        ForkUnsafe: HP605 when the process that forked this rank has started the device's driver.
    """
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if local_rank >= count:
        raise DeviceUnavailable(
            f"local rank {local_rank} finds no {kind} device of its own",
            got=f"{count} {kind} devices",
            hint="lower the degrees, or start the run on more machines with torchrun",
        )
    try:
        module.set_device(local_rank)
    except RuntimeError as error:
        if multiprocessing.parent_process() is None:
            raise
        raise ForkUnsafe(  # the driver of a device does not survive a fork
            f"local rank {local_rank} cannot start its {kind} device",
            got=(str(error).splitlines() or [""])[0],
            allowed=f"ranks of a process that has not used {kind} itself",
            hint="start the ranks with torchrun",
        ) from error
    return torch.device(kind, local_rank)


@contextmanager
def serial_tokenizers() -> Iterator[None]:
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
