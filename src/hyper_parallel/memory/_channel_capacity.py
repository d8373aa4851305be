"""What a copy channel still has free: capacity in slices of the step, given out to copies as they are chosen.

A serial channel that is never idle while work waits moves the same bytes by any time, whatever the order of the copies.
So it is enough to count: a store takes the first free seconds after its release, a reload the last free seconds before
its deadline. A selection that respects this does not count on bytes that the channel cannot have moved yet.
"""

from __future__ import annotations

import math


class ChannelCapacity:
    """Free seconds of one channel, in equal slices of the step.

    Slices without free seconds are skipped by pointers to the next free one on either side, so a copy costs about as
    many steps as it has slices.

    Args:
        end_s: End of the step without stalls.
        stretch: The step may become this much longer; the channel gains in every slice.
        slices: Resolution.
    """

    def __init__(self, end_s: float, stretch: float, slices: int = 1024) -> None:
        self.width_s = max(end_s, 1e-12) / slices
        self.slices = slices
        self.free_s = [self.width_s * stretch] * slices
        self._up = list(range(slices + 1))  # the next slice at or after that has free seconds
        self._down = list(range(slices + 1))  # one more than the last such slice before

    def first(self, after_s: float, seconds: float) -> float | None:
        """When a copy released at `after_s` is done; None when it does not fit before the end."""
        at = self._next(self._slice(after_s, up=True))
        while at < self.slices:
            seconds -= self.free_s[at]
            if seconds <= 0:
                return (at + 1) * self.width_s
            at = self._next(at + 1)
        return None

    def take_first(self, after_s: float, seconds: float) -> None:
        """Give these seconds to a copy that `first` found to fit."""
        at = self._next(self._slice(after_s, up=True))
        while seconds > 0 and at < self.slices:
            seconds = self._use(at, seconds)
            at = self._next(at + 1)

    def last(self, before_s: float, seconds: float) -> float | None:
        """When a copy due at `before_s` must begin; None when it cannot be there in time."""
        at = self._before(self._slice(before_s, up=False))
        while at > 0:
            seconds -= self.free_s[at - 1]
            if seconds <= 0:
                return (at - 1) * self.width_s
            at = self._before(at - 1)
        return None

    def take_last(self, before_s: float, seconds: float) -> None:
        """Give these seconds to a copy that `last` found to fit."""
        at = self._before(self._slice(before_s, up=False))
        while seconds > 0 and at > 0:
            seconds = self._use(at - 1, seconds)
            at = self._before(at - 1)

    def _slice(self, time_s: float, *, up: bool) -> int:
        share = time_s / self.width_s
        whole = math.ceil(share - 1e-9) if up else math.floor(share + 1e-9)
        return min(max(whole, 0), self.slices)

    def _use(self, at: int, seconds: float) -> float:
        """Take what a slice has; the seconds that are still wanted."""
        free = self.free_s[at]
        if seconds < free:
            self.free_s[at] = free - seconds
            return 0.0
        self.free_s[at] = 0.0
        self._up[at] = at + 1
        self._down[at + 1] = at
        return seconds - free

    def _next(self, at: int) -> int:
        """First slice at or after `at` with free seconds; the number of slices when there is none."""
        return _root(self._up, at)

    def _before(self, at: int) -> int:
        """One more than the last slice before `at` with free seconds; 0 when there is none."""
        return _root(self._down, at)


def _root(links: list[int], at: int) -> int:
    """Where following the links ends; every link on the way is shortened."""
    end = at
    while links[end] != end:
        end = links[end]
    while links[at] != end:
        links[at], at = end, links[at]
    return end
