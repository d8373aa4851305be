"""Exact search for addresses, for what first fit leaves too high.

Items are placed in the order of their offsets, each at the lowest one that is free above what is placed. Every packing
that cannot be pushed down is found this way, so a search that ends without one has proven that there is none.

Source: MiniMalloc, Moffitt 2023 (canonical order, dominance, bounds by sections of time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FEW = 40  # items: up to here a search has a chance to see everything
_PROOF = 20  # times as many placements as for one order
_WIDE = 40_000  # items times sections: up to here the bound of a section looks at the items that cross it


@dataclass(frozen=True)
class Packing:
    """What a search found.

    Attributes:
        offsets: By item; None when no packing was found.
        ended: The search saw everything: without offsets no packing below the limit exists.
    """

    offsets: np.ndarray | None
    ended: bool


def search(
    intervals: Sequence[Sequence[tuple[int, int]]], sizes: Sequence[int], limit: int, nodes: int
) -> Packing:
    """A packing of items that ends at `limit` or below.

    Args:
        intervals: Per item the times [start, stop) at which it takes its place.
        sizes: Bytes by item, above 0.
        limit: Highest end that is accepted.
        nodes: Placements that are tried for every order, and of few items for the proof that there is none.
    """
    tree = _Tree(intervals, np.asarray(sizes, np.int64), limit)
    for rank, lowest_first in tree.orders():
        result = tree.descend(rank, lowest_first, nodes)
        if result.offsets is not None or result.ended:
            return result
    if len(sizes) > _FEW:
        return Packing(None, False)
    return tree.descend(*tree.orders()[0], _PROOF * nodes)


class _Tree:
    def __init__(
        self, intervals: Sequence[Sequence[tuple[int, int]]], size: np.ndarray, limit: int
    ) -> None:
        self.size, self.limit = size, limit
        times = sorted({t for item in intervals for pair in item for t in pair})
        at = {t: i for i, t in enumerate(times)}
        self.crosses = np.zeros((len(intervals), max(len(times) - 1, 1)), bool)
        for i, item in enumerate(intervals):
            for start, stop in item:
                self.crosses[i, at[start] : at[stop]] = True
        dense = self.crosses.astype(np.float32)
        self.clash = dense @ dense.T > 0
        self.load = (self.crosses * size[:, None]).sum(0)
        self.wide = self.crosses.size <= _WIDE

    def orders(self) -> tuple[tuple[np.ndarray, bool], ...]:
        """Which of the next items is tried first: rank by item, and whether the lowest place goes before."""
        length = self.crosses.sum(1)
        sees = np.where(self.crosses, self.load, 0).max(1)
        result = (
            np.lexsort((-self.size, -length, -sees)),
            np.lexsort((-length, -self.size)),
            np.lexsort((-self.size, -length)),
            np.lexsort((-self.size * length,)),
        )
        ranks = [np.argsort(order) for order in result]
        return tuple((rank, lowest) for rank in ranks for lowest in (True, False))

    def descend(self, rank: np.ndarray, lowest_first: bool, nodes: int) -> Packing:
        """Depth first, until a packing is found, nothing is left or the nodes are used."""
        n = len(self.size)
        offsets = np.zeros(n, np.int64)
        lowest, left = np.zeros(n, np.int64), np.ones(n, bool)
        height, load = np.zeros(self.crosses.shape[1], np.int64), self.load.copy()
        stack = [self._children(lowest, left, height, load, (0, -1), rank, lowest_first)]
        seen: set[bytes] = set()
        states = [(lowest, left, height, load)]
        used = 0
        while stack:
            if not stack[-1]:
                stack.pop()
                states.pop()
                continue
            if used >= nodes:
                return Packing(None, False)
            i = stack[-1].pop()
            lowest, left, height, load = (x.copy() for x in states[-1])
            at = int(lowest[i])
            offsets[i] = at
            top = at + int(self.size[i])
            left[i] = False
            if not left.any():
                return Packing(offsets, False)
            np.maximum(lowest, top, out=lowest, where=self.clash[i])
            # What comes after depends on what is left and where it may lie, not on how it came to that.
            late = (lowest < at) | ((lowest == at) & (rank <= rank[i]))
            key = np.append(np.where(left, np.where(late, -1, lowest), -2), at).tobytes()
            if key in seen:
                continue
            seen.add(key)
            used += 1
            height[self.crosses[i]] = top
            load[self.crosses[i]] -= self.size[i]
            states.append((lowest, left, height, load))
            stack.append(
                self._children(lowest, left, height, load, (at, int(rank[i])), rank, lowest_first)
            )
        return Packing(None, True)

    def _children(
        self,
        lowest: np.ndarray,
        left: np.ndarray,
        height: np.ndarray,
        load: np.ndarray,
        last: tuple[int, int],
        rank: np.ndarray,
        lowest_first: bool,
    ) -> list[int]:
        """Items that may come next, the best one last; none when what is left cannot end below the limit."""
        at, before = last
        open_ = np.flatnonzero(left)
        low = np.maximum(lowest[open_], at)
        if ((low + self.size[open_]) > self.limit).any():
            return []
        if self.wide:
            begin = np.where(self.crosses[open_], low[:, None], np.iinfo(np.int64).max).min(0)
        else:
            begin = np.full(len(height), low.min())
        used = load > 0
        if (np.maximum(height, begin)[used] + load[used] > self.limit).any():
            return []
        # What fits wholly below the next item would have been placed before it.
        below = int((lowest[open_] + self.size[open_]).min())
        mine = open_[(lowest[open_] >= at) & (lowest[open_] < below)]
        mine = mine[(lowest[mine] > at) | (rank[mine] > before)]  # equal offsets in one order only
        keys = (rank[mine], lowest[mine]) if lowest_first else (lowest[mine], rank[mine])
        return [int(i) for i in mine[np.lexsort(keys)][::-1]]
