"""The memory of strategies: masked by what fits, and freed in the ways that cost least.

Memory is freed in three ways: inputs that were gathered for matmuls are gathered again in backward, activations are
computed again, and what exceeds the device lies in host memory.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import distinct, memory_key
from hyper_parallel.planner._bounds import FULL, Choice, Pricer
from hyper_parallel.planner._rows import PRICES, TIE, select
from hyper_parallel.planner._space import Columns

Array = NDArray[np.float64]

FREED = ("offload", "regather", "recompute")
"""Columns that are solved inside a strategy."""


class Completer:
    """Completes rows with the way to free memory, and cuts those that do not fit or cannot be among the best.

    Attributes:
        pricer: What prices the rows.
        threshold: Seconds per token that a strategy must beat.
        cut: Rows that were cut, by reason.
        priced: Complete strategies that were priced.
        least_bytes: Least peak of what did not fit.
    """

    def __init__(self, pricer: Pricer, threshold: float) -> None:
        self.pricer, self.threshold = pricer, threshold
        self.cut: Counter[str] = Counter()
        self.priced, self.least_bytes = 0, np.inf

    def faster(self, per_token_s: Array) -> NDArray[np.bool_]:
        """Which can still be among the best; the others are counted."""
        fast: NDArray[np.bool_] = per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~fast).sum())
        return fast

    def complete(self, columns: Columns) -> tuple[Columns, Columns]:
        """Prices of rows that can be among the best, and the rows that do not fit at all.

        Of a partial strategy the fastest way to free memory is taken; of one with an order of its axes every way is a
        row of its own, for the best is found by simulation. A way that takes as long as another one is left out.
        Recomputation is of as few layers of a rank as make it fit: between nothing and everything recomputed, time and
        the bytes of every phase are linear in the layers, which are equal. What lies between is with offload the memory
        plan's, which drops single results at the price that the copies' term has.

        Memory is cheaper to price than time, so what cannot fit goes first; few of the columns matter to it, so each
        distinct row is priced once.
        """
        pricer = self.pricer
        first, index = distinct(memory_key(columns))
        keys = select(columns, first)
        held = pricer.peak(keys)
        can = (held <= pricer.capacity) & pricer.may[:, None]
        lean = can.any(axis=0)
        fits = lean[index]
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost, columns, index = select(columns, ~fits), select(columns, fits), index[fits]
        if not lean.all():
            self.least_bytes = min(self.least_bytes, held[pricer.may][:, ~lean].min())
        tokens = pricer.tokens(columns)
        least = pricer.seconds(columns, pricer.usual)
        fast = self.faster(least / tokens)
        columns, index, least = select(columns, fast), index[fast], least[fast]
        most = self.threshold * (1 + TIE) * tokens[fast]
        best, cut_by_tp = np.full(len(index), np.inf), columns["tp_x"] * columns["tp_y"] > 1.0
        known: dict[Choice, Array] = {pricer.usual: least}

        def seconds(which: NDArray[np.intp], choice: Choice) -> Array:
            """Prices of some rows, each computed once; what is made again in full gathers its inputs anyway."""
            offload, regather, kind = choice
            choice = (offload, pricer.usual[1] if kind == FULL else regather, kind)
            values = known.setdefault(choice, np.full(len(index), np.nan))
            new = which[np.isnan(values[which])]
            values[new] = pricer.seconds(select(columns, new), choice)
            return values[which]

        ways: list[tuple[NDArray[np.intp], Array]] = []
        for number, choice in enumerate(pricer.choices):
            offload, regather, kind = choice
            # Nothing is better than what adds nothing.
            open_ = can[number][index] & (best > least * (1 + TIE))
            which = np.flatnonzero(open_ & (cut_by_tp | (regather == pricer.usual[1])))
            start = seconds(which, (0, regather, 0))
            which, start = which[start <= most[which]], start[start <= most[which]]
            if not len(which):
                continue
            some, memory = select(columns, which), held[number][index[which]]
            step, layers = seconds(which, choice), np.full(len(which), -1.0)
            if kind and not offload and 0 in pricer.kinds:
                distinct_keys, place = np.unique(index[which], return_inverse=True)
                few = pricer.few_layers(select(keys, distinct_keys), choice)
                needed, memory = (v[place] for v in few)
                all_layers = np.ceil(pricer.request.numbers.layers / some["pp"])
                step = start + needed / all_layers * (step - start)
                layers = np.where(needed < all_layers, needed, -1.0)
            ways.append((which, np.array(np.broadcast_arrays(step, memory, layers, *choice))))
            best[which] = np.minimum(best[which], step)
        return self._rows(columns, ways), lost

    def _rows(self, columns: Columns, ways: list[tuple[NDArray[np.intp], Array]]) -> Columns:
        which = np.concatenate([np.empty(0, dtype=np.intp), *(rows for rows, _ in ways)])
        table = np.concatenate([np.empty((6, 0)), *(values for _, values in ways)], axis=1)
        if "order" in columns:
            self.priced += len(which)
        else:
            # By more than rounding: of ways that are as fast the plainer is taken, which comes first.
            place = np.repeat(np.arange(len(ways)), [len(rows) for rows, _ in ways])
            fastest = np.lexsort((table[0] * (1 + TIE * place), which))
            fastest = fastest[np.diff(which[fastest], prepend=-1) > 0]
            which, table = which[fastest], table[:, fastest]
        rows = select(columns, which)
        table[0] /= self.pricer.tokens(rows)
        rows |= dict(zip((*PRICES, *FREED), table, strict=True))
        return select(rows, self.faster(table[0]))
