"""Completion of strategies whose memory is kept by a memory plan: their copies are part of the price."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import distinct, memory_key
from hyper_parallel.planner._completion import Completion, Few, Peak, Seconds
from hyper_parallel.planner._leaves import TIE, Leaves
from hyper_parallel.planner._space import Columns

Array = NDArray[np.float64]


class Offloading(Completion):
    """Completion where some strategies offload."""

    def complete(
        self, columns: Columns, seconds: Seconds, peak: Peak, few: Few, every: bool = False
    ) -> tuple[Leaves, Columns]:
        """See `Completion.complete`. A strategy that offloads recomputes no layer or all of them, whichever is faster.

        What lies between is the memory plan's: it drops single results, at the price that the copies' term has.
        """
        if "offload" not in columns or not (columns["offload"] > 0).any():
            return super().complete(columns, seconds, peak, few, every)
        moved = columns["offload"] > 0
        leaves, lost = self._moved({n: c[moved] for n, c in columns.items()}, seconds, peak)
        if moved.all():
            return leaves, lost
        stay = {n: c[~moved] for n, c in columns.items()}
        others, more = super().complete(stay, seconds, peak, few, every)
        lost = {n: np.concatenate([c, more[n]]) for n, c in lost.items()}
        return Leaves.join([others, leaves]), lost

    def _moved(self, columns: Columns, seconds: Seconds, peak: Peak) -> tuple[Leaves, Columns]:
        capacity = self.goal.capacity_bytes * (1 + TIE)
        choices = list(itertools.product(self.regathers, self.kinds))
        first, index = distinct(memory_key(columns))
        held = peak({n: c[first] for n, c in columns.items()}, choices)
        fits = np.any(held <= capacity, axis=0)[index]
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost = {n: c[~fits] for n, c in columns.items()}
        columns, index = {n: c[fits] for n, c in columns.items()}, index[fits]
        tokens = self.tokens(columns)
        # Copies, and whatever is made or gathered again, only add to what the usual choice takes without them.
        usual = self.regathers[0], 0
        stays = {**columns, "offload": np.zeros(len(index))}
        least = seconds(stays, usual) if len(index) else np.empty(0)
        most = self.threshold * (1 + TIE) * tokens
        fast = least <= most
        columns, index = {n: c[fast] for n, c in columns.items()}, index[fast]
        least, most, tokens = least[fast], most[fast], tokens[fast]
        best, used = np.full(len(index), np.inf), np.zeros(len(index))
        chosen, regathers = np.zeros(len(index)), np.zeros(len(index))
        for choice, table in zip(choices, held, strict=True):
            memory = table[index]
            # Nothing is better than what adds nothing.
            which = np.flatnonzero((memory <= capacity) & (best > least * (1 + TIE)))
            if not len(which):
                continue
            step = seconds({n: c[which] for n, c in columns.items()}, choice)
            better = step < best[which] * (1 - TIE)
            which, step = which[better], step[better]
            best[which], used[which] = step, memory[which]
            regathers[which], chosen[which] = choice
        keep = best <= most
        self.cut["slower by its bound"] += int((~fast).sum() + (~keep).sum())
        filled = {**columns, "recompute": chosen, "regather": regathers}
        leaves = Leaves(filled, best / tokens, used, -np.ones(len(index)), least / tokens)
        return leaves.take(keep), lost
