"""A step as bytes that flow over both channels: the linear program of the seconds that computing waits.

A relaxation of emission. Parts of storages may leave. Any bytes that were stored count as gone once enough was to
leave, and any may come back as long as enough is there whenever something is due. What remains is what decides a tight
budget: bytes at every position, what both channels carry up to there, and the waits. Positions are sampled, each for
its neighbours: the one with the most bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.memory._linear import LinearProgram
from hyper_parallel.memory._memory_machine import MemoryMachine

# Of choices that are equally good one is the best, whatever solver looks for it: bytes that are away for a short part
# of the step, and then every part costs something else.
_LONG, _TIE, _GOLDEN = 1e-6, 1e-7, (5**0.5 - 1) / 2
_DIGITS = 6  # that solvers agree in
_TRAFFIC = 1e-3  # what a second of copying costs: of two choices that wait as long, the one that moves less


@dataclass(frozen=True)
class Flowed:
    """The optimum: the part of every variable that is chosen, and the seconds of the step."""

    parts: np.ndarray
    seconds: float


class Flow:
    """Variables are parts, from 0 to 1, of something that leaves, comes back or is made again.

    Args:
        profile: Device bytes during every position when nothing leaves.
        seconds: Compute seconds of every position.
        machine: Its channels to DRAM and back.
        samples: Positions that stand for all.
    """

    def __init__(
        self, profile: np.ndarray, seconds: Sequence[float], machine: MemoryMachine, samples: int
    ) -> None:
        self.lp = LinearProgram()
        stretches = np.array_split(np.arange(len(profile)), min(samples, len(profile)))
        self._at = np.array([part[np.argmax(profile[part])] for part in stretches])
        self._profile = profile[self._at]
        ends = np.concatenate(([0.0], np.cumsum(seconds)))
        self._between = np.diff([0.0, *ends[self._at], ends[-1]])
        self.step_s = max(float(ends[-1]), 1e-30)
        self._machine = machine
        self._unit = max(float(profile.max()), 1.0)  # numbers near 1 for the solver
        count = len(self._at) + 1
        # By sample, what each account has more from there on: bytes that are gone between two uses, that are to leave
        # by copy, that may be copied, that must be back; and seconds that the sample takes longer.
        self._gone, self._leave, self._final, self._due, self._longer = (
            [dict[int, float]() for _ in range(count)] for _ in range(5)
        )

        self._waits: list[int] = []
        self._needs: list[int] = []  # rows about the bytes of a sample
        self._parts = self._variables = 0

    def part(self) -> int:
        """A new variable."""
        self._parts += 1
        return self.lp.variable(1.0, _TIE * (1 + self._parts * _GOLDEN % 1))

    def within(self, parts: Sequence[int], whole: int) -> None:
        """All parts together are not more than another one."""
        self.lp.at_least({whole: 1.0, **dict.fromkeys(parts, -1.0)}, 0.0)

    def either(self, parts: Sequence[int]) -> None:
        """All parts together are at most 1."""
        self.lp.at_least(dict.fromkeys(parts, -1.0), -1.0)

    def gone(self, part: int, low: int, high: int, num_bytes: int) -> None:
        """The bytes are not needed on the device at positions [low, high)."""
        a, b = self._sample(low), self._sample(high)
        share = (high - low) / (self._at[-1] + 1)
        self.lp.costs[part] += _LONG * share * num_bytes / self._unit
        if a < b:
            self._add(self._gone[a], part, num_bytes / self._unit)
            self._add(self._gone[b], part, -num_bytes / self._unit)

    def stored(self, part: int, final: int, leaves: int, num_bytes: int) -> None:
        """The bytes may be copied from one position on, and are gone from a later one on if they were."""
        self._add(self._final[self._sample(final)], part, num_bytes / self._unit)
        self._add(self._leave[self._sample(leaves)], part, num_bytes / self._unit)
        self.lp.costs[part] += self._traffic(self._machine.store.seconds(num_bytes))

    def back(self, part: int, position: int, num_bytes: int) -> None:
        """The bytes are copied back before a position."""
        self._add(self._due[self._sample(position)], part, num_bytes / self._unit)
        self.lp.costs[part] += self._traffic(self._machine.prefetch.seconds(num_bytes))

    def longer(self, part: int, position: int, seconds: float) -> None:
        """A position takes so many seconds longer."""
        self._add(self._longer[self._sample(position)], part, seconds / self.step_s)

    def solve(self, target_bytes: int) -> Flowed | None:
        """The choice of least waits under so many device bytes; None when there is none. No part comes after it."""
        if not self._waits:
            self._variables = len(self.lp.costs)
            self._join()
        for at, held in zip(self._needs, self._profile.tolist(), strict=True):
            need = (held - target_bytes) / self._unit
            self.lp.rows[at] = self.lp.rows[at][0], need if need > 0 else -np.inf, np.inf
        result = self.lp.solve()
        if result is None:
            return None
        result = result.round(_DIGITS)
        waited = float(result[self._waits].sum())
        return Flowed(result[: self._variables], (1.0 + waited) * self.step_s)

    def _join(self) -> None:
        """What the parts add up to at every sample, and what both channels have carried by then."""
        lp, count = self.lp, len(self._at)
        channels = (self._machine.store, self._machine.prefetch)
        unit_s = [self._unit / channel.bytes_s / self.step_s for channel in channels]
        before: tuple[int, ...] = ()
        for j in range(count + 1):
            self._waits.append(lp.variable(cost=1.0))
            gone = self._total(self._gone[j], before[:1], lower=-np.inf)
            leave = self._total(self._leave[j], before[1:2])
            final = self._total(self._final[j], before[2:3])
            due = self._total(self._due[j], before[3:4])
            copied = out, back = lp.variable(), lp.variable()
            for lane, seconds in enumerate(unit_s):
                grows = {copied[lane]: 1.0, **dict.fromkeys(before[4 + lane : 5 + lane], -1.0)}
                lp.at_least(grows, 0.0)
                carried = {v: -seconds * x for v, x in grows.items()}
                lp.at_least({**carried, self._waits[j]: 1.0}, -self._between[j] / self.step_s)
            if self._longer[j]:
                longer = {part: -x for part, x in self._longer[j].items()}
                lp.at_least({**longer, self._waits[j]: 1.0}, 0.0)
            (lp.at_least if j < count else lp.equal)({final: 1.0, out: -1.0}, 0.0)
            lp.at_least({back: 1.0, due: -1.0}, 0.0)
            # Still there: what was to leave and is not copied yet, and what has come back before it is due.
            leaving = lp.variable()
            lp.at_least({leaving: 1.0, out: 1.0, leave: -1.0}, 0.0)
            if j < count:
                self._needs.append(len(lp.rows))
                lp.at_least({gone: 1.0, leaving: -1.0, back: -1.0, due: 1.0}, -np.inf)
            before = (gone, leave, final, due, out, back)

    def _sample(self, position: int) -> int:
        """The first sample at or after a position."""
        return int(np.searchsorted(self._at, position))

    def _add(self, changes: dict[int, float], part: int, value: float) -> None:
        changes[part] = changes.get(part, 0.0) + value

    def _traffic(self, seconds: float) -> float:
        return _TRAFFIC * seconds / self.step_s

    def _total(self, changes: dict[int, float], before: tuple[int, ...], lower: float = 0.0) -> int:
        """An account: what it was at the sample before, and what came to it."""
        total = self.lp.variable(lower=lower)
        row = {part: -value for part, value in changes.items()}
        self.lp.equal({**row, total: 1.0, **dict.fromkeys(before, -1.0)}, 0.0)
        return total
