"""Completion of rows with the choice that frees memory; peak bytes are cached for the whole search."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import distinct, memory_key
from hyper_parallel.planner.bounds import FREED, FULL, PRICES, TIE, Array, Choice, Pricer, select
from hyper_parallel.planner.strategy_space import Columns


class PeakBytes:
    """Cache of peak bytes and recomputed layers, by kind of row; a kind is an integer.

    Memory depends on few columns, neither on shapes nor on the order of the axes. So there are far fewer kinds than
    rows, and complete strategies reuse the kinds of their partial strategies.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._numbers: dict[bytes, int] = {}
        self._bytes = np.empty((len(pricer.choices), 0))
        self._min_layers: dict[Choice, Array] = {}

    def kinds(self, columns: Columns) -> NDArray[np.intp]:
        """Return the kind of every row; price new kinds."""
        key, numbers = memory_key(columns, self.pricer.request.workload.seq_len), self._numbers
        first, index = distinct(key)
        table = np.column_stack(key)[first]
        known, raw, width = len(numbers), table.tobytes(), table.itemsize * len(key)
        starts = range(0, len(raw), width)
        kind_list = [
            numbers.setdefault(raw[start : start + width], len(numbers)) for start in starts
        ]
        kinds = np.array(kind_list, dtype=np.intp)
        new = first[kinds >= known]
        if len(new):
            self._bytes = _with_capacity(self._bytes, len(numbers))
            self._bytes[:, known : len(numbers)] = self.pricer.peak(select(columns, new))
        return kinds[index]

    def bytes(self, kinds: NDArray[np.intp]) -> Array:
        """Return a lower bound of the peak bytes of some kinds under every choice of the pricer, [choices, rows]."""
        return self._bytes[:, kinds]

    def min_recompute_layers(
        self, columns: Columns, kinds: NDArray[np.intp], choice: Choice
    ) -> tuple[Array, Array]:
        """Return, per row, the smallest number of recomputed layers per rank that fits, and the resulting peak."""
        known = _with_capacity(self._min_layers.get(choice, np.empty((2, 0))), len(self._numbers))
        self._min_layers[choice] = known
        unique_kinds, first = np.unique(kinds, return_index=True)
        new = np.isnan(known[0, unique_kinds])
        if new.any():
            known[:, unique_kinds[new]] = self.pricer.min_recompute_layers(
                select(columns, first[new]), choice
            )
        layers, peaks = known[:, kinds]
        return layers, peaks


def _with_capacity(table: Array, columns: int) -> Array:
    """Return a table of at least `columns` columns, new ones NaN; the size doubles, for amortized growth."""
    if table.shape[1] >= columns:
        return table
    extended = np.full((len(table), max(columns, 2 * table.shape[1])), np.nan)
    extended[:, : table.shape[1]] = table
    return extended


class _ChoiceSeconds:
    """Seconds per step of some rows under each choice, priced once per row and choice."""

    def __init__(self, pricer: Pricer, columns: Columns, fastest_s: Array) -> None:
        self.pricer, self.columns, self._num_rows = pricer, columns, len(fastest_s)
        self._known: dict[Choice, Array] = {pricer.fastest_choice: fastest_s}

    def seconds(self, indices: NDArray[np.intp], choice: Choice) -> Array:
        """Return the seconds of some rows under a choice; full recomputation re-gathers inputs in any case."""
        offload, regather, kind = choice
        regather = self.pricer.fastest_choice[1] if kind == FULL else regather
        choice = (offload, regather, kind)
        values = self._known.setdefault(choice, np.full(self._num_rows, np.nan))
        new = indices[np.isnan(values[indices])]
        values[new] = self.pricer.seconds(select(self.columns, new), choice)
        return values[indices]


class Completer:
    """Completion of rows with the choice that frees memory; prunes rows that do not fit or cannot be among the best.

    Attributes:
        pricer: Pricer of the rows.
        peaks: Cache of their peak bytes.
        threshold: Seconds per token that a strategy must beat.
        cut: Number of pruned rows, by reason.
        priced: Number of priced complete strategies.
        least_bytes: Least peak bytes of the rows that do not fit.
    """

    def __init__(self, pricer: Pricer, threshold: float) -> None:
        self.pricer, self.threshold, self.peaks = pricer, threshold, PeakBytes(pricer)
        self.cut: Counter[str] = Counter()
        self.priced, self.least_bytes = 0, np.inf

    def faster(self, per_token_s: Array) -> NDArray[np.bool_]:
        """Return the mask of rows that can be among the best; count the other rows."""
        fast: NDArray[np.bool_] = per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~fast).sum())
        return fast

    def promising(self, columns: Columns) -> Columns:
        """Return the rows that can be among the best by the bound under the fastest choice."""
        pricer = self.pricer
        per_token_s = pricer.seconds(columns, pricer.fastest_choice) / pricer.tokens(columns)
        return select(columns, self.faster(per_token_s))

    def fit(self, columns: Columns) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the kind of every row in `PeakBytes`, and whether it fits under any choice."""
        kinds = self.peaks.kinds(columns)
        peaks = self.peaks.bytes(kinds)[self.pricer.selectable]
        fits: NDArray[np.bool_] = (peaks <= self.pricer.capacity).any(axis=0)
        self.least_bytes = min(self.least_bytes, peaks[:, ~fits].min(initial=np.inf))
        return kinds, fits

    def complete(self, columns: Columns) -> Columns:
        """Return the rows that can be among the best, with their prices and the choice that frees memory.

        A partial strategy becomes one row, with its fastest choice. A strategy with an order of its axes becomes a row
        per choice, because simulation decides among them. A choice as slow as an earlier one is omitted.

        Recomputation covers the smallest number of layers per rank that fits. Layers are equal, so time and the bytes
        of every phase are linear in that number. With offload, partial recomputation is left to the memory plan, which
        drops single results at the price in the term of the copies.

        Rows that cannot fit are pruned first, because memory is cheaper to price than time.
        """
        pricer = self.pricer
        kinds, fits = self.fit(columns)
        self.cut["does not fit in memory"] += int((~fits).sum())
        columns, kinds = select(columns, fits), kinds[fits]
        tokens = pricer.tokens(columns)
        least = pricer.seconds(columns, pricer.fastest_choice)
        fast = self.faster(least / tokens)
        columns, kinds, least = select(columns, fast), kinds[fast], least[fast]
        peaks, limit = self.peaks.bytes(kinds), self.threshold * (1 + TIE) * tokens[fast]
        feasible = (peaks <= pricer.capacity) & pricer.selectable[:, None]
        best, cut_by_tp = np.full(len(kinds), np.inf), columns["tp_x"] * columns["tp_y"] > 1.0
        seconds = _ChoiceSeconds(pricer, columns, least).seconds
        overlaps = np.zeros(len(kinds), dtype=bool)
        if "halves" in columns:
            overlaps = (columns["halves"] == 2.0) | (columns["tp_chunks"] > 1.0)
        options: list[tuple[NDArray[np.intp], Array]] = []
        for number, choice in enumerate(pricer.choices):
            offload, regather, kind = choice
            # A choice that adds no time is not improved by a later one.
            improvable = feasible[number] & (best > least * (1 + TIE))
            if overlaps.any() and not pricer.space.overlaps_with(offload, regather):
                improvable &= ~overlaps
            indices = np.flatnonzero(
                improvable & (cut_by_tp | (regather == pricer.fastest_choice[1]))
            )
            start = seconds(indices, (0, regather, 0))
            indices, start = indices[start <= limit[indices]], start[start <= limit[indices]]
            if not len(indices):
                continue
            subset, memory = select(columns, indices), peaks[number, indices]
            step, layers = seconds(indices, choice), np.full(len(indices), -1.0)
            if kind and not offload and 0 in pricer.kinds:
                needed, memory = self.peaks.min_recompute_layers(subset, kinds[indices], choice)
                all_layers = np.ceil(pricer.request.numbers.layers / subset["pp"])
                step = start + needed / all_layers * (step - start)
                layers = np.where(needed < all_layers, needed, -1.0)
            options.append((indices, np.array(np.broadcast_arrays(step, memory, layers, *choice))))
            best[indices] = np.minimum(best[indices], step)
        return self._rows(columns, options)

    def _rows(self, columns: Columns, options: list[tuple[NDArray[np.intp], Array]]) -> Columns:
        """Return the rows of all options of complete strategies, or of the fastest option of partial ones."""
        indices = np.concatenate([np.empty(0, dtype=np.intp), *(rows for rows, _ in options)])
        table = np.concatenate([np.empty((6, 0)), *(values for _, values in options)], axis=1)
        if "order" in columns:
            self.priced += len(indices)
        else:
            # Among equally fast options, up to rounding, the plainest wins: it comes first.
            place = np.repeat(np.arange(len(options)), [len(rows) for rows, _ in options])
            fastest = np.lexsort((table[0] * (1 + TIE * place), indices))
            fastest = fastest[np.diff(indices[fastest], prepend=-1) > 0]
            indices, table = indices[fastest], table[:, fastest]
        rows = select(columns, indices)
        table[0] /= self.pricer.tokens(rows)
        rows |= dict(zip((*PRICES, *FREED), table, strict=True))
        return select(rows, self.faster(table[0]))
