"""Fits of stays into one arena: orders in which first fit is tried, until an arena is small enough.

First fit comes within a few percent of the live peak where its order suits the step. Largest first suits most; from the
peak outwards suits deep plans of large models; weights between size and area suit steps of many small results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from hyper_parallel.ir import Extent

GOOD: Final = 1.02  # of the live peak: above this another order is tried
SEARCHED: Final = 1500  # items: above, one placement of an exact search takes too long
_TIGHT: Final = 1.002  # an arena this close to the live peak is not worth another fit
_CLOSER: Final = 6  # times closer to the live peak than one fit: further fits have reached no more
_FORWARD: Final = 0.65  # of its rank is left to a stay that ended too high
_BEGUN: Final = 3  # rounds of the squeaky wheel before fits by weights: it mostly finds at once
_POWERS: Final = (0.2, 0.3, 0.5, 0.7)  # of a stay's time, in its weight
_BEHIND: Final = 2.0  # times as far from the live peak as fits by weights: the wheel is given up
_CROWDED: Final = 0.9  # stays that see this share of the live peak are placed before the others

Item = tuple[Extent, ...]
"""Stays that share an address: one, or the last and the first of a storage that goes around."""
Fit = tuple[np.ndarray, int]
"""An offset for every item, and the end of the highest one."""
Key = Callable[[int], Any]
"""Sorts items by their index."""


class Fitting:
    """Fits of the same items; the smallest is kept.

    Args:
        items: What is placed.
        sizes: Bytes in the arena by storage index.
        bottom: Bytes below, which stay there all the time.
        enough: An arena of this size, the bottom included, need not become smaller, and what is far from it is given
            up; 0: the smallest is wanted.

    Attributes:
        best: The fit with the smallest arena.
        good: An arena above the bottom that is no larger needs no other order.
    """

    def __init__(
        self, items: Sequence[Item], sizes: Sequence[int], bottom: int, enough: int
    ) -> None:
        self._items, self._sizes = items, sizes
        self._live = _live(items, sizes)
        self._floor = int(self._live.max())
        self._wanted = enough - bottom if enough else None
        live = bottom + self._floor
        self.good = live * GOOD - bottom
        self._tight = max(live * _TIGHT - bottom, min(enough - bottom, self.good))
        # What goes around is as long as both of its stays, from the later one on.
        self._stays = [
            Extent(e[0].storage, e[0].start, e[0].stop + sum(x.stop - x.start for x in e[1:]))
            for e in items
        ]
        self._size = [sizes[stay.storage] for stay in self._stays]
        self._time = [stay.stop - stay.start for stay in self._stays]
        largest = self._by(lambda i: (-self._size[i], -self._time[i]))
        self.best: Fit = _first_fit(items, sizes, largest)
        self._improve()

    def _improve(self) -> None:
        rounds = max(12, min(40, 30_000 // len(self._items)))
        wheel = self._wheel(_from_the_peak(self._stays, self._sizes, self._live), rounds)
        begun = self._try(islice(wheel, _BEGUN), self._tight)
        if self._done(self.good):
            self._try(wheel, self._tight)
            return
        sized = list(zip(self._size, self._time, strict=True))
        weighed: dict[int, Key] = {}
        for power in _POWERS:
            weight = [-size * time**power for size, time in sized]
            fit = self._fit(self._by(weight.__getitem__))
            weighed.setdefault(fit[1], weight.__getitem__)
        least = min(weighed)
        # The first round of this wheel is the fit by its weight.
        self._try(islice(self._wheel(weighed[least], rounds // 3), 1, None), self.good)
        if len(self._items) <= SEARCHED:
            longest = self._wheel(lambda i: (-self._time[i], -self._size[i]), rounds // 3)
            self._try(longest, self.good)
        if begun - self._floor <= _BEHIND * (least - self._floor):
            self._try(wheel, self.good)

    def _done(self, until: float) -> bool:
        """The best arena is small enough, or too far from what is wanted."""
        arena = self.best[1]
        nearest = self._floor + (arena - self._floor) / _CLOSER
        return arena <= until or (self._wanted is not None and self._wanted < nearest)

    def _by(self, key: Key) -> list[int]:
        return sorted(range(len(self._items)), key=key)

    def _fit(self, order: Sequence[int]) -> Fit:
        """First fit in an order."""
        fit = _first_fit(self._items, self._sizes, order)
        if fit[1] < self.best[1]:
            self.best = fit
        return fit

    def _try(self, fits: Iterator[Fit], until: float) -> int:
        """Make these fits until the best of all is done; their least arena."""
        least = self.best[1]
        if self._done(until):
            return least
        arenas = []
        for _, arena in fits:
            arenas.append(arena)
            if self._done(until):
                break
        return min(arenas, default=least)

    def _wheel(self, key: Key, rounds: int) -> Iterator[Fit]:
        """First fit, repeated with every item that ended above the live peak moved towards the front.

        It ends when so many rounds in turn gave nothing better.

        Source: squeaky wheel optimization, Joslin and Clements 1999.
        """
        size = np.array([self._sizes[item[0].storage] for item in self._items])
        order = self._by(key)
        least, idle = float("inf"), 0
        while idle < rounds:
            offsets, arena = fit = self._fit(order)
            yield fit
            idle = 0 if arena < least else idle + 1
            least = min(least, arena)
            over = offsets + size > self._floor
            rank = {i: at * _FORWARD if over[i] else float(at) for at, i in enumerate(order)}
            order = sorted(order, key=rank.__getitem__)


def _live(items: Sequence[Item], sizes: Sequence[int]) -> np.ndarray:
    """Bytes of all stays at every action."""
    stays = [stay for item in items for stay in item]
    change = np.zeros(max(stay.stop for stay in stays) + 1, np.int64)
    np.add.at(change, [stay.start for stay in stays], [sizes[stay.storage] for stay in stays])
    np.add.at(change, [stay.stop for stay in stays], [-sizes[stay.storage] for stay in stays])
    return np.cumsum(change)


def _from_the_peak(
    stays: Sequence[Extent], sizes: Sequence[int], live: np.ndarray
) -> Callable[[int], tuple[int, ...]]:
    """An order that begins where there is no room to lose: at the peak, the longest lowest, then away from it."""
    top, at = int(live.max()), int(live.argmax())

    def key(i: int) -> tuple[int, ...]:
        stay = stays[i]
        away = max(0, stay.start - at, at + 1 - stay.stop)
        sees = int(live[stay.start : max(stay.stop, stay.start + 1)].max())
        size = sizes[stay.storage] if away else stay.stop - stay.start
        return int(sees < _CROWDED * top), away, -size

    return key


def _first_fit(items: Sequence[Item], sizes: Sequence[int], order: Sequence[int]) -> Fit:
    """Every item, in an order, at the lowest address that is free during all of its stays."""
    n = sum(len(item) for item in items)
    # What is placed, in this order.
    starts, stops = np.empty(n, np.int32), np.empty(n, np.int32)
    lows, highs = np.empty(n, np.int64), np.empty(n, np.int64)
    offsets = np.zeros(len(items), np.int64)
    arena = count = 0
    for i in order:
        item = items[i]
        size = sizes[item[0].storage]
        if not size:
            continue
        begun, ended = starts[:count], stops[:count]
        clash = (begun < item[0].stop) & (ended > item[0].start)
        for stay in item[1:]:
            clash |= (begun < stay.stop) & (ended > stay.start)
        there = clash.nonzero()[0]
        low = lows[there]
        upwards = low.argsort()
        low = low[upwards]
        offset = 0
        if len(low) and low[0] < size:
            # Gaps between neighbours: from the highest end so far to the next start.
            tops = np.maximum.accumulate(highs[there[upwards]])
            fits = low[1:] - tops[:-1] >= size
            first = int(fits.argmax()) if len(fits) else 0
            offset = int(tops[first] if len(fits) and fits[first] else tops[-1])
        for stay in item:
            starts[count], stops[count] = stay.start, stay.stop
            lows[count], highs[count] = offset, offset + size
            count += 1
        offsets[i] = offset
        arena = max(arena, offset + size)
    return offsets, arena
