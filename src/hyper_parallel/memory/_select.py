"""Selection: which idle gaps bring the program-order profile under a target, cheapest first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from hyper_parallel.ir import MemoryProgram, MemoryTier
from hyper_parallel.memory._greedy import Greedy
from hyper_parallel.memory._issue import Gap
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._recompute import Recomputes
from hyper_parallel.memory._relaxation import Relaxation

Rank = Literal["idle_per_transfer", "longest_gap", "largest", "ring", "home", "least_waits"]


@dataclass(frozen=True)
class Candidate:
    """One storage leaving once: a gap inside the step, or the two ends of a persistent storage's stay at home.

    Attributes:
        gaps: The gap, or head and tail.
        spans: Position ranges [low, high) in which its device bytes would be gone.
        idle_s: Seconds without an access.
        transfer_s: Seconds of copies it adds.
        exposed_s: Seconds by which its last copy outlasts the step even on an empty channel.
    """

    gaps: tuple[Gap, ...]
    spans: tuple[tuple[int, int], ...]
    num_bytes: int
    idle_s: float
    transfer_s: float
    exposed_s: float = 0.0

    @property
    def home(self) -> bool:
        """It starts the step away."""
        return self.gaps[0].first < 0

    def value(self, rank: Rank, ring_bytes: float = 1.0) -> tuple[float, ...]:
        """How early a ranking rule takes it; higher is earlier."""
        if rank == "idle_per_transfer":
            return (self.idle_s / self.transfer_s,)
        if rank == "ring":
            return (-abs(math.log(self.num_bytes / ring_bytes)),)
        if rank == "home":  # nothing has to be sent before the peak; with few reloads first
            return float(self.home), -float(self.home) * len(self.gaps), self.idle_s
        return (self.idle_s if rank == "longest_gap" else float(self.num_bytes),)


class Selector:
    """Candidates and profile of one order with fixed recomputes.

    Args:
        stall: Also take gaps that are shorter than their copies: the compute lane then waits.
        stretch: Count on copies only as far as the channels can carry them in a step that is longer by this factor;
            None: count on every copy as if it were alone.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        recomputes: Recomputes,
        movable: Collection[int],
        *,
        stall: bool = False,
        stretch: float | None = None,
    ) -> None:
        self.program, self.machine, self.recomputes = program, machine, recomputes
        self.stall, self.stretch = stall, stretch
        seconds = recomputes.host.seconds(program, order)
        self.ends_s = np.cumsum(seconds)
        self.starts_s = self.ends_s - seconds
        self.n = len(order)
        self.writes = recomputes.host.device_writes(program, order)
        self.written = set(self.writes)
        self.profile = self._profile()
        self.sequences: dict[Rank, Greedy | Relaxation] = {}
        self.movable = movable
        # No program of these recomputes takes less time, wherever its bytes are.
        self.least_s = sum(seconds) + sum(recomputes.least_s(program).values())

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Everything that may leave."""
        few = 0.0
        if self.stretch is not None:
            # A copy that is nearly all latency takes a channel's time for next to no bytes.
            latencies = (self.machine.store.latency_bytes, self.machine.prefetch.latency_bytes)
            few = min(latencies) / 4
        return [c for s in self.movable if self.program.sizes[s] >= few for c in self._of(s)]

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
            low, high, extra = self._for_host(gap)
            change[low] += extra
            change[high] -= extra
        return np.cumsum(change[:-1])

    def _for_host(self, gap: Gap) -> tuple[int, int, int]:
        """(low, high, bytes): what updates in host memory change on the device, as if their copies were alone."""
        s, low = gap.storage, gap.first + 1
        num_bytes = self.program.storages[s].num_bytes
        if s in self.recomputes.host.at_home:  # gone, but for its way back
            back = self.machine.prefetch.seconds(num_bytes)
            high = self._begun(gap.last, back) if gap.last < self.n else self.n
            return low, max(low, high), -self.program.sizes[s]
        # A gradient that is used no more has to be sent first.
        high = self._done(self.since(gap), self.machine.store.seconds(num_bytes))
        return low, max(low, high), self.program.sizes[s]

    def _of(self, s: int) -> list[Candidate]:
        size = self.program.sizes[s]
        uses = self.recomputes.uses[s]
        if not size:
            return []
        result: list[Candidate] = []
        storage = self.program.storages[s]
        out = self.machine.store.seconds(storage.num_bytes)
        back = self.machine.prefetch.seconds(storage.num_bytes)
        moves = out + back
        dropped = self.recomputes.gaps.get(s)
        host = self.recomputes.host
        home = s in host.at_home  # then it leaves between two uses without a copy
        taken = {(g.first, g.last) for g in host.gaps if g.storage == s} if home else set()
        if home:
            out, moves = 0.0, back
        if self.stall:
            out = back = 0.0
        for a, b in pairwise(uses):
            if b - a > 1 and (a, b) != dropped and (a, b) not in taken:
                idle = float(self.starts_s[b] - self.ends_s[a])
                gap = Gap(s, a, b, "dram")
                low = a + 1 if home else max(self._done(self.since(gap), out), a + 1)
                high = self._begun(b, back)
                if low < high:
                    result.append(Candidate((gap,), ((low, high),), size, idle, moves))
        if home:
            return result
        if storage.persistent and uses:
            first, last = uses[0], uses[-1]
            high = self._begun(first, back)
            tail = Gap(s, last, self.n, "dram")
            low = last + 1
            if s in self.written:
                low = max(low, self._done(self.since(tail), out))
            # One span per gap; an empty one (head used at once, tail too short to leave) frees nothing.
            spans = ((0, high), (min(low, self.n), self.n))
            idle = float(self.starts_s[first] + self.ends_s[-1] - self.ends_s[last])
            ends = Candidate(
                (Gap(s, -1, first, "dram"), tail),
                spans,
                size,
                idle,
                moves,
                max(0.0, float(self.ends_s[self.since(tail)] + out - self.ends_s[-1]))
                if s in self.written
                else 0.0,
            )
            if any(a < b for a, b in spans):
                result.append(ends)
            # With its home in DRAM a storage leaves between two uses without a copy until it is written.
            clean = [c for c in result if c.gaps[0].first >= 0 and self.clean(c.gaps[0])]
            if clean:
                result.append(
                    Candidate(
                        tuple(g for c in (ends, *clean) for g in c.gaps),
                        tuple(x for c in (ends, *clean) for x in c.spans),
                        size,
                        idle + sum(c.idle_s for c in clean),
                        moves + len(clean) * self.machine.prefetch.seconds(storage.num_bytes),
                        ends.exposed_s,
                    )
                )
        elif storage.persistent:
            gaps = (Gap(s, -1, self.n, "dram"),)
            result.append(Candidate(gaps, ((0, self.n),), size, float(self.ends_s[-1]), 1e-9))
        return result

    def _done(self, position: int, seconds: float) -> int:
        """First position that starts when a copy issued after `position` is done."""
        if seconds == 0:
            return position + 1
        return int(np.searchsorted(self.starts_s, self.ends_s[position] + seconds))

    def _begun(self, position: int, seconds: float) -> int:
        """Position from which the bytes are back when the copy must be done at `position`."""
        if seconds == 0:
            return position
        begin = self.starts_s[position] - seconds
        return max(int(np.searchsorted(self.starts_s, begin, "right")) - 1, 0)

    def considered(self, rank: Rank) -> list[Candidate]:
        """What a rule may take.

        State that leaves without a copy needs its home in DRAM. Where no channel is counted, that and its leaves inside
        the step are separate choices of every rule but `home`, which takes both together and sends no state before it
        was changed.
        """
        if rank == "home":
            persistent = [s.persistent for s in self.program.storages]
            return [c for c in self.candidates if c.home or not persistent[c.gaps[0].storage]]
        if self.stretch is None:
            return [c for c in self.candidates if len(c.gaps) < 3]
        return self.candidates

    def select(self, target_bytes: int, rank: Rank) -> tuple[list[Candidate], np.ndarray]:
        """Take candidates at the highest position until the profile is under the target.

        Returns:
            The chosen candidates and the resulting profile.
        """
        if rank not in self.sequences:
            self.sequences[rank] = Relaxation(self) if rank == "least_waits" else Greedy(self, rank)
        return self.sequences[rank].until(target_bytes)

    def ring_bytes(self) -> float:
        """Size of a copy that streams most: two are on the device at any time, and each pays its latency.

        Of B T bytes per step s / (s + l B) arrive, and 2 s are taken; the difference is largest at this s.
        """
        channel = self.machine.prefetch
        step_s = max(float(self.ends_s[-1]), 1e-12) if self.n else 1e-12
        latency_bytes = max(channel.latency_bytes, 1.0)
        return math.sqrt(channel.bytes_s * step_s * latency_bytes / 2)

    def clean(self, gap: Gap) -> bool:
        """The storage still has the content it started the step with."""
        s = gap.storage
        return self.program.storages[s].at_start and gap.first < min(
            self.writes.get(s, ()), default=self.n
        )

    def since(self, gap: Gap) -> int:
        """Position from whose end on the storage has the content it leaves with."""
        s = gap.storage
        writes = self.writes.get(s, [])
        at = bisect_right(writes, gap.first)
        if at:
            return writes[at - 1]
        return 0 if self.program.storages[s].at_start else self.recomputes.uses[s][0]


def assign_tiers(
    program: MemoryProgram,
    machine: MemoryMachine,
    chosen: list[Candidate],
    share: float,
    at_home: Collection[int] = (),
) -> list[Gap]:
    """DRAM while its budget lasts; then the candidates with the longest idle time go on to flash.

    The DRAM account is the sum over all chosen candidates, an upper bound of what is there at any one time; replay
    gives the exact peak.

    Args:
        program: Sizes.
        machine: Capacities.
        chosen: What leaves the device.
        share: Part of the DRAM to fill; the rest is for bytes on their way through DRAM to flash and back.
        at_home: Storages that live in DRAM whatever is chosen.
    """
    flash = machine.copy_out is not None and machine.copy_in is not None
    room = machine.dram_bytes
    tiers: dict[int, MemoryTier] = {}
    if room is not None and flash:
        used = sum(program.sizes[s] for s in at_home)
        by_storage: dict[int, float] = {}
        for c in chosen:
            s = c.gaps[0].storage
            if s in at_home:
                continue
            by_storage[s] = max(by_storage.get(s, 0.0), c.idle_s)
        for s in sorted(by_storage, key=lambda s: by_storage[s]):
            if used + program.sizes[s] <= room * share:
                used += program.sizes[s]
            else:
                tiers[s] = "flash"
    return [
        Gap(g.storage, g.first, g.last, tiers.get(g.storage, "dram"))
        for c in chosen
        for g in c.gaps
    ]
