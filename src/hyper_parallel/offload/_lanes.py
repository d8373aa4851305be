"""What a copy channel still has free: capacity in slices of the step, given out to copies as they are chosen.

A serial channel that is never idle while work waits moves the same bytes by any time, whatever the order of the copies.
So it is enough to count: a store takes the first free seconds after its release, a reload the last free seconds before
its deadline. A selection that respects this does not count on bytes that the channel cannot have moved yet.
"""

from __future__ import annotations

import numpy as np


class Lane:
    """Free seconds of one channel, in equal slices of the step.

    Args:
        end_s: End of the step without stalls.
        stretch: The step may become this much longer; the channel gains in every slice.
        slices: Resolution.
    """

    def __init__(self, end_s: float, stretch: float, slices: int = 1024) -> None:
        self.width_s = max(end_s, 1e-12) / slices
        self.stretch = stretch
        self.free_s = np.full(slices, self.width_s * stretch)

    def first(self, after_s: float, seconds: float) -> float | None:
        """When a copy released at `after_s` is done; None when it does not fit before the end."""
        at = self._slices(after_s, up=True)
        done = np.cumsum(self.free_s[at:])
        if not len(done) or done[-1] < seconds:
            return None
        return (at + int(np.searchsorted(done, seconds)) + 1) * self.width_s

    def take_first(self, after_s: float, seconds: float) -> None:
        """Give these seconds to a copy that `first` found to fit."""
        self._take(np.arange(self._slices(after_s, up=True), len(self.free_s)), seconds)

    def last(self, before_s: float, seconds: float) -> float | None:
        """When a copy due at `before_s` must begin; None when it cannot be there in time."""
        at = self._slices(before_s, up=False)
        done = np.cumsum(self.free_s[:at][::-1])
        if not len(done) or done[-1] < seconds:
            return None
        return (at - int(np.searchsorted(done, seconds)) - 1) * self.width_s

    def take_last(self, before_s: float, seconds: float) -> None:
        """Give these seconds to a copy that `last` found to fit."""
        self._take(np.arange(self._slices(before_s, up=False))[::-1], seconds)

    def _slices(self, time_s: float, *, up: bool) -> int:
        share = time_s / self.width_s
        whole = int(np.ceil(share - 1e-9) if up else np.floor(share + 1e-9))
        return min(max(whole, 0), len(self.free_s))

    def _take(self, slices: np.ndarray, seconds: float) -> None:
        before = np.concatenate(([0.0], np.cumsum(self.free_s[slices])[:-1]))
        self.free_s[slices] -= np.clip(seconds - before, 0.0, self.free_s[slices])
