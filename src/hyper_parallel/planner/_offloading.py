"""Completion of strategies whose memory is kept by a memory plan: their copies are part of the price."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.planner._completion import Completion, Peak, Seconds
from hyper_parallel.planner._leaves import TIE, Leaves
from hyper_parallel.planner._space import Columns

Array = NDArray[np.float64]


class Offloading(Completion):
    """Completion where some strategies offload."""

    def complete(self, columns: Columns, seconds: Seconds, peak: Peak) -> tuple[Leaves, Columns]:
        """See `Completion.complete`. A strategy that offloads recomputes no layer or all of them, whichever is faster.

        What lies between is the memory plan's: it drops single results, at the price that the copies' term has.
        """
        if "offload" not in columns or not (columns["offload"] > 0).any():
            return super().complete(columns, seconds, peak)
        moved = columns["offload"] > 0
        leaves, lost = self._moved({n: c[moved] for n, c in columns.items()}, seconds, peak)
        if moved.all():
            return leaves, lost
        others, more = super().complete({n: c[~moved] for n, c in columns.items()}, seconds, peak)
        lost = {n: np.concatenate([c, more[n]]) for n, c in lost.items()}
        return Leaves.join([others, leaves]), lost

    def _moved(self, columns: Columns, seconds: Seconds, peak: Peak) -> tuple[Leaves, Columns]:
        capacity = self.goal.capacity_bytes * (1 + TIE)
        size = len(columns["pp"])
        best, least = np.full(size, np.inf), np.full(size, np.inf)
        used, chosen, regathers = np.zeros(size), np.zeros(size), np.zeros(size)
        choices = list(itertools.product(self.regathers, self.kinds))
        for choice, memory in zip(choices, peak(columns, choices), strict=True):
            step = seconds(columns, choice)
            least = np.minimum(least, step)
            better = (memory <= capacity) & (step < best * (1 - TIE))
            best, used = np.where(better, step, best), np.where(better, memory, used)
            regathers = np.where(better, choice[0], regathers)
            chosen = np.where(better, choice[1], chosen)
        fits = np.isfinite(best)
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost = {n: c[~fits] for n, c in columns.items()}
        tokens = self.tokens(columns)
        keep = fits & (best <= self.threshold * (1 + TIE) * tokens)
        self.cut["slower by its bound"] += int((fits & ~keep).sum())
        filled = {
            n: c[keep] for n, c in {**columns, "recompute": chosen, "regather": regathers}.items()
        }
        value, below = best / tokens, least / tokens
        return Leaves(filled, value[keep], used[keep], -np.ones(int(keep.sum())), below[keep]), lost
