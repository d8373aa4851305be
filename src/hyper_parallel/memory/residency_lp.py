"""A step as bytes that flow over both channels: the linear program of the seconds that computing waits.

A relaxation of emission. Parts of storages may leave. Any bytes that were stored count as gone once enough was to
leave, and any may come back as long as enough is there whenever something is due. What remains is what decides a tight
budget: bytes at every position, what both channels carry up to there, and the waits. Positions are sampled, each for
its neighbours: the one with the most bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.memory.linear_program import LinearProgram
from hyper_parallel.memory.memory_machine import Channel, MemoryMachine

# Of choices that are equally good one is the best, whatever solver looks for it: parts differ in what they cost. A
# little by their numbers squared, for choices whose numbers have the same sum would cost the same again.
_TIE, _GOLDEN = 1e-7, (5**0.5 - 1) / 2
_LATER = 1e-4  # a wait at the end of the step costs more than one at its beginning
_EXACT = 2e-3  # of what is to be saved: less over the target is no position that is missing
_DIGITS = 6  # that solvers agree in
_TRAFFIC = 1e-3  # what a second of copying costs: of two choices that wait as long, the one that moves less


@dataclass(frozen=True)
class Flowed:
    """The optimum.

    Attributes:
        parts: Of every variable, what is chosen.
        seconds: Of the step.
        waits: By sample, seconds that computing waits or computes again.
    """

    parts: np.ndarray
    seconds: float
    waits: np.ndarray


class Flow:
    """Variables are parts, from 0 to 1, of something that leaves, comes back or is made again.

    Args:
        profile: Device bytes during every position when nothing leaves.
        seconds: Compute seconds of every position.
        machine: Its channels to DRAM and back.
        positions: Those that stand for all, in order.
    """

    def __init__(
        self,
        profile: np.ndarray,
        seconds: Sequence[float],
        machine: MemoryMachine,
        positions: np.ndarray,
    ) -> None:
        self.lp = LinearProgram()
        self._ends = np.cumsum(seconds)
        self._starts = np.concatenate(([0.0], self._ends))
        self.positions = positions
        # The first sample at or after each position.
        self._sample: list[int] = np.searchsorted(positions, np.arange(len(profile) + 1)).tolist()
        self._everywhere = profile
        self._spans: list[tuple[int, int, int, int]] = []  # what is gone: part, positions, bytes
        self._profile = profile[self.positions]
        self._between = np.diff([0.0, *self._starts[self.positions], self._starts[-1]])
        self.step_s = float(self._starts[-1])
        self._store, self._prefetch = machine.store, machine.prefetch
        self._dram_bytes = machine.dram_bytes
        self._flash = (machine.copy_out, machine.copy_in)
        self._unit = max(float(profile.max()), 1.0)  # numbers near 1 for the solver
        # A step whose operators have no seconds is measured in copies.
        self._unit_s = self.step_s or self._unit / machine.store.bytes_s
        count = len(self.positions) + 1
        # By sample, what each account has more from there on: bytes that are gone between two uses, that are to leave
        # by copy, that may be copied, that must be back; and seconds that the sample takes longer.
        self._gone, self._leave, self._final, self._due, self._longer, self._dram = (
            [dict[int, float]() for _ in range(count)] for _ in range(6)
        )
        # The same: bytes that are coming back as they would if no copy came early, and those whose copy has begun then.
        self._coming, self._begun = ([dict[int, float]() for _ in range(count)] for _ in range(2))
        self._longest_s = 0.0  # of these copies
        # What goes on to flash: by direction, seconds of each part; and by size, whether any does.
        self._onward: tuple[dict[int, float], dict[int, float]] = {}, {}
        self._buffers: dict[int, int] = {}
        self._stalls: list[tuple[int, range, float]] = []
        self._waits: list[int] = []
        self._needs: list[int] = []  # rows about the bytes of a sample
        self._stores: list[int] = []  # rows about what is stored in a stretch
        self._parts = self._count = 0

    def part(self) -> int:
        """A new variable."""
        self._count += 1
        unlike = self._count * _GOLDEN % 1 + self._count**2 * _GOLDEN % 1 / 100
        return self.lp.variable(1.0, _TIE * (1 + unlike))

    def within(self, parts: Sequence[int], whole: int) -> None:
        """All parts together are not more than another one."""
        self.lp.at_least({whole: 1.0, **dict.fromkeys(parts, -1.0)}, 0.0)

    def either(self, parts: Sequence[int]) -> None:
        """All parts together are at most 1."""
        self.lp.at_least(dict.fromkeys(parts, -1.0), -1.0)

    def in_dram(self, part: int, low: int, high: int, num_bytes: int) -> None:
        """The bytes are in DRAM at positions [low, high), or on to flash and back, through a buffer of their size."""
        if self._dram_bytes is None:
            return
        there = {part: 1.0}
        out, back = self._flash
        if out is not None and back is not None:
            there[onward := self.part()] = -1.0
            self.within([onward], part)
            for lane, channel in zip(self._onward, (out, back), strict=True):
                lane[onward] = channel.seconds(num_bytes) / self._unit_s
            if num_bytes not in self._buffers:
                self._buffers[num_bytes] = self.part()
            self.within([onward], self._buffers[num_bytes])
        for one, sign in there.items():
            self._add(self._dram[self._sample[low]], one, sign * num_bytes / self._unit)
            self._add(self._dram[self._sample[high]], one, -sign * num_bytes / self._unit)

    def together(self, a: int, b: int) -> bool:
        """Two positions have the same sample."""
        return self._sample[a] == self._sample[b]

    def gone(self, part: int, low: int, high: int, num_bytes: int) -> None:
        """The bytes are not needed on the device at positions [low, high)."""
        self._spans.append((part, low, high, num_bytes))
        self._during(self._gone, part, low, high, num_bytes)

    def away(self, part: int, low: int, high: int, num_bytes: int) -> None:
        """Bytes are not needed at positions [low, high), and back then; their copy takes all its room as it begins."""
        idle_s = self._starts[high] - self._starts[low]
        copy_s = min(self._prefetch.seconds(num_bytes), idle_s / 2)
        self._longest_s = max(self._longest_s, copy_s)
        at = int(np.searchsorted(self._starts, self._starts[high] - copy_s, "right")) - 1
        begins = min(max(at, low), high)
        self._spans.append((part, low, high, num_bytes))
        self._during(self._gone, part, low, begins, num_bytes)
        self._during(self._coming, part, begins, high, num_bytes)
        self.back(part, high, num_bytes, begins)

    def stored(self, part: int, final: int, leaves: int, num_bytes: int) -> None:
        """The bytes may be copied from one position on, and are gone from a later one on if they were."""
        self._add(self._final[self._sample[final]], part, self._copied(self._store, num_bytes))
        self._add(self._leave[self._sample[leaves]], part, self._copied(self._store, num_bytes))
        self.lp.costs[part] += self._traffic(self._store.seconds(num_bytes))

    def back(self, part: int, position: int, num_bytes: int, begins: int) -> None:
        """The bytes are copied back before a position; from another one on they count as there."""
        copied = self._copied(self._prefetch, num_bytes)
        self._add(self._due[self._sample[position]], part, copied)
        self._add(self._begun[self._sample[begins]], part, copied)
        self.lp.costs[part] += self._traffic(self._prefetch.seconds(num_bytes))

    def within_gap(self, part: int, low: int, high: int, num_bytes: int, stored: bool) -> None:
        """The bytes are copied while positions [low, high) run; for what that takes longer computing waits."""
        copies_s = self._prefetch.seconds(num_bytes)
        if stored:
            copies_s += self._store.seconds(num_bytes)
        stall_s = copies_s - (self._ends[high - 1] - self._ends[low - 1])
        if stall_s > 0:
            where = range(self._sample[low], self._sample[high] + 1)
            self._stalls.append((part, where, stall_s / self._unit_s))

    def longer(self, part: int, position: int, seconds: float) -> None:
        """A position takes so many seconds longer."""
        self._add(self._longer[self._sample[position]], part, seconds / self._unit_s)

    def solve(self, target_bytes: int, reserve: Mapping[int, float]) -> Flowed | None:
        """The choice of least waits under so many device bytes; None when there is none. No part comes after it.

        Args:
            target_bytes: Device bytes.
            reserve: By position, bytes that are left free; at the end, that are not copied any more.
        """
        if not self._waits:
            self._parts = len(self.lp.costs)
            self._join()
        samples = zip(self._needs, self.positions.tolist(), self._profile.tolist(), strict=True)
        for at, position, held in samples:
            need = (held + reserve.get(position, 0.0) - target_bytes) / self._unit
            self.lp.change_bound(at, need if need > 0 else -np.inf)
        late_s = reserve.get(len(self._everywhere), 0.0) / self._store.bytes_s
        for row, between_s in zip(self._stores[::-1], self._between[::-1].tolist(), strict=True):
            self.lp.change_bound(row, min(late_s - between_s, 0.0) / self._unit_s)
            late_s = max(late_s - between_s, 0.0)
        result = self.lp.solve()
        if result is None:
            return None
        result = result.round(_DIGITS)
        waits = result[self._waits] * self._unit_s
        return Flowed(result[: self._parts], self.step_s + float(waits.sum()), waits)

    def over(self, flowed: Flowed, target_bytes: int) -> np.ndarray:
        """Of every stretch between samples in which the optimum takes more than the target, the fullest position."""
        change = np.zeros(len(self._everywhere) + 1)
        parts, lows, highs, sizes = np.array(self._spans, dtype=np.int64).reshape(-1, 4).T
        gone = flowed.parts[parts] * sizes
        np.add.at(change, lows, -gone)
        np.add.at(change, highs, gone)
        held = self._everywhere + np.cumsum(change[:-1])
        most = target_bytes + _EXACT * max(float(self._everywhere.max()) - target_bytes, 0.0)
        stretches = np.split(held, self.positions)
        starts = np.concatenate(([0], self.positions))
        return np.array(
            [
                start + int(np.argmax(part))
                for start, part in zip(starts.tolist(), stretches, strict=True)
                if len(part) and part.max() > most
            ],
            dtype=np.int64,
        )

    def by_sample(self, seconds: np.ndarray) -> np.ndarray:
        """Sums of what positions have, up to each sample from the one before."""
        sums = np.concatenate(([0.0], np.cumsum(seconds)))
        return np.diff(sums[np.concatenate(([0], self.positions + 1, [len(seconds)]))])

    def most_by_sample(self, num_bytes: np.ndarray) -> np.ndarray:
        """The largest of what positions have, up to each sample from the one before."""
        return np.maximum.reduceat(num_bytes, np.concatenate(([0], self.positions[:-1] + 1)))

    def _join(self) -> None:
        """What the parts add up to at every sample, and what both channels have carried by then."""
        lp, count = self.lp, len(self.positions)
        channels = (self._store, self._prefetch)
        unit_s = [self._unit / channel.bytes_s / self._unit_s for channel in channels]
        before: tuple[int, ...] = ()
        taken: tuple[int, ...] = ()
        waited, later = list[int](), list[int]()
        for j in range(count + 1):
            self._waits.append(lp.variable(cost=1.0 + j * _LATER / count))
            gone = self._total(self._gone[j], before[:1], lower=-np.inf)
            leave = self._total(self._leave[j], before[1:2])
            final = self._total(self._final[j], before[2:3])
            due = self._total(self._due[j], before[3:4])
            begun = self._total(self._begun[j], before[4:5])
            coming = self._total(self._coming[j], before[5:6])
            waited.append(self._total({self._waits[j]: 1.0}, tuple(waited[-1:])))
            copied = out, back = lp.variable(), lp.variable()
            for lane, seconds in enumerate(unit_s):
                grows = {copied[lane]: 1.0, **dict.fromkeys(before[6 + lane : 7 + lane], -1.0)}
                lp.at_least(grows, 0.0)
                carried = {v: -seconds * x for v, x in grows.items()}
                row = lp.at_least(
                    {**carried, self._waits[j]: 1.0}, -self._between[j] / self._unit_s
                )
                if lane == 0:
                    self._stores.append(row)
            if self._longer[j]:
                longer = {part: -x for part, x in self._longer[j].items()}
                lp.at_least({**longer, self._waits[j]: 1.0}, 0.0)
            (lp.at_least if j < count else lp.equal)({final: 1.0, out: -1.0}, 0.0)
            lp.at_least({back: 1.0, due: -1.0}, 0.0)
            if self._dram_bytes is not None:
                taken = (self._total(self._dram[j], taken, lower=-np.inf),)
                buffers = {y: -size / self._unit for size, y in self._buffers.items()}
                lp.at_least({taken[0]: -1.0, **buffers}, -self._dram_bytes / self._unit)
            # Still there: what was to leave and is not copied yet, and what has come back before it is due.
            leaving, early = lp.variable(), lp.variable()
            lp.at_least({leaving: 1.0, out: 1.0, leave: -1.0}, 0.0)
            lp.at_least({early: 1.0, back: -1.0, begun: 1.0}, 0.0)
            if j < count:
                later.append(lp.variable())
                lp.at_least({coming: 1.0, later[j]: -1.0}, 0.0)
                held = {gone: 1.0, leaving: -1.0, early: -1.0, later[j]: 1.0}
                self._needs.append(lp.at_least(held, -np.inf))
            before = (gone, leave, final, due, begun, coming, out, back)
        # What comes back while computing waits has not begun to before.
        times = np.cumsum(self._between)
        lasts = np.searchsorted(times, times + self._longest_s).clip(max=count).tolist()
        for j, one in enumerate(later):
            waits = {waited[lasts[j]]: 1.0, waited[j]: -1.0} if lasts[j] > j else {}
            lp.at_least({one: -unit_s[1], **waits}, 0.0)
        for part, where, stall in self._stalls:
            lp.at_least({**{self._waits[j]: 1.0 for j in where}, part: -stall}, 0.0)
        for onward in self._onward:  # over the whole step, for it goes in any order
            if onward:
                busy = {part: -seconds for part, seconds in onward.items()}
                lp.at_least({**dict.fromkeys(self._waits, 1.0), **busy}, -1.0)

    def _during(
        self, changes: list[dict[int, float]], part: int, low: int, high: int, num_bytes: int
    ) -> None:
        a, b = self._sample[low], self._sample[high]
        if a < b:
            self._add(changes[a], part, num_bytes / self._unit)
            self._add(changes[b], part, -num_bytes / self._unit)

    def _add(self, changes: dict[int, float], part: int, value: float) -> None:
        changes[part] = changes.get(part, 0.0) + value

    def _copied(self, channel: Channel, num_bytes: int) -> float:
        """What a copy takes of a channel: its bytes, and those that could be copied meanwhile."""
        return (num_bytes + channel.latency_bytes) / self._unit

    def _traffic(self, seconds: float) -> float:
        return _TRAFFIC * seconds / self._unit_s

    def _total(self, changes: dict[int, float], before: tuple[int, ...], lower: float = 0.0) -> int:
        """An account: what it was at the sample before, and what came to it."""
        total = self.lp.variable(lower=lower)
        row = {part: -value for part, value in changes.items()}
        self.lp.equal({**row, total: 1.0, **dict.fromkeys(before, -1.0)}, 0.0)
        return total
