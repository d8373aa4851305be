"""Running copies between tiers: begun when they are issued, surely done when they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal

from hyper_parallel.errors import HyperParallelError, TransferFailed
from hyper_parallel.ir import COPIES
from hyper_parallel.units import KiB

Copies = Literal["at_issue", "at_wait", "threads"]
"""When the bytes of a copy of the simulated device really move: when it is issued, at the last moment, or on one thread
per direction (small ones when they are issued)."""
SMALL: Final = 256 * KiB
"""Handing a copy between DRAM and device to a thread takes longer than moving so many bytes."""


class CopyLanes:
    """The copies that are under way.

    Args:
        when: See `Copies`.
    """

    def __init__(self, when: Copies) -> None:
        self._when = when
        self._running: dict[tuple[int, str], Callable[[], None] | Future[None]] = {}
        self._lanes = (
            {kind: ThreadPoolExecutor(1, f"hyper-{kind}") for kind in COPIES}
            if when == "threads"
            else {}
        )

    def start(self, storage: int, lane: str, move: Callable[[], None], num_bytes: int) -> None:
        """Issue a copy; `move` moves the bytes."""
        src, dst = COPIES[lane]
        before = self._running.get(
            (storage, src)
        )  # a copy that fills the source must be done first
        small = num_bytes <= SMALL and before is None and "flash" not in (src, dst)
        if self._when == "at_issue" or (self._when == "threads" and small):
            finish(before)
            move()
            self._running[storage, dst] = _nothing
        elif self._when == "at_wait":

            def late() -> None:
                # What fills the source has not moved yet either; its own wait then finds nothing left to do.
                if (storage, src) in self._running:
                    finish(self._running[storage, src])
                    self._running[storage, src] = _nothing
                move()

            self._running[storage, dst] = late
        else:
            todo = [move]

            def threaded() -> None:
                finish(before)
                # Let go of the buffers before the copy counts as done: the plan may free them right then.
                todo.pop()()

            self._running[storage, dst] = self._lanes[lane].submit(threaded)

    def wait(self, storage: int, tier: str) -> None:
        """Return when the newest copy of a storage into a tier is done.

        Raises:
            TransferFailed: HP513 when it could not be made.
        """
        finish(self._running.pop((storage, tier)))

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes.values():
            lane.shutdown()


def _nothing() -> None:
    """A copy that is done."""


def finish(copy: Callable[[], None] | Future[Any] | None) -> Any:
    """Complete a running copy, whatever carries it; what its thread returns."""
    try:
        if isinstance(copy, Future):
            return copy.result()
        return None if copy is None else copy()
    except HyperParallelError:
        raise
    except Exception as error:
        raise TransferFailed(
            "a copy between memory tiers failed", got=f"{type(error).__name__}: {error}"
        ) from error
