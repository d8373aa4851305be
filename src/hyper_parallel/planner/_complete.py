"""The memory of strategies: masked by what fits, and freed in the ways that cost least.

Memory is freed in two ways: inputs that were gathered for matmuls are gathered again in backward, and activations are
computed again. A strategy that offloads leaves what lies between nothing and everything recomputed to its memory plan.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Machine, distinct, memory_key
from hyper_parallel.planner._pricer import FULL, Choice, RowPricer
from hyper_parallel.planner._rows import TIE, PricedRows
from hyper_parallel.planner._space import Columns

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LevelPrices:
    """How the rows of one level of the search are priced.

    Attributes:
        seconds: Seconds per step of rows under one choice.
        peak: Peak bytes of rows under several, [choices, rows].
        few_layers: Layers that rows have to recompute under one choice, and the peak bytes with them.
        every: Price rows under every choice that may be the best when simulated, not under the fastest one.
    """

    seconds: Callable[[Columns, Choice], Array]
    peak: Callable[[Columns, Sequence[Choice]], Array]
    few_layers: Callable[[Columns, Choice], tuple[Array, Array]]
    every: bool = False

    @classmethod
    def bare(cls, pricer: RowPricer) -> LevelPrices:
        """Bounds of rows whose data parallelism is open."""
        return cls(pricer.bare_s, pricer.lean_bytes, pricer.lean_layers)

    @classmethod
    def of(cls, pricer: RowPricer, machine: Machine, every: bool = False) -> LevelPrices:
        """Prices of complete rows on a machine."""
        return cls(
            lambda rows, choice: pricer.seconds(rows, choice, machine),
            lambda rows, choices: pricer.peak(rows, choices, machine),
            pricer.few_layers,
            every,
        )


def select(columns: Columns, which: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    """Some of the rows."""
    if which.dtype == np.bool_:
        which = np.flatnonzero(which)  # an index is read faster than a mask
    return {name: column[which] for name, column in columns.items()}


class Completer:
    """Completes rows with the way to free memory, and cuts those that do not fit or cannot be among the best.

    Attributes:
        pricer: What prices the rows.
        threshold: Seconds per token that a strategy must beat.
        cut: Rows that were cut, by reason.
    """

    def __init__(self, pricer: RowPricer) -> None:
        self.pricer = pricer
        self.threshold = pricer.goal.at_most_s_per_token or np.inf
        self.cut: Counter[str] = Counter()

    def complete(self, columns: Columns, prices: LevelPrices) -> tuple[PricedRows, Columns]:
        """Prices of rows that can be among the best, and the rows that do not fit at all.

        A row that offloads recomputes no layer or all of them, whichever is faster: what lies between is the memory
        plan's, which drops single results at the price that the copies' term has.
        """
        if "offload" not in columns or not (columns["offload"] > 0).any():
            return self._resident(columns, prices)
        moved = columns["offload"] > 0
        leaves, lost = self._offloaded(select(columns, moved), prices)
        if moved.all():
            return leaves, lost
        others, more = self._resident(select(columns, ~moved), prices)
        lost = {n: np.concatenate([c, more[n]]) for n, c in lost.items()}
        return PricedRows.join([others, leaves]), lost

    def _resident(self, columns: Columns, prices: LevelPrices) -> tuple[PricedRows, Columns]:
        """Rows that keep everything on the device.

        Gathered inputs are kept where that fits, for gathering them again takes longer. Recomputation is none, or of
        one kind as few layers of a rank as make it fit: between nothing and everything recomputed, time and the bytes
        of every phase are linear in the layers, which are equal. Memory is cheaper to price than time, so what cannot
        fit goes first; few of the columns matter to it, so each distinct row is priced once.
        """
        pricer = self.pricer
        if not len(columns["pp"]):
            empty = np.empty(0)
            freed = {"recompute": empty, "regather": empty}
            return PricedRows({**columns, **freed}, empty, empty, empty, empty), columns
        choices = pricer.choices()
        first, index = distinct(memory_key(columns))
        keys = select(columns, first)
        held = dict(zip(choices, prices.peak(keys, choices), strict=True))
        fits = self._fitting(held, pricer.regathers)[index]
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost, columns, index = select(columns, ~fits), select(columns, fits), index[fits]
        usual = pricer.regathers[0]
        tokens = pricer.tokens(columns)
        step = prices.seconds(columns, (usual, 0)) if len(index) else np.empty(0)
        fast = step <= self.threshold * (1 + TIE) * tokens
        self.cut["slower by its bound"] += int((~fast).sum())
        step, tokens, index = step[fast], tokens[fast], index[fast]
        columns = select(columns, fast)
        offers = _Offers(columns, usual, step / tokens, tokens)
        plain_fits = np.zeros(len(step), dtype=bool)
        whole: Array = np.full(len(step), np.nan)  # seconds where every layer is recomputed in full
        for regather in pricer.regathers:
            mine, start = np.arange(len(step)), step
            if regather != usual:
                cut = columns["tp_x"] * columns["tp_y"] > 1.0
                small = self._fitting(held, (regather,))[index]
                mine = np.flatnonzero(cut & ~plain_fits & small)
                start = prices.seconds(select(columns, mine), (regather, 0))
                still = start <= self.threshold * (1 + TIE) * tokens[mine]
                mine, start = mine[still], start[still]
            memory = held[regather, 0][index[mine]]
            plain = (memory <= pricer.capacity) & (0 in pricer.kinds)
            offers.add(mine[plain], start[plain], memory[plain], (regather, 0))
            plain_fits[mine] |= plain
            for kind in pricer.kinds:
                least = held[regather, kind][index[mine]]
                can = ~plain & (least <= pricer.capacity) & (kind > 0)
                if not can.any():
                    continue
                some = select(columns, mine[can])
                # A layer that is made again in full gathers its inputs anyway.
                known = kind == FULL and regather != usual
                more = whole[mine[can]] if known else prices.seconds(some, (regather, kind))
                if kind == FULL:
                    whole[mine[can]] = more
                layers = np.ceil(pricer.numbers.layers / some["pp"])
                needed, used = layers, least[can]
                if 0 in pricer.kinds:
                    those, which = np.unique(index[mine[can]], return_inverse=True)
                    few = prices.few_layers(select(keys, those), (regather, kind))
                    needed, used = (v[which] for v in few)
                value = start[can] + needed / layers * (more - start[can])
                some_layers = np.where(needed < layers, needed, -1.0)
                offers.add(mine[can], value, used, (regather, kind), some_layers)
        return offers.rows(prices.every), lost

    def _fitting(self, held: Mapping[Choice, Array], regathers: Sequence[int]) -> NDArray[np.bool_]:
        """Rows that fit under a choice that may be taken."""
        allowed = itertools.product(regathers, self.pricer.kinds)
        fits: NDArray[np.bool_] = np.any([held[c] <= self.pricer.capacity for c in allowed], axis=0)
        return fits

    def _offloaded(self, columns: Columns, prices: LevelPrices) -> tuple[PricedRows, Columns]:
        pricer = self.pricer
        choices = list(itertools.product(pricer.regathers, pricer.kinds))
        first, index = distinct(memory_key(columns))
        held = prices.peak(select(columns, first), choices)
        fits = np.any(held <= pricer.capacity, axis=0)[index]
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost, columns, index = select(columns, ~fits), select(columns, fits), index[fits]
        tokens = pricer.tokens(columns)
        # Copies, and whatever is made or gathered again, only add to what the usual choice takes without them.
        stays = {**columns, "offload": np.zeros(len(index))}
        usual = pricer.regathers[0], 0
        least = prices.seconds(stays, usual) if len(index) else np.empty(0)
        most = self.threshold * (1 + TIE) * tokens
        fast = least <= most
        self.cut["slower by its bound"] += int((~fast).sum())
        columns, index = select(columns, fast), index[fast]
        least, most, tokens = least[fast], most[fast], tokens[fast]
        offers = _Offers(columns, usual[0], least / tokens, tokens)
        best = np.full(len(index), np.inf)
        for choice, table in zip(choices, held, strict=True):
            memory = table[index]
            # Nothing is better than what adds nothing.
            which = np.flatnonzero((memory <= pricer.capacity) & (best > least * (1 + TIE)))
            if not len(which):
                continue
            step = prices.seconds(select(columns, which), choice)
            offers.add(which, step, memory[which], choice)
            best[which] = np.minimum(best[which], step)
        rows = offers.rows(prices.every)
        keep = rows.per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~keep).sum())
        return rows.take(keep), lost


class _Offers:
    """Prices of rows under the choices of memory that were tried, the plainer choice first."""

    def __init__(self, columns: Columns, regather: int, least_s: Array, tokens: Array) -> None:
        self.columns, self.usual = columns, regather
        self.least_s, self.tokens = least_s, tokens
        self.parts: list[tuple[NDArray[np.intp], Array]] = []

    def add(
        self,
        rows: NDArray[np.intp],
        value: Array,
        memory: Array,
        choice: Choice,
        layers: Array | float = -1.0,
    ) -> None:
        """Seconds per step and peak bytes of some rows under a choice, and the layers it recomputes, -1 for all."""
        self.parts.append((rows, np.array(np.broadcast_arrays(value, memory, layers, *choice))))

    def rows(self, every: bool) -> PricedRows:
        """The fastest choice of every row, infinite where there is none; or every choice of every row."""
        if every and self.parts:
            rows = np.concatenate([part for part, _ in self.parts])
            table = np.concatenate([values for _, values in self.parts], axis=1)
        else:
            rows = np.arange(len(self.least_s))
            table = np.zeros((5, len(rows)))
            table[0], table[2], table[3] = np.inf, -1.0, self.usual
            for which, part in self.parts:
                # By more than rounding: what is as fast comes in the plainer way, which is offered first.
                better = part[0] < table[0, which] * (1 - TIE)
                table[:, which[better]] = part[:, better]
        value, memory, layers, regather, kind = table
        columns = select(self.columns, rows)
        columns |= {"recompute": kind, "regather": regather}
        per_token = value / self.tokens[rows]
        return PricedRows(columns, per_token, memory, layers, self.least_s[rows])
