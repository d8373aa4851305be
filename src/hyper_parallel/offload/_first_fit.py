"""Fits of stays into one arena: first fit, and the repair of what ends too high.

First fit comes within a few percent of the live peak: largest first for most steps, from the peak outwards for deep
plans of large models. What still ends above a limit takes the place of others, which are then placed anew in that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hyper_parallel.ir import Extent
from hyper_parallel.offload._arena_repair import Repair

GOOD: Final = 1.02  # of the live peak: above this no effort is spared
SEARCHED: Final = 1500  # items: above, one placement of an exact search takes too long
_TIGHT: Final = 1.002  # an arena this close to the live peak is not worth another fit
_CLOSER: Final = 6  # times closer to the live peak than one fit: further fits have reached no more
_ROUNDS: Final = 12  # of first fit from the peak: it finds by then or not at all
_FORWARD: Final = 0.65  # of its rank is left to a stay that ended too high
_CROWDED: Final = 0.9  # stays that see this share of the live peak are placed before the others
_MOVES: Final = 40_000  # of all repairs while the arena is not good
_EACH: Final = 30_000  # of one of them: some succeed after 27,000
_AN_ITEM: Final = 100  # of all repairs for each item: few items are soon in every place

Item = tuple[Extent, ...]
"""Stays that share an address: one, or the last and the first of a storage that goes around."""
Fit = tuple[np.ndarray, int]
"""An offset for every item, and the end of the highest one."""


class Fitting:
    """Fits of the same items; the smallest is kept.

    Args:
        items: What is placed.
        sizes: Bytes in the arena by storage index.
        bottom: Bytes below, which stay there all the time.
        wanted_bytes: An arena of this size, the bottom included, need not become smaller, and what is far from it
            is given up; 0: the smallest is wanted.

    Attributes:
        best: The fit with the smallest arena.
        good: An arena above the bottom that is no larger needs no repair.
    """

    def __init__(
        self, items: Sequence[Item], sizes: Sequence[int], bottom: int, wanted_bytes: int
    ) -> None:
        self._size = np.array([sizes[item[0].storage] for item in items], np.int64)
        self._clashes = _clashes(items)
        self._live = _live(items, sizes)
        self._floor = int(self._live.max())
        self._wanted = wanted_bytes - bottom if wanted_bytes else None
        live = bottom + self._floor
        self.good = live * GOOD - bottom
        self._tight = max(live * _TIGHT - bottom, min(wanted_bytes - bottom, self.good))
        # What goes around is as long as both of its stays, from the later one on.
        stays = [
            Extent(e[0].storage, e[0].start, e[0].stop + sum(x.stop - x.start for x in e[1:]))
            for e in items
        ]
        self.best: Fit = np.zeros(len(items), np.int64), int(self._size.sum()) + 1
        self._time = np.array([stay.stop - stay.start for stay in stays], np.int64)
        self._fit(np.lexsort((-self._time, -self._size)).tolist())
        self._from_the_peak(sorted(range(len(stays)), key=_away(stays, sizes, self._live)))
        self._repair()

    def _done(self, until: float) -> bool:
        """The best arena is small enough, or too far from what is wanted."""
        arena = self.best[1]
        nearest = self._floor + (arena - self._floor) / _CLOSER
        return arena <= until or (self._wanted is not None and self._wanted < nearest)

    def _keep(self, offsets: np.ndarray) -> np.ndarray:
        """Keep this fit if it is the best; where its items end."""
        ends: np.ndarray = offsets + self._size
        if int(ends.max()) < self.best[1]:
            self.best = offsets, int(ends.max())
        return ends

    def _fit(self, order: Sequence[int]) -> np.ndarray:
        """First fit in an order; where its items end."""
        return self._keep(_first_fit(self._clashes, self._size, order))

    def _from_the_peak(self, order: Sequence[int]) -> None:
        """First fit from the peak outwards, repeated with all that ended too high moved towards the front.

        Source: squeaky wheel optimization, Joslin and Clements 1999.
        """
        for _ in range(_ROUNDS):
            if self._done(self._tight):
                return
            over = self._fit(order) > self._floor
            rank = {i: at * _FORWARD if over[i] else float(at) for at, i in enumerate(order)}
            order = sorted(order, key=rank.__getitem__)

    def _repair(self) -> None:
        """Halve what the arena has above the live peak as often as that works, then take a quarter of it."""
        aim = self.good if self._wanted is None else self._tight
        moves, parts = min(_MOVES, _AN_ITEM * len(self._size)), 2
        while moves > 0 and not self._done(aim):
            offsets, arena = self.best
            limit = max(int(aim), arena - (arena - self._floor) // parts)
            repair = Repair(self._clashes, self._size, self._time, offsets, limit)
            result = repair.offsets(min(moves, _EACH))
            moves -= repair.moves
            if result is not None:
                self._keep(result)
            elif parts == 2:
                parts = 4
            else:
                return


def _live(items: Sequence[Item], sizes: Sequence[int]) -> np.ndarray:
    """Bytes of all stays at every action."""
    stays = [stay for item in items for stay in item]
    change = np.zeros(max(stay.stop for stay in stays) + 1, np.int64)
    np.add.at(change, [stay.start for stay in stays], [sizes[stay.storage] for stay in stays])
    np.add.at(change, [stay.stop for stay in stays], [-sizes[stay.storage] for stay in stays])
    return np.cumsum(change)


def _away(
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


def _clashes(items: Sequence[Item]) -> list[np.ndarray]:
    """Of every item those that are there at one of its times, itself included."""
    stays = [stay for item in items for stay in item]
    owner = np.repeat(np.arange(len(items), dtype=np.int32), [len(item) for item in items])
    start = np.array([stay.start for stay in stays], np.int32)
    stop = np.array([stay.stop for stay in stays], np.int32)
    result = []
    for item in items:
        clash = np.zeros(len(stays), bool)
        for stay in item:
            clash |= (start < stay.stop) & (stop > stay.start)
        result.append(np.unique(owner[clash]) if len(stays) > len(items) else owner[clash])
    return result


def _first_fit(clashes: Sequence[np.ndarray], size: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Every item, in an order, at the lowest address that is free during all of its stays."""
    low, high = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    for i in order:
        num_bytes = size[i]
        there = clashes[i][high[clashes[i]] > 0]
        below = low[there]
        upwards = below.argsort()
        below = below[upwards]
        offset = 0
        if len(below) and below[0] < num_bytes:
            # Gaps between neighbours: from the highest end so far to the next start.
            tops = np.maximum.accumulate(high[there[upwards]])
            fits = below[1:] - tops[:-1] >= num_bytes
            first = int(fits.argmax()) if len(fits) else 0
            offset = int(tops[first] if len(fits) and fits[first] else tops[-1])
        low[i], high[i] = offset, offset + num_bytes
    return low
