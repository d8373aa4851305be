"""The candidates that one ranking rule takes in turn, bytes at the highest position first.

What is taken does not depend on the target, only where the taking stops. So one sequence serves every target of a
bisection: a lower one extends it, a higher one is a beginning of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.memory._channel_capacity import ChannelCapacity

if TYPE_CHECKING:
    from hyper_parallel.memory._select import Candidate, Rank, Selector

_RING_LEAD = 3.0  # a ring fetches nothing earlier than this many durations before its use


class Greedy:
    """The sequence of one rule.

    Args:
        selector: Candidates and profile.
        rank: Which candidate is taken first among those that free bytes at the highest position.
    """

    def __init__(self, selector: Selector, rank: Rank) -> None:
        self.base = selector.profile
        self.profile = selector.profile.copy()
        # What would surely prolong the step comes last, whatever its rank.
        ring = selector.ring_bytes()
        self.items = sorted(
            selector.considered(rank),
            key=lambda c: (-c.exposed_s, c.value(rank, ring)),
            reverse=True,
        )
        most = max((len(c.spans) for c in self.items), default=0)
        spans = [(*c.spans, *((0, 0),) * (most - len(c.spans))) for c in self.items]
        bounds = np.array(spans, np.int32).reshape(len(spans), most, 2)
        self.low = np.ascontiguousarray(bounds[:, :, 0].T)
        self.high = np.ascontiguousarray(bounds[:, :, 1].T)
        self.free = np.ones(len(self.items), bool)
        self.later = np.zeros(len(self.items), bool)  # what a ring leaves until nothing is closer
        self.channels = None if selector.stretch is None else _Channels(selector, selector.stretch)
        self.close = rank == "ring" and self.channels is not None
        self.chosen: list[Candidate] = []
        self.peaks = [int(self.profile.max(initial=0))]  # before each candidate, and after all
        self.stuck = False

    def until(self, target_bytes: int) -> tuple[list[Candidate], np.ndarray]:
        """The shortest beginning of the sequence that brings the profile under a target, and that profile.

        All of it when the target cannot be reached.
        """
        while not self.stuck and self.peaks[-1] > target_bytes:
            self._extend()
        count = bisect_left(self.peaks, -target_bytes, key=lambda peak: -peak)
        chosen = self.chosen[:count]
        change = np.zeros(len(self.base) + 1, np.int64)
        for c in chosen:
            for begin, end in c.spans:
                change[begin] -= c.num_bytes
                change[end] += c.num_bytes
        return chosen, self.base + np.cumsum(change[:-1])

    def _extend(self) -> None:
        """Take one more candidate, or find that the highest position cannot be lowered."""
        at = int(np.argmax(self.profile)) if len(self.profile) else 0
        while True:
            covers = np.zeros(len(self.items), bool)
            for low, high in zip(self.low, self.high, strict=True):
                covers |= (low <= at) & (at < high)
            covers &= self.free
            for pick in np.flatnonzero(covers).tolist():
                self.free[pick] = False
                taken: Candidate | None = self.items[pick]
                if self.channels is not None:
                    taken = self.channels.take(
                        self.items[pick], at, _RING_LEAD if self.close else None
                    )
                if taken is None:
                    self.later[pick] = self.close
                    continue
                self.chosen.append(taken)
                for begin, end in taken.spans:
                    self.profile[begin:end] -= taken.num_bytes
                self.peaks.append(int(self.profile.max()))
                return
            if not self.close:
                self.stuck = True
                return
            self.close, self.free = False, self.free | self.later
            self.later = np.zeros(len(self.items), bool)


class _Channels:
    """Both channels during one selection, and which gaps are taken already."""

    def __init__(self, selector: Selector, stretch: float) -> None:
        self.ends_s: list[float] = selector.ends_s.tolist()
        self.starts_s: list[float] = selector.starts_s.tolist()
        end_s = self.ends_s[-1]
        self.selector = selector
        self.store = ChannelCapacity(end_s, stretch)
        self.prefetch = ChannelCapacity(end_s, stretch)
        self.taken: dict[int, set[int]] = {}  # storage -> starts of its chosen gaps
        host = selector.recomputes.host
        for gap in host.gaps:
            num_bytes = selector.program.storages[gap.storage].num_bytes
            if gap.storage not in host.at_home:
                released = self.ends_s[selector.since(gap)]
                self.store.take_first(released, selector.machine.store.seconds(num_bytes))
            elif gap.last < selector.n:
                due = self.starts_s[gap.last]
                self.prefetch.take_last(due, selector.machine.prefetch.seconds(num_bytes))
            self.taken.setdefault(gap.storage, set()).add(gap.first)

    def take(self, candidate: Candidate, at: int, close: float | None = None) -> Candidate | None:
        """The candidate with the spans that the channels can still give; None when `at` would not be freed.

        Args:
            candidate: One of the selector's.
            at: Position whose bytes are wanted.
            close: Refuse reloads that begin earlier than so many of their durations before their use.
        """
        selector, s = self.selector, candidate.gaps[0].storage
        taken = self.taken.get(s, set())
        if any(g.first in taken for g in candidate.gaps):
            return None
        home = -1 in taken or any(g.first < 0 for g in candidate.gaps)
        num_bytes = selector.program.storages[s].num_bytes
        out_s = selector.machine.store.seconds(num_bytes)
        back_s = selector.machine.prefetch.seconds(num_bytes)
        spans: list[tuple[int, int]] = []
        stores: list[float] = []
        reloads: list[float] = []
        for gap in candidate.gaps:
            low, high = gap.first + 1, gap.last
            if gap.first >= 0 and not (home and selector.clean(gap)):
                released = self.ends_s[selector.since(gap)]
                done = self.store.first(released, out_s)
                if done is None:
                    return None
                low = max(low, bisect_left(self.starts_s, done))
                stores.append(released)
            if gap.last < selector.n:
                due = self.starts_s[gap.last]
                begin = self.prefetch.last(due, back_s)
                if begin is None or (close is not None and begin < due - close * back_s):
                    return None
                high = max(bisect_right(self.starts_s, begin) - 1, 0)
                reloads.append(due)
            spans.append((low, max(low, high)))
        if not any(low <= at < high for low, high in spans):
            return None
        for released in stores:
            self.store.take_first(released, out_s)
        for due in reloads:
            self.prefetch.take_last(due, back_s)
        self.taken[s] = taken | {g.first for g in candidate.gaps}
        return replace(candidate, spans=tuple(spans))
