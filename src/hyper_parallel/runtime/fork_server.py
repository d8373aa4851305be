"""Preparation of a process before it forks ranks, and initialization of forked ranks; see `local_launch`."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.errors import DeviceUnavailable, ForkUnsafe, RankFailed

if TYPE_CHECKING:
    import torch

_OMP_PAUSE_SOFT: Final = 1  # the runtime keeps its settings
_TOKENIZERS: Final = "TOKENIZERS_PARALLELISM"
_LONGEST_WAIT_S: Final = 2.0  # idle BLAS workers spin for about 30 ms before they sleep
_BETWEEN_LOOKS_S: Final = 0.002
_QUIET_LOOKS: Final = 5
"""Consecutive polls that must find all threads asleep, because a computing thread may pause. Not measured."""


def fork_rank(target: Callable[..., None], arguments: tuple[Any, ...], rank: int, world_size: int) -> ForkProcess:
    """Fork a rank that runs `target(*arguments)`, and return its process; raise RankFailed (HP601) if this fails."""
    process = ForkProcess(target=target, args=arguments)
    try:
        process.start()
    except OSError as error:
        raise RankFailed(
            f"rank {rank} of {world_size} could not be started, so all ranks were stopped",
            got=error.strerror,
            hint="start fewer ranks, or raise the limits of processes and memory (ulimit -u, ulimit -v)",
        ) from error
    return process


def prepare_fork() -> None:
    """Prepare forks: import modules that ranks need, flush output, end OpenMP threads, and check that a fork is safe.

    Raises:
        ForkUnsafe: HP605 when torch.distributed is initialized, or another thread of this process computes.
    """
    # Ranks inherit these modules instead of importing them.
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
    """Initialize a forked rank: enable garbage collection, but exempt inherited objects from it.

    On Linux, the kernel kills the rank when its parent ends.
    """
    parent = multiprocessing.parent_process()
    gc.freeze()  # objects of the parent must not be finalized here
    gc.enable()  # the command line disables garbage collection at its start
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent.pid:  # the parent ended before prctl
            os._exit(1)


def _check_fork() -> None:
    """Raise ForkUnsafe (HP605) if torch.distributed is initialized; else free destroyed process groups.

    Forked ranks inherit process groups without their threads, and would hang when using or freeing a group. Meshes
    refer to groups in reference cycles, so garbage collection is needed to free them.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ForkUnsafe(
            "local ranks cannot be forked from a process that belongs to a process group",
            got=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            hint="close the world before ranks are started (`with hp.World.join() as world: ...`), or call "
            "torch.distributed.destroy_process_group() for a group of your own",
        )
    tasks = Path("/proc/self/task")
    if not tasks.is_dir() or len(list(tasks.iterdir())) > 1:
        gc.collect()


def _check_threads() -> None:
    """Raise ForkUnsafe (HP605) if a thread still computes after 2 s: it may hold a lock that a forked rank needs.

    Sleeping threads, for example of notebooks, progress bars or BLAS, are accepted. Systems without /proc are not
    checked.
    """
    deadline, quiet = time.monotonic() + _LONGEST_WAIT_S, 0
    running: set[tuple[int, str]] = set()
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        now = set(_running())
        quiet, running = (0, now) if now else (quiet + 1, running)
        time.sleep(_BETWEEN_LOOKS_S)
    if quiet < _QUIET_LOOKS:
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        raise ForkUnsafe(
            "local ranks cannot be forked while another thread computes",
            got=sorted(f"thread {python.get(number, name)}" for number, name in running),
            hint="wait for the thread with thread.join() before the ranks start, or start the ranks with torchrun",
        )


def _running() -> Iterator[tuple[int, str]]:
    """Yield (id, name) of each other thread of this process that is running or runnable."""
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # the thread has ended
            name, _, state = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            if state[0] == "R" and int(task.name) != threading.get_native_id():
                yield int(task.name), name


def _end_openmp_threads() -> None:
    """End the worker threads of torch's OpenMP runtime; the next parallel loop starts new threads.

    In a forked child these threads do not exist, but GNU's OpenMP runtime would wait for them. Source: OpenMP 5.0,
    `omp_pause_resource_all`; torch._C links the runtime.
    """
    import torch

    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except AttributeError:  # torch without OpenMP, or an OpenMP before 5.0
        return
    pause(_OMP_PAUSE_SOFT)


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank, of type `kind`; an accelerator also becomes the current device of torch.

    Raises:
        DeviceUnavailable: HP502 when the accelerator of this index does not exist.
        ForkUnsafe: HP605 when the process that forked this rank has initialized the device driver.
    """
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if local_rank >= count:
        raise DeviceUnavailable(
            f"local rank {local_rank} needs {kind} device {local_rank}, which does not exist",
            got=f"{count} {kind} devices",
            hint="lower the degrees, or start the run on more machines with torchrun"
            if count
            else f"install torch with support for {kind}, or run on the CPU",
        )
    try:
        module.set_device(local_rank)
    except RuntimeError as error:
        if multiprocessing.parent_process() is None:
            raise
        raise ForkUnsafe(  # the driver of a device does not survive a fork
            f"local rank {local_rank} cannot initialize its {kind} device after a fork",
            got=(str(error).splitlines() or [""])[0],
            allowed=f"ranks of a process that has not used {kind} itself",
            hint="start the ranks with torchrun",
        ) from error
    return torch.device(kind, local_rank)


@contextmanager
def serial_tokenizers() -> Iterator[None]:
    """Disable the threads of the library `tokenizers` in processes that are forked inside the context.

    With threads, the library would print a warning in each forked process, or even hang. Tokens do not depend on this
    setting.
    """
    before = os.environ.get(_TOKENIZERS)
    os.environ[_TOKENIZERS] = "false"
    try:
        yield
    finally:
        del os.environ[_TOKENIZERS]
        if before is not None:
            os.environ[_TOKENIZERS] = before
