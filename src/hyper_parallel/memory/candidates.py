"""What may leave the device in one order, and the bytes during every position when nothing does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes


@dataclass(frozen=True)
class Candidate:
    """One storage leaving once: a gap inside the step, or the two ends of a persistent storage's stay at home.

    Attributes:
        gaps: The gap, or head and tail.
        num_bytes: What it takes on the device.
        idle_s: Seconds without an access.
    """

    gaps: tuple[Gap, ...]
    num_bytes: int
    idle_s: float

    @property
    def storage(self) -> int:
        """Its index."""
        return self.gaps[0].storage

    @property
    def home(self) -> bool:
        """It starts the step away."""
        return self.gaps[0].first < 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Position ranges [low, high) in which nothing uses it on the device."""
        return tuple((gap.first + 1, gap.last) for gap in self.gaps)


class OffloadCandidates:
    """OffloadCandidates and profile of one order with fixed recomputes.

    A gap may be shorter than its copies: the compute lane then waits.

    Args:
        program: Operators with their seconds.
        machine: Its channels.
        order: Order of the operators.
        recomputes: What is dropped and made again, and what runs in host memory.
        movable: Storages that may leave.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        recomputes: Recomputes,
        movable: Collection[int],
    ) -> None:
        self.program, self.machine, self.recomputes = program, machine, recomputes
        self.movable = frozenset(movable)
        self.seconds = recomputes.host.seconds(program, order)
        self._ends_s = np.cumsum(self.seconds)
        self._starts_s = self._ends_s - self.seconds
        self.n = len(order)
        self._writes = recomputes.host.device_writes(program, order)
        self.profile = self._profile()

    @cached_property
    def all(self) -> list[Candidate]:
        """Everything that may leave."""
        return [c for s in sorted(self.movable) if self.program.sizes[s] for c in self._of(s)]

    def clean(self, gap: Gap) -> bool:
        """The storage still has the content it started the step with."""
        s = gap.storage
        return self.program.storages[s].at_start and gap.first < min(
            self._writes.get(s, ()), default=self.n
        )

    def changed(self, s: int) -> bool:
        """The step writes to the storage on the device."""
        return s in self._writes

    def since(self, gap: Gap) -> int:
        """Position from whose end on the storage has the content it leaves with."""
        s = gap.storage
        writes = self._writes.get(s, [])
        at = bisect_right(writes, gap.first)
        if at:
            return writes[at - 1]
        return 0 if self.program.storages[s].at_start else self.recomputes.uses[s][0]

    def _of(self, s: int) -> list[Candidate]:
        size, storage = self.program.sizes[s], self.program.storages[s]
        uses, host = self.recomputes.uses[s], self.recomputes.host
        at_home = s in host.at_home  # then it leaves between two uses without a copy
        taken = {(g.first, g.last) for g in host.gaps if g.storage == s} if at_home else set()
        result = [
            Candidate((Gap(s, a, b, "dram"),), size, float(self._starts_s[b] - self._ends_s[a]))
            for a, b in pairwise(uses)
            if b - a > 1 and (a, b) != self.recomputes.gaps.get(s) and (a, b) not in taken
        ]
        if at_home or not storage.persistent:
            return result
        if not uses:
            gaps = (Gap(s, -1, self.n, "dram"),)
            return [Candidate(gaps, size, float(self._ends_s[-1]))]
        first, last = uses[0], uses[-1]
        if first == 0 and last + 1 == self.n:
            return result
        idle = float(self._starts_s[first] + self._ends_s[-1] - self._ends_s[last])
        tail = Gap(s, last, self.n, "dram")
        return [*result, Candidate((Gap(s, -1, first, "dram"), tail), size, idle)]

    def _profile(self) -> np.ndarray:
        """Device bytes during every position, liveness and recomputation applied, nothing moved."""
        change = np.zeros(self.n + 1, np.int64)
        sizes = self.program.sizes
        for s, storage in enumerate(self.program.storages):
            uses = self.recomputes.uses[s]
            if not uses and not storage.persistent:
                continue
            change[0 if storage.at_start else uses[0]] += sizes[s]
            if not storage.at_end:
                change[uses[-1] + 1] -= sizes[s]
            if s in self.recomputes.gaps:
                a, b = self.recomputes.gaps[s]
                change[a + 1] -= sizes[s]
                change[b] += sizes[s]
        for position, helpers in self.recomputes.helpers.items():
            extra = sum(sizes[h] for h in helpers)
            change[position] += extra
            change[position + 1] -= extra
        for gap in self.recomputes.host.gaps:
            if gap.storage in self.recomputes.host.at_home:  # it leaves and comes back unasked
                change[gap.first + 1] -= sizes[gap.storage]
                change[gap.last] += sizes[gap.storage]
        return np.cumsum(change[:-1])
