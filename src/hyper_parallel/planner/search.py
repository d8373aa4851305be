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

Recomputation is solved inside a strategy: of every kind as few layers as make it fit, with gathered inputs kept or
gathered again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import SCHEDULES, distinct
from hyper_parallel.ir import AXES
from hyper_parallel.planner._complete import Completer
from hyper_parallel.planner.bounds import (
    FREED,
    FULL,
    PRICES,
    TIE,
    Pricer,
    count,
    join,
    link_domains,
    select,
    tuples,
)
from hyper_parallel.planner.strategy_space import BLOCKS, Columns, Space

Array = NDArray[np.float64]

TOO_BIG_KEPT: Final = 2
TOO_BIG_PRICED: Final = 64
SLICE: Final = 768
"""Partial strategies that are completed at once: many, since a price has a fixed part."""
MOST_ROWS: Final = 2_500_000
"""Prices after which a search ends with what it has; the certificate then tells the gap."""

_Waiting: TypeAlias = tuple[float, int, Columns, NDArray[np.intp], Array]
"""Partial strategies by their least bound and a serial number: columns, rows by their bound, and the bounds."""
_PLAIN: Final = tuple(SCHEDULES.index(s) for s in ("gpipe", "1f1b", "interleaved"))
_FIRST: Final = ("tp_x", "tp_y", "cp", "microbatch")
_HELD: Final = ("tp_x", "cp", "microbatch", "ep", "etp")
_PIPELINE: Final = ("pp", "dp", "accumulation", "schedule", "vpp")
_STATES: Final = ("dp_replicate", "dp_shard", "zero")
_LAID_OUT: Final = ("dp_shard", "cp", "tp_x", "tp_y", *BLOCKS)


def closed_form_s(rows: Columns, position: int) -> float:
    """Seconds per token of one row as the search prices it."""
    return float(rows["per_token_s"][position])


class BranchAndBound:
    """The state of one search: what is still open, the best so far, and counts.

    Attributes:
        rows: The complete strategies within the limits, unsorted: all of them whose price is at most `bound`.
        slower: Other complete strategies that were priced; whether this version runs them was not asked.
        bound: Seconds per token that everything that was not completed exceeds.
        legal: Whether there is a legal combination of degrees and microbatch.
        refused: Complete strategies that fit and whose layouts this version cannot run.
        barred: Those of them whose closed form was at most the best price known then.
    """

    def __init__(
        self,
        space: Space,
        keep: int = 1,
        at_most_s_per_token: float | None = None,
        full_s: Callable[[Columns, int], float] = closed_form_s,
    ) -> None:
        """Search for so many strategies of distinct degrees, none slower than the limit.

        `full_s` is the full price of a row, seconds per token, never less than the closed form of the search.
        """
        self.space, self.keep, self.full_s = space, keep, full_s
        self.pricer = Pricer(space)
        self.completer = Completer(self.pricer, at_most_s_per_token or np.inf)
        self.domains = link_domains(self.pricer.machine)
        self.rows = self.slower = self.barred = join([])
        self.refused = 0
        self._found: list[Columns] = []
        self._barred: list[Columns] = []
        self._slower: list[Columns] = []
        self._lost: list[Columns] = []
        self._best: dict[tuple[int, ...], float] = {}
        self._incumbent = np.inf
        self._known: dict[tuple[Any, ...], Array] = {}
        self.meshes = space.meshes()
        self.legal = count(self.meshes) > 0
        # Where tp ranks may be cut as tp_x and tp_y, they may be so in every pipeline.
        self._pipes: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for x, y, *key, pp, dp, steps in tuples(self.meshes, (*_FIRST, *_PIPELINE[:3])):
            self._pipes.setdefault((x * y, *key), {})[pp, dp, steps] = None
        self.bound = self._run()

    def _run(self) -> float:
        """Complete partial strategies, the deepest and most promising first, until none is left."""
        levels = (
            self._pipelines,
            self._states,
            partial(self._ordered, inner=True),
            partial(self._ordered, inner=False),
        )
        last = len(levels) - 1
        open_: list[list[_Waiting]] = [[] for _ in levels]
        serial = itertools.count()

        def wait(level: int, columns: Columns, order: NDArray[np.intp], bound: Array) -> None:
            if len(order):
                waiting = float(bound[0]), next(serial), columns, order, bound
                heapq.heappush(open_[level], waiting)

        def push(level: int, columns: Columns, bound: Array) -> None:
            order = np.argsort(bound, kind="stable")
            wait(level, columns, order, bound[order])

        push(0, *self._blocks())
        while any(open_) and self.pricer.rows < MOST_ROWS:
            # Orders that are seldom of use come when the best is known.
            level = max((i for i in range(last) if open_[i]), default=last)
            _, _, columns, order, bound = heapq.heappop(open_[level])
            fast = self.completer.faster(bound)
            order, bound = order[fast], bound[fast]
            wait(level, columns, order[SLICE:], bound[SLICE:])
            if len(order):
                columns = select(columns, order[:SLICE])
                columns, bound = levels[level](columns, bound[:SLICE])
                if level < last:
                    push(level + 1, columns, bound)
        self.rows, self.slower = join(self._found), join(self._slower)
        self.barred = join(self._barred)
        left = [waiting[0][0] for waiting in open_ if waiting]
        return min([self.completer.threshold, *left])

    def _grow(
        self,
        columns: Columns,
        names: Sequence[str],
        options: Callable[..., Sequence[Any]],
        *keys: Array,
    ) -> Columns:
        """Every row once for each of the options of its key; many rows share them."""
        first, index = distinct(keys)
        parts = []
        for values in np.column_stack(keys)[first].astype(int).tolist():
            known = (options, *values)
            if known not in self._known:
                found = np.array(options(*values), dtype=np.float64)
                self._known[known] = found.reshape(-1, len(names))
            parts.append(self._known[known])
        offered, source = _repeated(names, parts, index)
        return {**select(columns, source), **offered}

    def _blocks(self) -> tuple[Columns, Array]:
        """Degrees with their blocks, bounded by computation and communication of the layers."""
        first, _ = distinct([self.meshes[n] for n in _FIRST])
        columns = {n: self.meshes[n][np.sort(first)] for n in _FIRST}
        inner = [columns[n] for n in _FIRST[:3]]
        ranks = self.space.request.num_devices // np.prod(inner, axis=0)
        grown = self._grow(columns, BLOCKS, self.space.blocks, *inner, ranks)
        return grown, self.pricer.microbatch_s(grown) if count(grown) else np.empty(0)

    def _pipelines(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Blocks with pp and a schedule, bounded by the pipeline; what cannot fit is cut.

        Many blocks are the same to memory, so what fits is known before rows are made of what does not.
        """
        tp = columns["tp_x"] * columns["tp_y"]
        keys = dict(zip(_HELD, (tp, *(columns[n] for n in _HELD[1:])), strict=True))
        first, index = distinct([*keys.values()])
        names = (*_PIPELINE, "filled", "fits")
        offered, source = _repeated(names, self._pipelines_of(select(keys, first)), index)
        bound = bound[source] * offered.pop("filled")
        fast, fits = self.completer.faster(bound), offered.pop("fits") > 0.0
        offered |= {"dp_replicate": np.ones(len(bound)), "dp_shard": offered["dp"]}
        lost, kept = np.flatnonzero(fast & ~fits), np.flatnonzero(fast & fits)
        self.completer.cut["does not fit in memory"] += len(lost)
        lost = lost[:TOO_BIG_PRICED]
        self._lost.append({**select(columns, source[lost]), **select(offered, lost)})
        columns = self.pricer.price_blocks(columns)
        rows = self.completer.complete({**select(columns, source[kept]), **select(offered, kept)})
        return _without(rows, *PRICES, *FREED), rows["per_token_s"] * (1 - TIE)

    def _pipelines_of(self, columns: Columns) -> list[Array]:
        """Pipelines of rows of `_HELD`, tp_x all of tp: `_PIPELINE`, what filling multiplies a step by, what fits."""
        keys = tuples(columns, _HELD)
        new = [row for row, key in enumerate(keys) if key not in self._known]
        if new:
            kinds = select(columns, np.array(new))
            kinds |= {"kind": np.arange(float(len(new))), "tp_y": np.ones(len(new))}
            grown = self._grow(kinds, _PIPELINE, self._schedules, *(kinds[n] for n in _HELD[:3]))
            ranks = grown["dp"] * grown["tp_x"] * grown["cp"]
            grown = select(grown, ranks % (grown["ep"] * grown["etp"]) == 0)
            # 1F1B fills and drains p - 1 microbatches, interleaved a v-th of that; the others at least nothing.
            plain = np.isin(grown["schedule"], _PLAIN)
            idle = np.where(plain, (grown["pp"] - 1.0) / grown["vpp"], 0.0) / grown["accumulation"]
            # What is held grows with the padding of sequences, which is least where all of cp exchanges heads.
            grown |= {"dp_shard": grown["dp"], "cp_ulysses": grown["cp"]}
            _, fits = self.completer.fit(_without(grown, "kind"))
            table = np.column_stack([*(grown[n] for n in _PIPELINE), 1.0 + idle, fits])
            ends = np.searchsorted(grown["kind"], np.arange(1, len(new)))
            for row, part in zip(new, np.split(table, ends), strict=True):
                self._known[keys[row]] = part
        return [self._known[key] for key in keys]

    def _schedules(self, *key: int) -> list[tuple[int, ...]]:
        """Rows of `_PIPELINE` for tp, cp and sequences per microbatch."""
        rows = self._pipes[key]
        return [(*row, *way) for row in rows for way in self.space.schedules(row[0], row[2])]

    def _states(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Pipelines with data parallelism and recomputation, complete but for the order of the axes."""
        inner = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        keys = (columns["pp"], columns["dp"], inner, columns["ep"] * columns["etp"])
        grown = self._grow(columns, _STATES, self.space.states, *keys)
        grown = select(grown, self.space.shards(grown))
        if not count(grown):
            return grown, np.empty(0)
        rows = self.completer.complete(grown)
        return _without(rows, *PRICES, *FREED), rows["per_token_s"] * (1 - TIE)

    def _ordered(self, columns: Columns, bound: Array, inner: bool) -> tuple[Columns, Array]:
        """Complete strategies under the orders of the axes that make a difference; the rows go on, for the others."""
        keys = (*(columns[n] for n in AXES), np.full(len(bound), float(inner)))
        grown = self._grow(_without(columns, "block"), ("order",), self._orders_of, *keys)
        if count(grown):
            self._take(self.completer.complete(grown))
        return columns, bound

    def _orders_of(self, *key: int) -> list[int]:
        return self.space.orders(key[:-1], self.domains, bool(key[-1]))

    def runs(self, rows: Columns, position: int) -> bool:
        """Whether this version can run a strategy; counted when it cannot."""
        reason = self.refusal(rows, position)
        if reason is not None:
            self.space.refused(reason)
            self.refused += 1
        return reason is None

    def refusal(self, rows: Columns, position: int) -> str | None:
        """Return why this version cannot run a strategy; None if it can."""
        degrees = (int(rows[name][position]) for name in _LAID_OUT)
        return self.space.refusal_of(*degrees, pp=int(rows["pp"][position]))

    def _take(self, rows: Columns) -> None:
        """Keep what runs and can be among the best, fastest first; each lowers what the others must beat.

        That is the best full price, and the closed forms of as many degrees as are kept.
        """
        value, degrees = rows["per_token_s"].tolist(), tuples(rows)
        order = sorted(range(len(value)), key=value.__getitem__)
        kept, barred, tried = [], [], set()
        while order and value[order[0]] <= self.completer.threshold * (1 + TIE):
            position = order.pop(0)
            if not self.runs(rows, position):
                barred.append(position)
                continue
            kept.append(position)
            better = value[position] < self._best.get(degrees[position], np.inf)
            if better:
                self._best[degrees[position]] = value[position]
            # Schedules differ most in what their simulation adds: the best row of each is tried.
            first = rows["schedule"][position] not in tried
            tried.add(rows["schedule"][position])
            if first and value[position] < self._incumbent * (1 - TIE):
                self._incumbent = min(self._incumbent, self.full_s(rows, position))
            if (better or first) and len(self._best) >= self.keep:
                most = heapq.nsmallest(self.keep, self._best.values())[-1]
                most = max(most, self._incumbent)
                self.completer.threshold = min(self.completer.threshold, most)
        self._found.append(select(rows, np.array(kept, dtype=np.intp)))
        self._slower.append(select(rows, np.array(order, dtype=np.intp)))
        if barred:
            self._barred.append(select(rows, np.array(barred, dtype=np.intp)))

    def too_big(self) -> Columns:
        """Of what does not fit in any way a few of each batch that would be fastest, as lean as they get."""
        batch = np.repeat(np.arange(len(self._lost)), [count(part) for part in self._lost])
        if not len(batch):
            return join([])
        columns, pricer = join(self._lost), self.pricer
        per_token = pricer.seconds(columns, pricer.usual) / pricer.tokens(columns)
        place = np.arange(len(batch)) - np.searchsorted(batch, batch)
        which = np.lexsort((per_token, batch))[place < TOO_BIG_KEPT]
        columns = select(columns, which)
        offload, regather, kind = pricer.choices[-1]
        # What is made again gathers its inputs anyway.
        regather = regather if kind != FULL else pricer.usual[1]
        chosen = {
            "zero": pricer.leanest[0],
            "order": self.space.request.pins.get("order", 0),
            "offload": offload,
            "recompute": kind,
            "regather": regather,
        }
        memory = pricer.peak(columns)[-1]
        columns |= {n: np.full(len(which), float(v)) for n, v in chosen.items()}
        return columns | dict(
            zip(PRICES, (per_token[which], memory, -np.ones(len(which))), strict=True)
        )


def _repeated(
    names: Sequence[str], parts: Sequence[Array], index: NDArray[np.intp]
) -> tuple[Columns, NDArray[np.intp]]:
    """For every row all of the part that its index names, as columns, and the row that each of them is for."""
    sizes = np.array([len(part) for part in parts], dtype=np.intp)
    counts, starts = sizes[index], np.cumsum(sizes) - sizes
    source = np.repeat(np.arange(len(index)), counts)
    # A part lies together, and what a row has of it is counted from its start.
    before = np.cumsum(counts) - counts
    place = np.arange(len(source)) + (starts[index] - before)[source]
    table = np.concatenate([np.empty((0, len(names))), *parts])[place]
    return dict(zip(names, table.T, strict=True)), source


def _without(rows: Columns, *names: str) -> Columns:
    return {name: column for name, column in rows.items() if name not in names}
