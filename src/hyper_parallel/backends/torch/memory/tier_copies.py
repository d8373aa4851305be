"""Copies between tiers: in flight from their issue until they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal

import torch

from hyper_parallel.errors import HyperParallelError, TransferFailed
from hyper_parallel.ir import COPIES, Operator
from hyper_parallel.units import KiB

Copies = Literal["at_issue", "at_wait", "threads"]
"""Moment at which a copy of the simulated device moves its bytes: at its issue, at the last moment, or on one thread
per direction (small copies at their issue)."""
SMALL: Final = 256 * KiB
"""Limit of a small copy between DRAM and device: passing it to a thread takes longer than copying it."""
HOST: Final = "host"
"""The lane of operators in host memory."""

_Task = Callable[[], Any] | Future[Any]
"""Work that is concurrent with the operators of the device."""


class _DeferredWork:
    """Deferred work that runs once, on the first call."""

    def __init__(self, dependencies: list[_Task | None], move: Callable[[], Any]) -> None:
        self._dependencies, self._pending = dependencies, [move]

    def __call__(self) -> None:
        if self._pending:
            move = self._pending.pop()
            for task in self._dependencies:
                finish(task)
            self._dependencies.clear()
            with torch._C._DisableTorchDispatch():  # a copy is no operator of the step
                move()


class HostTasks:
    """Operators in host memory that have begun and are not joined.

    Attributes:
        position: Event at the current point of the compute lane; None: not recorded yet.
    """

    def __init__(self) -> None:
        self.position: Any = None
        self._updates: dict[int, Any] = {}
        self._writers: dict[int, Any] = {}  # storage -> the last of them that changes it

    def _register(self, index: int, operator: Operator, task: Any) -> None:
        self._updates[index] = task
        self._writers.update(dict.fromkeys(operator.writes, task))

    def join(self, index: int, operator: Operator) -> None:
        """Wait on the host, also on an accelerator, until an operator in host memory is done.

        A stream cannot wait for it, because a stream waits only for recorded events and the thread records none. The
        plan frees DRAM buffers at this point, and the next copy may reuse them.

        Raises:
            TransferFailed: HP513 when a copy of its operands failed.
        """
        task = self._updates[index]
        finish(task)
        # Not before `finish`: later operators order themselves by this entry
        del self._updates[index]
        for s in operator.writes:
            if self._writers.get(s) is task:
                del self._writers[s]


class CopyLanes(HostTasks):
    """Copies in flight of the simulated device, and operators in host memory.

    Args:
        when: See `Copies`; operators in host memory run at the same moments, on a thread of their own.
    """

    def __init__(self, when: Copies) -> None:
        super().__init__()
        self._when = when
        self._running: dict[tuple[int, str], _Task] = {}
        self._lanes = (
            {kind: ThreadPoolExecutor(1, f"hyper-{kind}") for kind in (*COPIES, HOST)}
            if when == "threads"
            else {}
        )

    def start(self, storage: int, lane: str, move: Callable[[], Any], num_bytes: int) -> None:
        """Issue a copy; `move` copies the bytes."""
        src, dst = COPIES[lane]
        # Work that writes the source must be done first.
        dependencies = [self._running.get((storage, src))]
        dependencies += [self._writers.get(storage)] if src == "dram" else []
        small = num_bytes <= SMALL and not any(dependencies) and "flash" not in (src, dst)
        self._running[storage, dst] = self._begin(lane, dependencies, move, immediate=small)

    def update(self, index: int, operator: Operator, run: Callable[[], None]) -> None:
        """Begin an operator in host memory, after the copies of its operands and the earlier host operators."""
        dependencies: list[_Task | None] = [partial(self._finish_before, index)]
        dependencies += [self._running.get((s, "dram")) for s in operator.touched]
        self._register(index, operator, self._begin(HOST, dependencies, run))

    def _finish_before(self, index: int) -> None:
        """Finish the earlier operators in host memory, so that they run in order; a thread is ordered anyway."""
        for other, task in list(self._updates.items()) if self._when == "at_wait" else ():
            if other == index:
                return
            finish(task)

    def _begin(
        self,
        lane: str,
        dependencies: Sequence[_Task | None],
        move: Callable[[], Any],
        *,
        immediate: bool = False,
    ) -> _Task:
        work = _DeferredWork(list(dependencies), move)
        if self._when == "at_issue" or (self._when == "threads" and immediate):
            work()
            return _no_op
        # The work drops its references to the buffers before the copy counts as done: the plan may free them then.
        return work if self._when == "at_wait" else self._lanes[lane].submit(work)

    def wait(self, storage: int, tier: str) -> None:
        """Wait until the newest copy of a storage into a tier is done.

        Raises:
            TransferFailed: HP513 when the copy failed.
        """
        finish(self._running.pop((storage, tier)))

    def refuse_failed(self) -> None:
        """Raise the error of a failed copy; until then it keeps its buffer."""
        for task in self._running.values():
            if isinstance(task, Future) and task.done():
                finish(task)

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes.values():
            lane.shutdown()


def _no_op() -> None:
    """Do nothing, as a copy that is done."""


def finish(copy: _Task | None) -> Any:
    """Complete a copy in flight, deferred or on a thread, and return the result of its thread.

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
            "a copy between memory tiers failed", got=f"{type(error).__name__}: {error}"
        ) from error
