"""The repair of a fit: what ends above a limit takes the place of what is cheapest to place again.

Sources: ejection chains, Glover, "Ejection chains, reference structures and alternating path methods", 1996; weights
that grow with every ejection, Morris, "The breakout method for escaping from local minima", 1993.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from hyper_parallel.ir import Extent

_OF_SIZE: Final = 0.5  # power of a stay's bytes in the price of its ejection
_OF_TIME: Final = 0.3  # power of its time in its rank among those that wait for a place


class Repair:
    """A fit under a limit, of which some items are out.

    Args:
        items: What is placed: stays that share an address.
        sizes: Bytes in the arena by storage index.
        offsets: Where every item lies; no two are at one place.
        limit: No item may end above.

    Attributes:
        moves: Items that were given a place.
    """

    def __init__(
        self,
        items: Sequence[tuple[Extent, ...]],
        sizes: Sequence[int],
        offsets: np.ndarray,
        limit: int,
    ) -> None:
        self._limit, self.moves = limit, 0
        stays = [stay for item in items for stay in item]
        counts = [len(item) for item in items]
        self._rows = np.cumsum([0, *counts]).tolist()  # of an item: from here to the next
        self._item = np.repeat(np.arange(len(items)), counts)
        self._start = np.array([stay.start for stay in stays], np.int32)
        self._stop = np.array([stay.stop for stay in stays], np.int32)
        self._size = [sizes[item[0].storage] for item in items]
        size = np.array(self._size, np.int64)[self._item]
        self._low = offsets[self._item]
        self._high = self._low + size
        self._there = (size > 0) & (self._high <= limit)
        self._base = size**_OF_SIZE
        self._price = self._base.copy()
        time = np.add.reduceat(self._stop - self._start, self._rows[:-1])
        self._rank = (-np.array(self._size) * np.maximum(time, 1) ** _OF_TIME).tolist()
        out = set(self._item[(size > 0) & ~self._there].tolist())
        self._there &= ~np.isin(self._item, list(out))
        self._waiting = [(self._rank[i], i) for i in out]

    def offsets(self, moves: int) -> np.ndarray | None:
        """Where every item lies, once all are below the limit; None after so many moves."""
        if max(self._size) > self._limit:
            return None
        heapify(self._waiting)
        while self._waiting and self.moves < moves:
            self.moves += 1
            self._place(heappop(self._waiting)[1])
        return None if self._waiting else self._low[self._rows[:-1]]

    def _place(self, item: int) -> None:
        """Put an item where what it ejects has the lowest price, and raise that."""
        mine, size = slice(self._rows[item], self._rows[item + 1]), self._size[item]
        clash = np.zeros(len(self._there), bool)
        for start, stop in zip(self._start[mine], self._stop[mine], strict=True):
            clash |= (self._start < stop) & (self._stop > start)
        beside = (clash & self._there).nonzero()[0]
        low, high = self._low[beside], self._high[beside]
        offset = self._cheapest(low, high, self._price[beside], size)
        hit = beside[(low < offset + size) & (high > offset)]
        for other in set(self._item[hit].tolist()):
            rows = slice(self._rows[other], self._rows[other + 1])
            self._there[rows] = False
            self._price[rows] += self._base[rows]
            heappush(self._waiting, (self._rank[other], other))
        self._low[mine], self._high[mine], self._there[mine] = offset, offset + size, True

    def _cheapest(self, low: np.ndarray, high: np.ndarray, price: np.ndarray, size: int) -> int:
        """The lowest of the offsets at which what is hit costs least."""
        top = self._limit - size
        places = np.concatenate((high, low - size, (0, top)))
        places = places[(places >= 0) & (places <= top)]
        # Hit is what begins below the end, less what ends below the beginning.
        by_low, by_high = low.argsort(), high.argsort()
        begun = np.concatenate(((0.0,), price[by_low].cumsum()))
        ended = np.concatenate(((0.0,), price[by_high].cumsum()))
        cost = begun[low[by_low].searchsorted(places + size)]
        cost -= ended[high[by_high].searchsorted(places, "right")]
        return int(places[cost <= cost.min() + 0.5].min())  # the least price is 1
