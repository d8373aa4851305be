"""The repair of a fit: what ends above a limit takes the place of what is cheapest to place again.

Sources: ejection chains, Glover, "Ejection chains, reference structures and alternating path methods", 1996; weights
that grow with every ejection, Morris, "The breakout method for escaping from local minima", 1993.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

_OF_SIZE: Final = 0.5  # power of a stay's bytes in the price of its ejection
_OF_TIME: Final = 0.3  # power of its time in its rank among those that wait for a place


class Repair:
    """A fit under a limit, of which some items are out.

    Args:
        clashes: Of every item those that are there at one of its times, itself included.
        size: Bytes by item.
        time: For how long it is there, by item.
        offsets: Where every item lies; no two are at one place.
        limit: No item may end above.

    Attributes:
        moves: Items that were given a place.
    """

    def __init__(
        self,
        clashes: Sequence[np.ndarray],
        size: np.ndarray,
        time: np.ndarray,
        offsets: np.ndarray,
        limit: int,
    ) -> None:
        self._clashes, self._size, self._limit, self.moves = clashes, size, limit, 0
        self._low, self._high = offsets.copy(), offsets + size
        self._there = (size > 0) & (self._high <= limit)
        self._base = size**_OF_SIZE
        self._price = self._base.copy()
        self._rank = (-size * np.maximum(time, 1) ** _OF_TIME).tolist()
        out = ((size > 0) & ~self._there).nonzero()[0].tolist()
        self._unplaced = [(self._rank[i], i) for i in out]

    def offsets(self, moves: int) -> np.ndarray | None:
        """Where every item lies, once all are below the limit; None after so many moves."""
        if self._size.max() > self._limit:
            return None
        heapify(self._unplaced)
        while self._unplaced and self.moves < moves:
            self.moves += 1
            self._place(heappop(self._unplaced)[1])
        return None if self._unplaced else self._low

    def _place(self, item: int) -> None:
        """Put an item where what it ejects has the lowest price, and raise that."""
        beside = self._clashes[item]
        beside = beside[self._there[beside]]
        low, high = self._low[beside], self._high[beside]
        size = int(self._size[item])
        offset = self._cheapest(low, high, self._price[beside], size)
        hit = beside[(low < offset + size) & (high > offset)]
        self._there[hit] = False
        self._price[hit] += self._base[hit]
        for other in hit.tolist():
            heappush(self._unplaced, (self._rank[other], other))
        self._low[item], self._high[item], self._there[item] = offset, offset + size, True

    def _cheapest(self, low: np.ndarray, high: np.ndarray, price: np.ndarray, size: int) -> int:
        """The lowest of the offsets at which what is hit costs least."""
        by_low, by_high = low.argsort(), high.argsort()
        low, high = low[by_low], high[by_high]
        # From anywhere else it may slide down, to where the next one ends or to the bottom, and hits no more.
        places = np.concatenate(((0,), high[: high.searchsorted(self._limit - size, "right")]))
        # Hit is what begins below the end, less what ends below the beginning.
        begun = np.concatenate(((0.0,), price[by_low].cumsum()))
        ended = np.concatenate(((0.0,), price[by_high].cumsum()))
        cost = begun[low.searchsorted(places + size)] - ended[high.searchsorted(places, "right")]
        return int(places[(cost <= cost.min() + 0.5).argmax()])  # the least price is 1
