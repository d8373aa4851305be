"""Rows of strategies completed with the way to free memory; what they hold at the peak is priced once a search."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import distinct, memory_key
from hyper_parallel.planner.bounds import (
    FREED,
    FULL,
    PRICES,
    TIE,
    Array,
    Choice,
    Pricer,
    select,
)
from hyper_parallel.planner.strategy_space import Columns


class PeakBytes:
    """Kinds of rows, each a number, with their peak bytes and the layers that recomputation needs.

    Memory knows few of the columns, neither shapes nor an order of the axes: far fewer kinds are priced than rows, and
    those of complete strategies are known from their partial ones.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._numbers: dict[bytes, int] = {}
        self._bytes = np.empty((len(pricer.choices), 0))
        self._few: dict[Choice, Array] = {}

    def kinds(self, columns: Columns) -> NDArray[np.intp]:
        """The kind of every row; new ones are priced."""
        key, numbers = memory_key(columns, self.pricer.request.workload.seq_len), self._numbers
        first, index = distinct(key)
        table = np.column_stack(key)[first]
        known, raw, width = len(numbers), table.tobytes(), table.itemsize * len(key)
        starts = range(0, len(raw), width)
        found = [numbers.setdefault(raw[at : at + width], len(numbers)) for at in starts]
        kinds = np.array(found, dtype=np.intp)
        new = first[kinds >= known]
        if len(new):
            self._bytes = _with_room(self._bytes, len(numbers))
            self._bytes[:, known : len(numbers)] = self.pricer.peak(select(columns, new))
        return kinds[index]

    def bytes(self, kinds: NDArray[np.intp]) -> Array:
        """Peak bytes of rows of some kinds under every choice of the pricer, at least, [choices, rows]."""
        return self._bytes[:, kinds]

    def few_layers(
        self, columns: Columns, kinds: NDArray[np.intp], choice: Choice
    ) -> tuple[Array, Array]:
        """As few layers of a rank as have to be recomputed under a choice, and the peak bytes with them, of rows."""
        known = _with_room(self._few.get(choice, np.empty((2, 0))), len(self._numbers))
        self._few[choice] = known
        asked, first = np.unique(kinds, return_index=True)
        new = np.isnan(known[0, asked])
        if new.any():
            known[:, asked[new]] = self.pricer.few_layers(select(columns, first[new]), choice)
        layers, held = known[:, kinds]
        return layers, held


def _with_room(table: Array, columns: int) -> Array:
    """A table with so many columns at least, new ones not a number; it doubles, so that growing stays cheap."""
    if table.shape[1] >= columns:
        return table
    grown = np.full((len(table), max(columns, 2 * table.shape[1])), np.nan)
    grown[:, : table.shape[1]] = table
    return grown


class Completer:
    """Completes rows with the way to free memory, and cuts those that do not fit or cannot be among the best.

    Attributes:
        pricer: What prices the rows.
        held: What they hold.
        threshold: Seconds per token that a strategy must beat.
        cut: Rows that were cut, by reason.
        priced: Complete strategies that were priced.
        least_bytes: Least peak of what did not fit.
    """

    def __init__(self, pricer: Pricer, threshold: float) -> None:
        self.pricer, self.threshold, self.held = pricer, threshold, PeakBytes(pricer)
        self.cut: Counter[str] = Counter()
        self.priced, self.least_bytes = 0, np.inf

    def faster(self, per_token_s: Array) -> NDArray[np.bool_]:
        """Which can still be among the best; the others are counted."""
        fast: NDArray[np.bool_] = per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~fast).sum())
        return fast

    def fit(self, columns: Columns) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The kind of every row as `PeakBytes` knows it, and whether it fits in any way."""
        kinds = self.held.kinds(columns)
        held = self.held.bytes(kinds)[self.pricer.may]
        fits: NDArray[np.bool_] = (held <= self.pricer.capacity).any(axis=0)
        self.least_bytes = min(self.least_bytes, held[:, ~fits].min(initial=np.inf))
        return kinds, fits

    def complete(self, columns: Columns) -> Columns:
        """Prices of rows that can be among the best.

        Of a partial strategy the fastest way to free memory is taken; of one with an order of its axes every way is a
        row of its own, for the best is found by simulation. A way that takes as long as another one is left out.
        Recomputation is of as few layers of a rank as make it fit: between nothing and everything recomputed, time and
        the bytes of every phase are linear in the layers, which are equal. What lies between is with offload the memory
        plan's, which drops single results at the price that the copies' term has.

        Memory is cheaper to price than time, so what cannot fit goes first.
        """
        pricer = self.pricer
        kinds, fits = self.fit(columns)
        self.cut["does not fit in memory"] += int((~fits).sum())
        columns, kinds = select(columns, fits), kinds[fits]
        tokens = pricer.tokens(columns)
        least = pricer.seconds(columns, pricer.usual)
        fast = self.faster(least / tokens)
        columns, kinds, least = select(columns, fast), kinds[fast], least[fast]
        held, most = self.held.bytes(kinds), self.threshold * (1 + TIE) * tokens[fast]
        can = (held <= pricer.capacity) & pricer.may[:, None]
        best, cut_by_tp = np.full(len(kinds), np.inf), columns["tp_x"] * columns["tp_y"] > 1.0
        known: dict[Choice, Array] = {pricer.usual: least}

        def seconds(which: NDArray[np.intp], choice: Choice) -> Array:
            """Prices of some rows, each computed once; what is made again in full gathers its inputs anyway."""
            offload, regather, kind = choice
            choice = (offload, pricer.usual[1] if kind == FULL else regather, kind)
            values = known.setdefault(choice, np.full(len(kinds), np.nan))
            new = which[np.isnan(values[which])]
            values[new] = pricer.seconds(select(columns, new), choice)
            return values[which]

        ways: list[tuple[NDArray[np.intp], Array]] = []
        for number, choice in enumerate(pricer.choices):
            offload, regather, kind = choice
            # Nothing is better than what adds nothing.
            open_ = can[number] & (best > least * (1 + TIE))
            which = np.flatnonzero(open_ & (cut_by_tp | (regather == pricer.usual[1])))
            start = seconds(which, (0, regather, 0))
            which, start = which[start <= most[which]], start[start <= most[which]]
            if not len(which):
                continue
            some, memory = select(columns, which), held[number, which]
            step, layers = seconds(which, choice), np.full(len(which), -1.0)
            if kind and not offload and 0 in pricer.kinds:
                needed, memory = self.held.few_layers(some, kinds[which], choice)
                all_layers = np.ceil(pricer.request.numbers.layers / some["pp"])
                step = start + needed / all_layers * (step - start)
                layers = np.where(needed < all_layers, needed, -1.0)
            ways.append((which, np.array(np.broadcast_arrays(step, memory, layers, *choice))))
            best[which] = np.minimum(best[which], step)
        return self._rows(columns, ways)

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
