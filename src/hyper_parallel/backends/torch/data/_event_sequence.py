"""Sequence of events common to all ranks: negotiated at first, followed without communication once learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.backends.torch.collectives import purpose
from hyper_parallel.errors import CollectiveMismatch
from hyper_parallel.ir import Purpose

_UNANIMOUS_PASSES: Final = 3
"""Number of equal passes before learning a sequence that runs a unit several times, or some units in forward only.

A trade-off: a later pass that differs raises HP622. A larger number makes that rarer but delays learning."""


class HostExchange:
    """Small all-reduces of host values, hidden from recorders of a step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def lowest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of every rank's values, elementwise."""
        with _disable_current_modes(), torch.no_grad(), purpose(Purpose.UNIT_ORDER):
            tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
            return [int(value) for value in tensor.tolist()]


class EventSequence:
    """Sequence of events of one kind of pass.

    Args:
        exchange: All-reduce of host values.
        number: Identity of the sequence, equal on all ranks.
        covers: Returns whether a list of events can be learned at once (True), later (False) or never (None).
    """

    DONE: Final = 1 << 40

    def __init__(
        self, exchange: HostExchange, number: int, covers: Callable[[Sequence[int]], bool | None]
    ) -> None:
        self._exchange, self._number, self._covers = exchange, number, covers
        self._events: list[int] = []
        self._next = 0
        self._unanimous = True
        self._equal_passes = 0
        self.learned = False
        self.conditional: set[int] = set()

    def begin(self) -> None:
        """Begin a pass."""
        self._next, self._unanimous = 0, True
        if not self.learned:
            self._events = []

    def reach(self, event: int, fill: Callable[[int], None]) -> bool:
        """Run events of other ranks until `event` is next on all ranks; return whether the sequence contains it."""
        if not self.learned:
            while (agreed := self._agree(event)) != event:
                fill(agreed)
            return True
        try:
            position = self._events.index(event, self._next)
        except ValueError:
            return False
        self._fill_until(position, fill)
        self._next += 1
        return True

    def rest(self) -> list[int]:
        """Return the remaining events of a learned sequence."""
        return self._events[self._next :] if self.learned else []

    def finish(self, fill: Callable[[int], None]) -> None:
        """End a pass: run the remaining events of other ranks."""
        if self.learned:
            self._fill_until(len(self._events), fill)
            return
        while (agreed := self._agree(self.DONE)) != self.DONE:
            fill(agreed)
        covered = self._covers(self._events)
        if not self._unanimous or covered is None:
            self._equal_passes = 0
            return
        self._equal_passes += 1
        self.learned = covered or self._equal_passes >= _UNANIMOUS_PASSES

    def _fill_until(self, position: int, fill: Callable[[int], None]) -> None:
        while self._next < position:
            self._next += 1
            fill(self._events[self._next - 1])

    def _agree(self, event: int) -> int:
        # The minimum of a negated value is the negated maximum.
        values = (event, -event, self._number, -self._number)
        lowest, highest, first, last = self._exchange.lowest(values)
        if first != -last:
            raise CollectiveMismatch(
                "ranks run passes of different models or kinds at the same time",
                hint="call the same forward and backward passes on all ranks, in the same order",
            )
        self._unanimous &= lowest == -highest
        if lowest != self.DONE:
            self._events.append(lowest)
        return lowest
