"""Exact search: branch and bound over the levels of the space, many partial strategies at once.

A partial strategy has a lower bound on the seconds per token and on the memory of everything that can become of it.
What is bounded above the best strategies found, or above the memory of a device, is cut; the rest is completed, the
most promising first. When nothing is left, the best found is the best there is within the cost model: that is the
certificate. The bounds hold because they price the partial strategy with what is still open at its best:

    blocks     tp_x, tp_y, cp, sequences per microbatch, shapes, ep, etp, Ulysses: computation and communication of the
               layers, any group on the best links of the machine, every stage as full as the average
    pipeline   also pp, the schedule and its bubble; nothing of data parallelism, nothing recomputed; memory with
               everything sharded, offloaded and recomputed that may be
    states     also data parallelism and recomputation; any group on the best links of the machine
    order      complete: the price itself

Recomputation is solved inside a complete strategy: of every kind as few layers as make it fit, with gathered inputs
kept or gathered again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import SCHEDULES, Candidates, Machine, ModelNumbers
from hyper_parallel.ir import AXES, Workload
from hyper_parallel.planner._complete import Completer, LevelPrices, select
from hyper_parallel.planner._pricer import FULL, RowPricer
from hyper_parallel.planner._relaxed import link_domains
from hyper_parallel.planner._rows import BLOCKS, TIE, PricedRows, SearchGoal, SearchResult
from hyper_parallel.planner._space import Columns, Space

Array = NDArray[np.float64]

TOO_BIG_KEPT: Final = 2
TOO_BIG_PRICED: Final = 64
SLICES: Final = (768, 1024, 1024, 1024)
"""Partial strategies of each level that are completed at once: many, since a price has a fixed part."""

MOST_ROWS: Final = 2_500_000
"""Prices after which a search ends with what it has; the certificate then tells the gap."""

_PLAIN: Final = tuple(SCHEDULES.index(s) for s in ("gpipe", "1f1b", "interleaved"))

_TUPLE: Final = ("tp_x", "tp_y", "cp", "microbatch")
FREED: Final = ("recompute", "regather")
"""Columns that are solved inside a complete strategy."""
_STATES: Final = ("dp_replicate", "dp_shard", "zero", "offload")
_ALL: Final = tuple(f.name for f in fields(Candidates))


def solve(
    numbers: ModelNumbers,
    machine: Machine,
    workload: Workload,
    space: Space,
    goal: SearchGoal,
) -> SearchResult:
    """The best strategies of a space, proved.

    Args:
        numbers: The model.
        machine: The machine.
        workload: Sequence length and number formats.
        space: What is legal.
        goal: What is searched for.
    """
    return _Search(numbers, machine, workload, space, goal).run()


class _Search:
    """The state of one search: what is still open, the best so far, and counts."""

    def __init__(
        self,
        numbers: ModelNumbers,
        machine: Machine,
        workload: Workload,
        space: Space,
        goal: SearchGoal,
    ) -> None:
        self.space, self.goal = space, goal
        self.pricer = RowPricer(numbers, machine, workload, space, goal)
        self.completer = Completer(self.pricer)
        self.bare = LevelPrices.bare(self.pricer)
        self.rows: list[PricedRows] = []
        self.lost: list[Columns] = []
        self.best: dict[tuple[int, ...], float] = {}
        self.incumbent = np.inf
        self.priced = 0
        self.known: dict[tuple[Any, ...], Any] = {}
        self.meshes = space.meshes()
        self.rows_of: dict[tuple[float, ...], list[int]] = {}
        for row, key in enumerate(zip(*(self.meshes[n] for n in _TUPLE), strict=True)):
            self.rows_of.setdefault(key, []).append(row)

    def run(self) -> SearchResult:
        """Complete partial strategies, the deepest and most promising first, until none is left."""
        levels: tuple[Callable[[Columns, Array], tuple[Columns, Array]], ...] = (
            self._pipelines,
            self._states,
            self._inner_orders,
            self._other_orders,
        )
        last = len(levels) - 1
        open_: list[list[tuple[float, int, Columns, Array]]] = [[] for _ in levels]
        serial = itertools.count()

        def push(level: int, columns: Columns, bound: Array) -> None:
            order = np.argsort(bound, kind="stable")
            for start in range(0, len(order), SLICES[level]):
                which = order[start : start + SLICES[level]]
                part = select(columns, which)
                heapq.heappush(
                    open_[level], (float(bound[which[0]]), next(serial), part, bound[which])
                )

        push(0, *self._blocks())
        while any(open_) and self.pricer.rows < MOST_ROWS:
            # Orders that are seldom of use come when the best is known.
            level = max((i for i in range(last) if open_[i]), default=last)
            _, _, columns, bound = heapq.heappop(open_[level])
            columns, bound = self._within(columns, bound)
            if not len(bound):
                continue
            columns, bound = levels[level](columns, bound)
            if level < last:
                push(level + 1, *self._within(columns, bound))
        left = [waiting[0][0] for waiting in open_ if waiting]
        return self._result(min([self.completer.threshold, *left]))

    def _remembered(self, options: Callable[..., Any], *key: Any) -> Any:
        """Options of a level; many partial strategies share them."""
        known = (options.__name__, *key)
        if known not in self.known:
            self.known[known] = options(*key)
        return self.known[known]

    def _within(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Those that can still be among the best."""
        keep = bound <= self.completer.threshold * (1 + TIE)
        if keep.all():
            return columns, bound
        self.completer.cut["slower by its bound"] += int((~keep).sum())
        return select(columns, keep), bound[keep]

    def _blocks(self) -> tuple[Columns, Array]:
        """Degrees with their blocks, bounded by computation and communication of the layers."""
        rows = np.array(list(self.rows_of), dtype=np.float64).reshape(-1, len(_TUPLE))
        columns: Columns = dict(zip(_TUPLE, rows.T, strict=True))
        if not len(rows):
            return columns, np.empty(0)
        keys = zip(*(columns[n].astype(int).tolist() for n in _TUPLE[:3]), strict=True)
        parts = [self._remembered(self._blocks_of, *key) for key in keys]
        source = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        grown = {n: columns[n][source] for n in _TUPLE}
        grown.update(zip(BLOCKS, np.concatenate(parts).T, strict=True))
        if not len(source):
            return grown, np.empty(0)
        return grown, self.pricer.microbatch_s(grown, self.pricer.relaxed)

    def _blocks_of(self, x: int, y: int, cp: int) -> Array:
        ranks = self.space.limits.num_devices // (x * y * cp)
        options = self.space.blocks(x, y, cp, ranks)
        return np.array(options, dtype=np.float64).reshape(-1, len(BLOCKS))

    def _pipelines(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Blocks with pp and a schedule, bounded by the pipeline; what cannot fit is cut."""
        parts = [
            self._remembered(self._pipelines_of, *key)
            for key in zip(*(columns[n].tolist() for n in _TUPLE), strict=True)
        ]
        source = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        table = np.concatenate(parts)
        grown = {n: c[source] for n, c in columns.items()}
        ranks = table[:, 1] * grown["tp_x"] * grown["tp_y"] * grown["cp"]
        folds = ranks % (grown["ep"] * grown["etp"]) == 0
        grown = select(grown, folds)
        choice = table[folds]
        for index, name in enumerate(("pp", "dp", "accumulation", "schedule", "vpp")):
            grown[name] = choice[:, index]
        # 1F1B fills and drains p - 1 microbatches, interleaved a v-th of that; the others at least nothing.
        plain = np.isin(grown["schedule"], _PLAIN)
        idle = np.where(plain, (grown["pp"] - 1.0) / grown["vpp"], 0.0) / grown["accumulation"]
        grown, _ = self._within(grown, bound[source][folds] * (1.0 + idle))
        if not len(grown["pp"]):
            return grown, np.empty(0)
        grown["dp_replicate"], grown["dp_shard"] = np.ones(len(grown["pp"])), grown["dp"]
        rows, lost = self.completer.complete(grown, self.bare)
        self.lost.append({n: c[:TOO_BIG_PRICED] for n, c in lost.items()})
        columns = {n: c for n, c in rows.columns.items() if n not in FREED}
        least = rows.per_token_s
        return columns, least * (1 - TIE)

    def _pipelines_of(self, *key: float) -> Array:
        """Rows (pp, dp, accumulation, schedule, vpp) of a tuple."""
        rows = []
        for row in self.rows_of[key]:
            pp, dp, steps = (float(self.meshes[n][row]) for n in ("pp", "dp", "accumulation"))
            options = self._remembered(self.space.schedules, int(pp), int(steps))
            rows += [(pp, dp, steps, *option) for option in options]
        return np.array(rows, dtype=np.float64).reshape(-1, 5)

    def _too_big(self) -> PricedRows | None:
        """A few of each batch of what does not fit in any way: the most promising come first."""
        lost = [part for part in self.lost if len(part["pp"])]
        if not lost:
            return None
        columns = {n: np.concatenate([part[n] for part in lost]) for n in lost[0]}
        pricer, usual = self.pricer, self.pricer.regathers[0]
        per_token = pricer.bare_s(columns, (usual, 0)) / pricer.tokens(columns)
        batch = np.repeat(np.arange(len(lost)), [len(part["pp"]) for part in lost])
        order = np.lexsort((per_token, batch))
        place = np.arange(len(order)) - np.searchsorted(batch, batch)
        which = order[place < TOO_BIG_KEPT]
        columns = select(columns, which)
        lean = (pricer.regathers[-1], max(pricer.kinds))
        memory = pricer.lean_bytes(columns, [lean])[0]
        ones, per_token = np.ones(len(which)), per_token[which]
        columns.update(
            zero=3.0 * ones,
            order=0.0 * ones,
            offload=float(self.space.rules.offload) * ones,
            recompute=lean[1] * ones,
            # What is made again gathers its inputs anyway.
            regather=(lean[0] if lean[1] != FULL else usual) * ones,
        )
        return PricedRows(columns, per_token, memory, -ones, per_token)

    def _states(self, columns: Columns, _: Array) -> tuple[Columns, Array]:
        """Pipelines with data parallelism and recomputation, complete but for the order of the axes."""
        inner = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        keys = np.column_stack([columns["dp"], inner, columns["ep"] * columns["etp"]]).astype(int)
        options = [self._remembered(self.space.states, *key) for key in keys.tolist()]
        grown = _grow(columns, options, _STATES)
        kept = self.space.shards(grown["zero"], grown)
        grown = select(grown, kept)
        if not len(grown["pp"]):
            return grown, np.empty(0)
        prices = LevelPrices.of(self.pricer, self.pricer.relaxed)
        rows, lost = self.completer.complete(grown, prices)
        if self.space.rules.offload and "offload" not in self.space.limits.pins:
            # Offload takes time and frees memory: it is of use only where something would have to be recomputed.
            what = rows.columns["recompute"] + rows.columns["regather"]
            freed = what > self.pricer.regathers[0]
            some = {n: np.concatenate([rows.columns[n][freed], c]) for n, c in lost.items()}
            some["offload"] = np.ones(len(some["pp"]))
            rows = PricedRows.join([rows, self.completer.complete(some, prices)[0]])
        columns = {n: c for n, c in rows.columns.items() if n not in (*FREED, "order")}
        return columns, rows.per_token_s * (1 - TIE)

    def _inner_orders(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Complete strategies with tensor parallelism innermost; the rows go on, for the other orders."""
        self._ordered(columns, inner=True)
        return columns, bound

    def _other_orders(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Complete strategies with any other order of the axes."""
        self._ordered(columns, inner=False)
        return columns, bound

    def _ordered(self, columns: Columns, inner: bool) -> None:
        """Price rows under every order of the axes that makes a difference."""
        sizes = link_domains(self.pricer.machine)
        keys = np.column_stack([columns[n] for n in AXES]).astype(int).tolist()
        options = [self._remembered(self.space.orders, tuple(key), sizes, inner) for key in keys]
        grown = _grow(columns, options, ("order",))
        if not len(grown["pp"]):
            return
        prices = LevelPrices.of(self.pricer, self.pricer.machine, every=True)
        rows = self.completer.complete(grown, prices)[0]
        self.priced += len(rows)
        rows = rows.take(rows.per_token_s <= self.completer.threshold * (1 + TIE))
        if self.space.refusal is not None:
            rows = rows.take(np.array([self._runs(row) for row in rows.laid_out()], dtype=bool))
        if len(rows):
            self.rows.append(rows)
            self._lower_threshold(rows)

    def _runs(self, row: tuple[int, ...]) -> bool:
        """Whether this version can run a strategy; counted when it cannot."""
        reason = self._remembered(self.space.refusal_of, *row)
        if reason is not None:
            self.space.ruled_out[reason] += 1
        return reason is None

    def _lower_threshold(self, rows: PricedRows) -> None:
        """What a strategy must beat: the best full price, and the closed forms of as many degrees as are kept."""
        order = np.argsort(rows.per_token_s, kind="stable")
        # Schedules differ most in what their simulation adds: the best row of each is tried.
        schedules = rows.columns["schedule"][order].tolist()
        for schedule in dict.fromkeys(schedules):
            position = int(order[schedules.index(schedule)])
            if rows.per_token_s[position] < self.incumbent * (1 - TIE):
                self.incumbent = min(self.incumbent, self.goal.full_s(rows, position))
        best = rows.take(order[::-1])  # of equal degrees the fastest comes last
        for key, value in dict(zip(best.meshes(), best.per_token_s.tolist(), strict=True)).items():
            self.best[key] = min(value, self.best.get(key, np.inf))
        if len(self.best) >= self.goal.keep:
            kept = heapq.nsmallest(self.goal.keep, self.best.values())[-1]
            most = max(kept, self.incumbent)
            self.completer.threshold = min(self.completer.threshold, most)

    def _result(self, bound: float) -> SearchResult:
        empty = PricedRows({n: np.empty(0) for n in _ALL}, *(np.empty(0) for _ in range(4)))
        return SearchResult(
            PricedRows.join(self.rows) if self.rows else empty,
            self.priced,
            self.completer.cut,
            self._too_big() or empty,
            bound,
            len(self.meshes["pp"]),
        )


def _grow(
    columns: Columns, options: Sequence[Sequence[tuple[int, ...]]], names: Sequence[str]
) -> Columns:
    """Every row once for each of its options."""
    counts = [len(o) for o in options]
    source = np.repeat(np.arange(len(counts)), counts)
    table = np.array(list(itertools.chain(*options)), dtype=np.float64).reshape(-1, len(names))
    return {**{n: c[source] for n, c in columns.items()}, **dict(zip(names, table.T, strict=True))}
