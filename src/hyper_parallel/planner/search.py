"""Exact search: vectorized branch and bound over the levels of the strategy space.

The search tree has one level per group of choices. A node is a partial strategy, stored as a row of a table with the
columns of `cost.Candidates`; a completion adds the missing columns. A node has lower bounds on the seconds per token
and on the memory of all its completions. A bound above the best strategies so far, or above the memory of a device,
prunes the node. The deepest nodes are expanded first, by ascending bound. When no node is open, the best strategy is
optimal within the cost model (the certificate), because the bounds assume the best value of every missing column.
Each level adds columns to a strategy, and costs to its bounds:

    blocks     columns tp_x, tp_y, cp, microbatch and those of `strategy_space.BLOCKS`. The time bound covers
               computation and communication of the layers, with all groups on the best links and equally full stages
    pipeline   columns pp, dp, accumulation, schedule and vpp. The time bound adds the bubble, and the choice (see
               below) that the memory bound requires; the memory bound assumes the most sharding that is allowed
    states     columns dp_replicate, dp_shard and zero. The time bound adds data-parallel communication, on best links
    order      column order. The time is exact without overlap inside of layers, and a bound with overlap
    overlap    the columns of overlap, which complete the strategy. The time is exact

The bound of overlap hides communication behind all computation of a layer, except for the first and last chunk.

A choice (`bounds.Choice`) is a way to free memory: recomputation, re-gathering of inputs, or offload. Choices are not a
level of the tree: the fastest choice that fits is computed per strategy, with as few recomputed layers as possible. To
price a row is to predict its time and memory. The closed form is the predicted time without a simulation of the
pipeline schedule.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import SCHEDULES, distinct, memory_key
from hyper_parallel.ir import AXES, Overlap
from hyper_parallel.planner.bounds import (
    FREED,
    FULL,
    PRICES,
    TIE,
    Array,
    Choice,
    Pricer,
    count,
    join,
    link_domains,
    select,
    tuples,
)
from hyper_parallel.planner.strategy_space import (
    BLOCKS,
    OVERLAP_COLUMNS,
    OVERLAP_KEY,
    Columns,
    Space,
)


class PeakBytes:
    """Cache of peak bytes and recomputed layers by kind: rows of one kind have equal memory, see `cost.memory_key`.

    A kind is an integer. Memory depends on few columns, so there are far fewer kinds than rows.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._numbers: dict[bytes, int] = {}
        self._bytes = np.empty((len(pricer.choices), 0))
        self._min_layers: dict[Choice, Array] = {}

    def kinds(self, columns: Columns) -> NDArray[np.intp]:
        """Return the kind of every row; compute the peak bytes of new kinds."""
        request, numbers = self.pricer.request, self._numbers
        key = memory_key(columns, request.workload.seq_len, request.numbers.uncut.stream > 0.0)
        first, index = distinct(key)
        table = np.column_stack(key)[first]
        known, raw, width = len(numbers), table.tobytes(), table.itemsize * len(key)
        entries = (raw[start : start + width] for start in range(0, len(raw), width))
        kind_list = [numbers.setdefault(entry, len(numbers)) for entry in entries]
        kinds = np.array(kind_list, dtype=np.intp)
        new = first[kinds >= known]
        if len(new):
            self._bytes = _with_capacity(self._bytes, len(numbers))
            self._bytes[:, known : len(numbers)] = self.pricer.peak(select(columns, new))
        return kinds[index]

    def bytes(self, kinds: NDArray[np.intp]) -> Array:
        """Return lower bounds of the peak bytes, [choices, rows], for a result of the method `kinds`."""
        return self._bytes[:, kinds]

    def min_recompute_layers(self, columns: Columns, kinds: NDArray[np.intp], choice: Choice) -> tuple[Array, Array]:
        """Return (layers, peak bytes) per row, as `Pricer.min_recompute_layers`."""
        known = _with_capacity(self._min_layers.get(choice, np.empty((2, 0))), len(self._numbers))
        self._min_layers[choice] = known
        unique_kinds, first = np.unique(kinds, return_index=True)
        new = np.isnan(known[0, unique_kinds])
        if new.any():
            rows = select(columns, first[new])
            known[:, unique_kinds[new]] = self.pricer.min_recompute_layers(rows, choice)
        layers, peaks = known[:, kinds]
        return layers, peaks


def _with_capacity(table: Array, columns: int) -> Array:
    """Return `table` extended to at least `columns` columns, at least doubled if extended; new entries are NaN."""
    if table.shape[1] >= columns:
        return table
    extended = np.full((len(table), max(columns, 2 * table.shape[1])), np.nan)
    extended[:, : table.shape[1]] = table
    return extended


class _ChoiceSeconds:
    """Cache of the seconds per step of some rows under each choice."""

    def __init__(self, pricer: Pricer, columns: Columns, fastest_s: Array) -> None:
        self.pricer, self.columns, self._num_rows = pricer, columns, len(fastest_s)
        self._known: dict[Choice, Array] = {pricer.fastest_choice: fastest_s}

    def seconds(self, indices: NDArray[np.intp], choice: Choice) -> Array:
        """Return the seconds per step of the rows `indices` under a choice.

        Full recomputation re-gathers inputs in any case, so `regather` is then ignored.
        """
        offload, regather, kind = choice
        regather = self.pricer.fastest_choice[1] if kind == FULL else regather
        choice = (offload, regather, kind)
        values = self._known.setdefault(choice, np.full(self._num_rows, np.nan))
        new = indices[np.isnan(values[indices])]
        values[new] = self.pricer.seconds(select(self.columns, new), choice)
        return values[indices]


class Completer:
    """Solver that finds the fastest choice for every row, and prunes rows that do not fit or are too slow.

    Attributes:
        pricer: Predictor of time and memory of rows.
        peaks: Cache of the peak bytes of rows.
        threshold: Seconds per token above which rows are pruned; the search lowers it.
        cut: Number of pruned rows, by reason.
        priced: Number of priced complete strategies; a strategy counts once per priced choice.
        least_bytes: Least peak bytes among all rows that do not fit; infinity if all fit.
    """

    def __init__(self, pricer: Pricer, threshold: float) -> None:
        self.pricer, self.threshold, self.peaks = pricer, threshold, PeakBytes(pricer)
        self.cut: Counter[str] = Counter()
        self.priced, self.least_bytes = 0, np.inf

    def faster(self, per_token_s: Array) -> NDArray[np.bool_]:
        """Return the mask of rows within the threshold; count the other rows as pruned."""
        fast: NDArray[np.bool_] = per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~fast).sum())
        return fast

    def fit(self, columns: Columns) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the kind of every row (see `PeakBytes`), and the mask of rows that fit in memory under some choice."""
        kinds = self.peaks.kinds(columns)
        peaks = self.peaks.bytes(kinds)[self.pricer.selectable]
        fits: NDArray[np.bool_] = (peaks <= self.pricer.capacity).any(axis=0)
        self.least_bytes = min(self.least_bytes, peaks[:, ~fits].min(initial=np.inf))
        return kinds, fits

    def complete(self, columns: Columns) -> Columns:
        """Return the rows that fit and are within the threshold, with the columns `PRICES` and `FREED` added.

        A partial strategy becomes one row, with its fastest choice. A complete strategy becomes a row per choice,
        because simulation decides among them. Choices after one that adds no time are omitted.

        Recomputation covers the smallest number of layers per rank that fits, unless recomputation is pinned: then it
        covers all layers. Layers are priced as equal, so time and the bytes of every phase are linear in this number.
        With offload, the memory plan decides about partial recomputation, and its time is part of the term of offload
        copies.
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
            improvable &= cut_by_tp | (regather == pricer.fastest_choice[1])
            indices = np.flatnonzero(improvable)
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
        """Return the result of `complete`; `options` has (row indices, [columns, rows] values) per choice."""
        indices = np.concatenate([np.empty(0, dtype=np.intp), *(rows for rows, _ in options)])
        table = np.concatenate([np.empty((6, 0)), *(values for _, values in options)], axis=1)
        if "order" in columns:
            self.priced += len(indices)
        else:
            # Among equally fast options, up to rounding, the simplest wins: it comes first.
            place = np.repeat(np.arange(len(options)), [len(rows) for rows, _ in options])
            fastest = np.lexsort((table[0] * (1 + TIE * place), indices))
            fastest = fastest[np.diff(indices[fastest], prepend=-1) > 0]
            indices, table = indices[fastest], table[:, fastest]
        rows = select(columns, indices)
        table[0] /= self.pricer.tokens(rows)
        rows |= dict(zip((*PRICES, *FREED), table, strict=True))
        return select(rows, self.faster(table[0]))


MISSES_PER_BATCH: Final = 2
"""Maximum number of strategies that `closest_misses` returns per batch of rows pruned for memory."""
MAX_MISSES: Final = 64
"""Maximum number of strategies that are recorded per batch of rows pruned for memory."""
SLICE: Final = 768
"""Maximum number of nodes expanded per vectorized call; many, because each call has a fixed cost."""
MOST_ROWS: Final = 2_500_000
"""Number of priced rows at which a search stops; the certificate then states the gap."""

_OpenNode: TypeAlias = tuple[float, int, Columns, NDArray[np.intp], Array]
"""Entry of a queue of nodes: (least bound, serial number, columns, row indices sorted by bound, sorted bounds)."""
_BUBBLE_SCHEDULES: Final = tuple(SCHEDULES.index(s) for s in ("gpipe", "1f1b", "interleaved"))
_MESH_COLUMNS: Final = ("tp_x", "tp_y", "cp", "microbatch")
_MEMORY_COLUMNS: Final = ("tp_x", "cp", "microbatch", "ep", "etp")
_PIPELINE_COLUMNS: Final = ("pp", "dp", "accumulation", "schedule", "vpp")
_STATE_COLUMNS: Final = ("dp_replicate", "dp_shard", "zero")
_LAYOUT_COLUMNS: Final = ("dp_shard", "cp", "tp_x", "tp_y", *BLOCKS)


def closed_form_s(rows: Columns, position: int) -> float:
    """Return the closed-form seconds per token of the row at `position`."""
    return float(rows["per_token_s"][position])


class BranchAndBound:
    """Branch-and-bound search, which the constructor runs.

    Attributes:
        rows: Complete strategies that this version can run and that were within the threshold when found, unsorted.
        slower: Other priced complete strategies, including some that this version cannot run.
        bound: Lower bound of the seconds per token of all strategies outside `rows` that this version can run.
        legal: Whether a legal combination of degrees and microbatch exists.
        num_refused: Number of complete strategies that fit but for which `is_executable` returned False.
        barred: Strategies that this version cannot run, but that were within the threshold when found.
    """

    def __init__(
        self,
        space: Space,
        keep: int = 1,
        max_s_per_token: float | None = None,
        full_s: Callable[[Columns, int], float] = closed_form_s,
    ) -> None:
        """Search for the best strategies.

        Args:
            space: Space of strategies.
            keep: Number of best strategies to find; no two have the same degrees.
            max_s_per_token: Maximum seconds per token; None: no maximum.
            full_s: Function from rows and the index of one row to its seconds per token with the simulated schedule;
                at least the closed form.
        """
        self.space, self.keep, self.full_s = space, keep, full_s
        self.pricer = Pricer(space)
        self.completer = Completer(self.pricer, np.inf if max_s_per_token is None else max_s_per_token)
        self.domains = link_domains(self.pricer.machine)
        self._is_plain = Overlap() in space.overlaps
        self.rows = self.slower = self.barred = join([])
        self.num_refused = 0
        self._completed: list[Columns] = []
        self._barred: list[Columns] = []
        self._slower: list[Columns] = []
        self._misses: list[Columns] = []
        self._best: dict[tuple[int, ...], float] = {}
        self._incumbent = np.inf
        self._cache: dict[tuple[Any, ...], Array] = {}
        self.meshes = space.meshes()
        self.legal = count(self.meshes) > 0
        # Every legal split of tp into tp_x and tp_y is legal in every pipeline.
        self._pipelines_of_mesh: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for x, y, *key, pp, dp, steps in tuples(self.meshes, (*_MESH_COLUMNS, *_PIPELINE_COLUMNS[:3])):
            self._pipelines_of_mesh.setdefault((x * y, *key), {})[pp, dp, steps] = None
        self.bound = self._run()

    def _run(self) -> float:
        """Expand nodes until none is open or `MOST_ROWS` rows are priced; return the attribute `bound`.

        Deeper levels are expanded first, except the last level. Within a level, nodes are expanded by ascending bound.
        """
        levels = (
            self._pipelines,
            self._states,
            partial(self._with_orders, inner=True),
            partial(self._with_orders, inner=False),
        )
        last = len(levels) - 1
        queues: list[list[_OpenNode]] = [[] for _ in levels]
        serial = itertools.count()

        def enqueue(level: int, columns: Columns, order: NDArray[np.intp], bound: Array) -> None:
            if len(order):
                node = float(bound[0]), next(serial), columns, order, bound
                heapq.heappush(queues[level], node)

        def push(level: int, columns: Columns, bound: Array) -> None:
            order = np.argsort(bound, kind="stable")
            enqueue(level, columns, order, bound[order])

        push(0, *self._blocks())
        while any(queues) and self.pricer.rows < MOST_ROWS:
            # The last level has orders that are rarely the fastest.
            level = max((i for i in range(last) if queues[i]), default=last)
            _, _, columns, order, bound = heapq.heappop(queues[level])
            fast = self.completer.faster(bound)
            order, bound = order[fast], bound[fast]
            enqueue(level, columns, order[SLICE:], bound[SLICE:])
            if len(order):
                columns = select(columns, order[:SLICE])
                columns, bound = levels[level](columns, bound[:SLICE])
                if level < last:
                    push(level + 1, columns, bound)
        self.rows, self.slower = join(self._completed), join(self._slower)
        self.barred = join(self._barred)
        open_bounds = [node[0][0] for node in queues if node]
        return min([self.completer.threshold, *open_bounds])

    def _expand(
        self,
        columns: Columns,
        names: Sequence[str],
        options: Callable[..., Sequence[Any]],
        *keys: Array,
    ) -> Columns:
        """Return the rows with columns `names` added: one new row per option of each row.

        `options` is a function from one row of the columns `keys` to its options: tuples of values for `names`.
        """
        first, index = distinct(keys)
        parts = []
        for values in np.column_stack(keys)[first].astype(int).tolist():
            cache_key = (options, *values)
            if cache_key not in self._cache:
                table = np.array(options(*values), dtype=np.float64)
                self._cache[cache_key] = table.reshape(-1, len(names))
            parts.append(self._cache[cache_key])
        added, source = _expand_rows(names, parts, index)
        return {**select(columns, source), **added}

    def _blocks(self) -> tuple[Columns, Array]:
        first, _ = distinct([self.meshes[n] for n in _MESH_COLUMNS])
        columns = {n: self.meshes[n][np.sort(first)] for n in _MESH_COLUMNS}
        inner = [columns[n] for n in _MESH_COLUMNS[:3]]
        ranks = self.space.request.num_devices // np.prod(inner, axis=0)
        expanded = self._expand(columns, BLOCKS, self.space.blocks, *inner, ranks)
        return expanded, self.pricer.microbatch_s(expanded) if count(expanded) else np.empty(0)

    def _pipelines(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        """Return the rows expanded to the level `pipeline`, and their bounds, without rows that are pruned.

        Many rows need the same memory, so memory is checked before the expanded rows are built.
        """
        tp = columns["tp_x"] * columns["tp_y"]
        keys = {"tp_x": tp} | {n: columns[n] for n in _MEMORY_COLUMNS[1:]}
        first, index = distinct([*keys.values()])
        names = (*_PIPELINE_COLUMNS, "filled", "fits")
        added, source = _expand_rows(names, self._pipelines_of(select(keys, first)), index)
        bound = bound[source] * added.pop("filled")
        fast, fits = self.completer.faster(bound), added.pop("fits") > 0.0
        added |= {"dp_replicate": np.ones(len(bound)), "dp_shard": added["dp"]}
        misses, accepted = np.flatnonzero(fast & ~fits), np.flatnonzero(fast & fits)
        self.completer.cut["does not fit in memory"] += len(misses)
        misses = misses[:MAX_MISSES]
        self._misses.append(select(columns, source[misses]) | select(added, misses))
        columns = self.pricer.price_blocks(columns)
        rows = self.completer.complete(select(columns, source[accepted]) | select(added, accepted))
        return _drop_columns(rows, *PRICES, *FREED), rows["per_token_s"] * (1 - TIE)

    def _pipelines_of(self, columns: Columns) -> list[Array]:
        """Return, per row of the columns `_MEMORY_COLUMNS`, a table of its legal pipelines.

        The column `tp_x` of `columns` is tp_x * tp_y. The table has the columns `_PIPELINE_COLUMNS`, a lower bound of
        the factor on the step time for pipeline fill, and whether the pipeline can fit in memory.
        """
        keys = tuples(columns, _MEMORY_COLUMNS)
        new = [row for row, key in enumerate(keys) if key not in self._cache]
        if new:
            kinds = select(columns, np.array(new))
            kinds |= {"kind": np.arange(float(len(new))), "tp_y": np.ones(len(new))}
            key = [kinds[n] for n in _MEMORY_COLUMNS[:3]]
            expanded = self._expand(kinds, _PIPELINE_COLUMNS, self._schedules, *key)
            ranks = expanded["dp"] * expanded["tp_x"] * expanded["cp"]
            expanded = select(expanded, ranks % (expanded["ep"] * expanded["etp"]) == 0)
            # GPipe and 1F1B fill and drain p - 1 microbatches, interleaved 1/v of that; for others the bound is 0.
            plain = np.isin(expanded["schedule"], _BUBBLE_SCHEDULES)
            idle = np.where(plain, (expanded["pp"] - 1.0) / expanded["vpp"], 0.0)
            idle = idle / expanded["accumulation"]
            # Memory grows with the padding of sequences, which is least if all ranks of cp exchange heads.
            expanded |= {"dp_shard": expanded["dp"], "cp_ulysses": expanded["cp"]}
            _, fits = self.completer.fit(_drop_columns(expanded, "kind"))
            table = np.column_stack([*(expanded[n] for n in _PIPELINE_COLUMNS), 1.0 + idle, fits])
            ends = np.searchsorted(expanded["kind"], np.arange(1, len(new)))
            for row, part in zip(new, np.split(table, ends), strict=True):
                self._cache[keys[row]] = part
        return [self._cache[key] for key in keys]

    def _schedules(self, *key: int) -> list[tuple[int, ...]]:
        rows = self._pipelines_of_mesh[key]
        return [(*row, *schedule) for row in rows for schedule in self.space.schedules(row[0], row[2])]

    def _states(self, columns: Columns, bound: Array) -> tuple[Columns, Array]:
        inner = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        keys = (columns["pp"], columns["dp"], inner, columns["ep"] * columns["etp"])
        expanded = self._expand(columns, _STATE_COLUMNS, self.space.states, *keys)
        expanded = select(expanded, self.space.distinct_zero(expanded))
        if not count(expanded):
            return expanded, np.empty(0)
        rows = self.completer.complete(expanded)
        return _drop_columns(rows, *PRICES, *FREED), rows["per_token_s"] * (1 - TIE)

    def _with_orders(self, columns: Columns, bound: Array, inner: bool) -> tuple[Columns, Array]:
        """Record the complete strategies of rows with every order and overlap; return rows and bounds unchanged.

        Orders with tensor parallelism innermost (`inner`) are a level of their own. The next level expands the same
        rows by the other orders, which are rarely faster.
        """
        keys = (*(columns[n] for n in AXES), np.full(len(bound), float(inner)))
        expanded = self._expand(_drop_columns(columns, "block"), ("order",), self._orders_of, *keys)
        if self._is_plain:
            self._complete(expanded | dict.fromkeys(OVERLAP_COLUMNS, np.ones(count(expanded))))
        if self.space.overlaps != (Overlap(),):
            # Rows without overlap were priced first, which lowered the threshold: most rows are now pruned.
            seconds = self.pricer.seconds(expanded, self.pricer.fastest_choice)
            per_token_s = seconds / self.pricer.tokens(expanded)
            fast = select(expanded, self.completer.faster(per_token_s))
            key = [fast[n] for n in OVERLAP_KEY]
            self._complete(self._expand(fast, OVERLAP_COLUMNS, self._overlaps_of, *key))
        return columns, bound

    def _complete(self, rows: Columns) -> None:
        if count(rows):
            self._record(self.completer.complete(rows))

    def _overlaps_of(self, *key: int) -> list[tuple[int, int, int]]:
        """Return the overlaps to try for a row of `OVERLAP_KEY`, without `Overlap()` if it was priced before."""
        return [o for o in self.space.overlaps_of(*key) if not self._is_plain or max(o) > 1]

    def _orders_of(self, *key: int) -> list[int]:
        """Return the orders to try; `key` has the degrees, followed by the argument `inner` of `Space.orders`."""
        return self.space.orders(key[:-1], self.domains, bool(key[-1]))

    def is_executable(self, rows: Columns, position: int) -> bool:
        """Return whether this version can run the strategy in one row; count strategies that it cannot run."""
        degrees = (int(rows[name][position]) for name in _LAYOUT_COLUMNS)
        reason = self.space.refusal_of(*degrees, pp=int(rows["pp"][position]))
        if reason is not None:
            self.space.rule_out(reason)
            self.num_refused += 1
        return reason is None

    def _record(self, rows: Columns) -> None:
        """Record complete strategies, fastest first, and lower the threshold.

        Strategies above the threshold are recorded in `slower`, those that this version cannot run in `barred`. The new
        threshold is the larger of the best time with a simulated schedule, and of the closed form of the `keep`-th best
        strategy with distinct degrees.
        """
        value, degrees = rows["per_token_s"].tolist(), tuples(rows)
        order = sorted(range(len(value)), key=value.__getitem__)
        accepted, barred, priced_schedules = [], [], set()
        while order and value[order[0]] <= self.completer.threshold * (1 + TIE):
            position = order.pop(0)
            if not self.is_executable(rows, position):
                barred.append(position)
                continue
            accepted.append(position)
            better = value[position] < self._best.get(degrees[position], np.inf)
            if better:
                self._best[degrees[position]] = value[position]
            # Simulation adds different amounts to different schedules, so the best row of each is simulated.
            first = rows["schedule"][position] not in priced_schedules
            priced_schedules.add(rows["schedule"][position])
            if first and value[position] < self._incumbent * (1 - TIE):
                self._incumbent = min(self._incumbent, self.full_s(rows, position))
            if (better or first) and len(self._best) >= self.keep:
                limit = heapq.nsmallest(self.keep, self._best.values())[-1]
                limit = max(limit, self._incumbent)
                self.completer.threshold = min(self.completer.threshold, limit)
        self._completed.append(select(rows, np.array(accepted, dtype=np.intp)))
        self._slower.append(select(rows, np.array(order, dtype=np.intp)))
        if barred:
            self._barred.append(select(rows, np.array(barred, dtype=np.intp)))

    def closest_misses(self) -> Columns:
        """Return the `MISSES_PER_BATCH` fastest strategies of each batch of rows that exceed memory under every choice.

        Each row has the choice with the least memory and its peak bytes, but the seconds of the fastest choice.
        """
        batch = np.repeat(np.arange(len(self._misses)), [count(part) for part in self._misses])
        if not len(batch):
            return join([])
        columns, pricer = join(self._misses), self.pricer
        per_token = pricer.seconds(columns, pricer.fastest_choice) / pricer.tokens(columns)
        place = np.arange(len(batch)) - np.searchsorted(batch, batch)
        indices = np.lexsort((per_token, batch))[place < MISSES_PER_BATCH]
        columns = select(columns, indices)
        offload, regather, kind = pricer.choices[-1]
        # Full recomputation re-gathers its inputs in any case.
        regather = regather if kind != FULL else pricer.fastest_choice[1]
        order, zero = self.space.request.pins.get("order", 0), pricer.leanest[0]
        values = (zero, order, offload, regather, kind)
        chosen = dict(zip(("zero", "order", *FREED), values, strict=True))
        prices = (per_token[indices], pricer.peak(columns)[-1], -np.ones(len(indices)))
        columns |= {n: np.full(len(indices), float(v)) for n, v in chosen.items()}
        return columns | dict(zip(PRICES, prices, strict=True))


def _expand_rows(
    names: Sequence[str], parts: Sequence[Array], index: NDArray[np.intp]
) -> tuple[Columns, NDArray[np.intp]]:
    """Return the concatenated tables `parts[i]` for i in `index`, as columns, and per row its position in `index`."""
    sizes = np.array([len(part) for part in parts], dtype=np.intp)
    counts, starts = sizes[index], np.cumsum(sizes) - sizes
    source = np.repeat(np.arange(len(index)), counts)
    # A part is contiguous in the table; `place` counts from the start of the part.
    row_starts = np.cumsum(counts) - counts
    place = np.arange(len(source)) + (starts[index] - row_starts)[source]
    table = np.concatenate([np.empty((0, len(names))), *parts])[place]
    return dict(zip(names, table.T, strict=True)), source


def _drop_columns(rows: Columns, *names: str) -> Columns:
    return {name: column for name, column in rows.items() if name not in names}
