"""Candidates for offload in one order of operators, and the device bytes at every position without offload.

A position is an index in the order. A gap is a range of positions during which a storage is off the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.def_use import live_bytes, use_definitions
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes


@dataclass(frozen=True)
class OffloadCandidate:
    """Possible offload of a storage: during one gap, or at both ends of the step if the storage exists between steps.

    Attributes:
        gaps: One gap inside the step; or two gaps, at both ends of the step; or one gap over the whole step, if no
            operator uses the storage.
        num_bytes: Bytes of the storage, rounded up as by the allocator.
        idle_s: Duration of the gaps in seconds.
    """

    gaps: tuple[Gap, ...]
    num_bytes: int
    idle_s: float

    @property
    def storage(self) -> int:
        """Storage index."""
        return self.gaps[0].storage

    @property
    def starts_offloaded(self) -> bool:
        """True when the storage starts the step off the device."""
        return self.gaps[0].first < 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Position ranges [low, high) of the gaps; no operator uses the storage there."""
        return tuple((gap.first + 1, gap.last) for gap in self.gaps)


class OffloadCandidates:
    """Offload candidates, and device bytes by position, for one order and one set of recomputed storages.

    Only storages in `movable` may leave the device. A gap may be shorter than its copies; operators then wait for the
    copies.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        recomputes: Recomputes,
        movable: Collection[int],
    ) -> None:
        self.program, self.machine, self.order = program, machine, order
        self.recomputes = recomputes
        self.movable = frozenset(movable)
        self.seconds = [program.operators[i].seconds for i in order]
        self._ends_s = np.cumsum(self.seconds)
        self._starts_s = self._ends_s - self.seconds
        self.n = len(order)
        self.writes = use_definitions(program, order).writes
        self.profile = self._profile()

    @cached_property
    def all(self) -> list[OffloadCandidate]:
        """Candidates of all movable storages."""
        return [c for s in sorted(self.movable) if self.program.sizes[s] for c in self._for_storage(s)]

    def is_unmodified(self, gap: Gap) -> bool:
        """Return whether the storage exists at the start of the step and is unmodified until the start of the gap."""
        s = gap.storage
        return self.program.storages[s].at_start and gap.first < min(self.writes[s], default=self.n)

    def content_since(self, gap: Gap) -> int:
        """Return the position from which the content at the start of a gap may be copied.

        This is the position of the last write before the gap. Without such a write, it is the position of the
        allocation, or 0 if the storage exists at the start of the step.
        """
        s = gap.storage
        index = bisect_right(self.writes[s], gap.first)
        if index:
            return self.writes[s][index - 1]
        return 0 if self.program.storages[s].at_start else self.recomputes.uses[s][0]

    def early_stores(self, gaps: Sequence[Gap]) -> list[list[Gap]]:
        """Return, per position, the gaps whose storage may be copied to DRAM from there on, before the gap starts.

        The position is that of the last write before the gap, or of the allocation. Excluded are gaps on flash, gaps
        that start before the step, and storages that are dropped for recomputation, because no copy of a storage may be
        in flight when it is dropped.
        """
        early: list[list[Gap]] = [[] for _ in self.order]
        dropped = self.recomputes.dropped
        for gap in gaps:
            s = gap.storage
            if gap.first < 0 or gap.tier != "dram" or s in dropped or not self.recomputes.uses[s]:
                continue
            since = self.content_since(gap)
            if since < gap.first:
                early[since].append(gap)
        return early

    def _for_storage(self, s: int) -> list[OffloadCandidate]:
        size, storage = self.program.sizes[s], self.program.storages[s]
        uses = self.recomputes.uses[s]
        result = [
            OffloadCandidate((Gap(s, a, b, "dram"),), size, float(self._starts_s[b] - self._ends_s[a]))
            for a, b in pairwise(uses)
            if b - a > 1 and (a, b) != self.recomputes.gaps.get(s)
        ]
        if not storage.persistent:
            return result
        if not uses:
            gaps = (Gap(s, -1, self.n, "dram"),)
            return [OffloadCandidate(gaps, size, float(self._ends_s[-1]))]
        first, last = uses[0], uses[-1]
        if first == 0 and last + 1 == self.n:
            return result
        idle = float(self._starts_s[first] + self._ends_s[-1] - self._ends_s[last])
        tail = Gap(s, last, self.n, "dram")
        return [*result, OffloadCandidate((Gap(s, -1, first, "dram"), tail), size, idle)]

    def _profile(self) -> np.ndarray:
        profile = live_bytes(self.program, self.recomputes.uses)
        sizes = self.program.sizes
        for s, (dropped, recomputed) in self.recomputes.gaps.items():
            profile[dropped + 1 : recomputed] -= sizes[s]
        for position, helpers in self.recomputes.helpers.items():
            profile[position] += sum(sizes[h] for h in helpers)
        return profile
