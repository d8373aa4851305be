"""Copies between tiers on the simulated device, in flight until they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal

import torch

from hyper_parallel.errors import HyperParallelError, TransferFailed
from hyper_parallel.ir import COPIES
from hyper_parallel.units import KiB

Copies = Literal["at_issue", "at_wait", "threads"]
"""Time at which a copy of the simulated device moves its bytes: when the copy is issued, when it is waited for,
or concurrently, on one thread per direction (small copies when they are issued)."""
SMALL: Final = 256 * KiB
"""Maximum bytes of a small copy between DRAM and device, for which a thread takes longer than the copy itself."""

_Task = Callable[[], Any] | Future[Any]
"""Work that is concurrent with the operators of the device."""


class _DeferredWork:
    def __init__(self, dependency: _Task | None, move: Callable[[], Any]) -> None:
        self._dependency, self._pending = dependency, [move]

    def __call__(self) -> None:
        if self._pending:
            move = self._pending.pop()
            finish(self._dependency)
            self._dependency = None
            with torch._C._DisableTorchDispatch():  # a copy is not an operator of the step
                move()


class CopyLanes:
    """Copies in flight of the simulated device; see `Copies` for `when`."""

    def __init__(self, when: Copies) -> None:
        self.position: Any = None  # set by the executor; only `StreamLanes` reads it
        self._when = when
        self._running: dict[tuple[int, str], _Task] = {}
        self._lanes = {kind: ThreadPoolExecutor(1, f"hyper-{kind}") for kind in COPIES} if when == "threads" else {}

    def start(self, storage: int, lane: str, move: Callable[[], Any], num_bytes: int) -> None:
        """Issue a copy; arguments as in `StreamLanes.start`."""
        source, destination = COPIES[lane]
        source_copy = self._running.get((storage, source))  # it writes the source, so it ends first
        small = num_bytes <= SMALL and source_copy is None and "flash" not in (source, destination)
        # The work drops its references to the buffers before the copy counts as done, because the plan then frees them.
        work = _DeferredWork(source_copy, move)
        if self._when == "at_issue" or (self._when == "threads" and small):
            work()
        runs_here = self._when != "threads" or small
        self._running[storage, destination] = work if runs_here else self._lanes[lane].submit(work)

    def wait(self, storage: int, tier: str) -> None:
        """Wait until the newest copy of a storage into a tier is done.

        Raises:
            TransferFailed: HP513 when the copy failed.
        """
        finish(self._running.pop((storage, tier)))

    def refuse_failed(self) -> None:
        """Raise TransferFailed (HP513) if a copy has failed in its thread."""
        for task in self._running.values():
            if isinstance(task, Future) and task.done():
                finish(task)

    def close(self) -> None:
        """End the copy threads."""
        for lane in self._lanes.values():
            lane.shutdown()


def finish(copy: _Task | None) -> Any:
    """Complete a copy in flight, deferred or on a thread, and return its result.

    Raises:
        TransferFailed: HP513 when the copy failed.
    """
    try:
        if isinstance(copy, Future):
            return copy.result()
        return None if copy is None else copy()
    except HyperParallelError:
        raise
    except Exception as error:
        raise TransferFailed(
            "a copy between memory tiers failed",
            got=f"{type(error).__name__}: {error}",
            hint="fix this error, and continue from the last checkpoint",
        ) from error
