"""Prices of partial and complete strategies during a search, and what each keeps or makes again for backward.

A bound prices a partial strategy without the terms that what is still open may avoid. Memory is freed in two ways:
inputs that were gathered for matmuls are gathered again in backward, and activations are computed again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    Machine,
    ModelNumbers,
    distinct,
    few_layers,
    memory_key,
    offloaded_bytes,
    sharing_seconds,
    step_seconds,
)
from hyper_parallel.ir import Workload
from hyper_parallel.planner._leaves import TIE, Goal, Leaves
from hyper_parallel.planner._space import Columns, Space
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]
Choice: TypeAlias = tuple[int, int]
"""Whether inputs are gathered again, and the kind of recomputation: columns `regather` and `recompute`."""
Seconds: TypeAlias = Callable[[Columns, Choice], Array]
Peak: TypeAlias = Callable[[Columns, Sequence[Choice]], Array]
Few: TypeAlias = Callable[[Columns, Choice], tuple[Array, Array]]
"""As few layers of a rank as have to be recomputed under a choice, and the peak bytes with them."""

FULL: Final = RECOMPUTE.index("full")
_MANY: Final = 1e12


class Completion:
    """Pricing within the limits of one search; counts what it prices and cuts.

    Attributes:
        numbers: The model.
        machine: The machine.
        workload: Sequence length and number formats.
        space: What is legal.
        goal: What is searched for.
        kinds: Kinds of recomputation that may be chosen.
        regathers: Whether inputs may be gathered again; the faster way first.
        threshold: Seconds per token that a strategy must beat.
        cut: Partial strategies that were cut, by reason.
        rows: Rows priced.
    """

    def __init__(
        self,
        numbers: ModelNumbers,
        machine: Machine,
        workload: Workload,
        space: Space,
        goal: Goal,
    ) -> None:
        self.numbers, self.machine, self.workload = numbers, machine, workload
        self.space, self.goal = space, goal
        self.kinds, self.regathers = space.recomputes(), space.regathers()
        stack = machine.stack
        if 0 in self.kinds and stack.flash and stack.selective_kept >= 1.0:
            # Selective recomputation that keeps as much is never of use.
            self.kinds = [k for k in self.kinds if k in (0, FULL)]
        if 0 in self.regathers and not stack.keep_gathered * stack.sequence_parallel:
            self.regathers = [0]
        self.choices = list(itertools.product(self.regathers, sorted({0, *self.kinds})))
        self.threshold = goal.at_most_s_per_token or np.inf
        self.cut: Counter[str] = Counter()
        self.rows = 0

    def candidates(self, columns: Mapping[str, Array | float], **fixed: float) -> Candidates:
        """Strategies to be priced, some columns of which are the same for all."""
        named = {n: c for n, c in columns.items() if n != "dp" and n not in fixed}
        if "zero" in named:
            # As `Candidates.of`: one microbatch's gradients are reduced layer by layer in any case.
            alone = (named["zero"] == 1) & (named["accumulation"] == 1)
            named["zero"] = np.where(alone, 2.0, named["zero"])
        found = Candidates.of_columns(**named, **fixed)
        self.rows += len(found)
        return found

    def microbatch_s(self, columns: Columns, machine: Machine) -> Array:
        """Seconds of one microbatch over all layers on one stage, without data parallelism.

        Priced as a step of very many microbatches, so that nothing is left of what comes once per step.
        """
        fixed = {"pp": 1.0, "dp_shard": 1.0, "dp_replicate": 1.0, "zero": 0.0, "vpp": 1.0}
        fixed |= {"accumulation": _MANY, "recompute": 0.0, "regather": float(self.regathers[0])}
        c = self.candidates(columns, **fixed)
        seconds = step_seconds(self.numbers, machine, self.workload, c, "pace")
        return seconds / _MANY * (1 - TIE)

    def share(self, columns: Columns) -> Array:
        """Seconds per token for each second of one microbatch over all layers, when all stages are equally full."""
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.space.limits.num_devices * columns["microbatch"] * self.workload.seq_len
        return ranks / tokens

    def tokens(self, columns: Columns) -> Array:
        """Tokens of a step."""
        sequences = columns["microbatch"] * columns["accumulation"] * columns["dp"]
        return sequences * self.workload.seq_len

    def sharding_s(self, columns: Columns, machine: Machine) -> Array:
        """Least seconds per step of keeping states and gradients on as few ranks as hold them.

        Either gradients are added up in full (ZeRO 1), where a rank can hold them, or parameters are gathered and
        gradients scattered over at least as many ranks as the states of the whole model need.

        Args:
            columns: Strategies whose states are still open.
            machine: A machine at least as fast as the real one wherever a group lies.
        """
        if not len(columns["pp"]):
            return np.empty(0)
        n, zeros = self.numbers, self.space.zeros()
        width = float(DTYPE_BYTES[self.workload.param_dtype])
        dense = n.layers * (n.attention_weights + n.mlp_weights + n.vector_weights)
        dense, experts = dense + n.embedding_weights + n.head_params, n.layers * n.expert_weights
        tp = columns["tp_x"] * columns["tp_y"]
        inner, fold = tp * columns["cp"], columns["ep"] * columns["etp"]
        # What host memory holds need not be sharded.
        offload = self.space.rules.offload
        states = (0.0 if offload else 4.0) * width * (dense + experts)
        ranks = np.floor(states / self.goal.capacity_bytes / (columns["pp"] * inner))
        shard = np.clip(np.maximum(ranks, np.ceil(fold / inner)), 1.0, columns["dp"])
        rows = {**columns, "dp_shard": shard, "dp_replicate": np.ones(len(shard))}

        def shared(zero: float) -> tuple[Array, Array]:
            c = self.candidates(rows, recompute=0.0, zero=zero, offload=0.0)
            return sharing_seconds(self.numbers, machine, self.workload, c)

        least = shared(2.0)[0]
        whole = width * (dense / tp + experts / fold) / columns["pp"]
        if 1 in zeros:
            fits = (1.5 * whole <= self.goal.capacity_bytes) | offload
            fits &= self.space.shards(1, columns)
            least = np.where(fits, np.minimum(least, shared(1.0)[1]), least)
        if 0 in zeros:
            fits = (4.0 * whole <= self.goal.capacity_bytes) | offload
            least = np.where(fits & self.space.shards(0, columns), 0.0, least)
        return least * (1 - TIE)

    def pricers(self, machine: Machine) -> tuple[Seconds, Peak, Few]:
        """Seconds per step and peak bytes of complete strategies, and the layers that they have to recompute."""

        def seconds(rows: Columns, choice: Choice) -> Array:
            c = self.candidates(rows, regather=float(choice[0]), recompute=float(choice[1]))
            return step_seconds(self.numbers, machine, self.workload, c)

        def peak(rows: Columns, choices: Sequence[Choice]) -> Array:
            return self.peak(rows, machine, choices)

        return seconds, peak, self.few

    def few(self, rows: Columns, choice: Choice, **fixed: float) -> tuple[Array, Array]:
        """See `Few`."""
        c = self.candidates(rows, regather=float(choice[0]), **fixed)
        capacity = self.goal.capacity_bytes * (1 + TIE)
        return few_layers(self.numbers, self.machine, self.workload, c, choice[1], capacity)

    def peak(
        self, rows: Columns, machine: Machine, choices: Sequence[Choice], **fixed: float
    ) -> Array:
        """Peak bytes under every choice, [choices, rows]."""
        c = self.candidates(rows, **fixed)
        return offloaded_bytes(self.numbers, machine, self.workload, c, choices)

    def complete(
        self, columns: Columns, seconds: Seconds, peak: Peak, few: Few, every: bool = False
    ) -> tuple[Leaves, Columns]:
        """Prices with the best way to free memory, of what can be among the best; and what does not fit at all.

        Gathered inputs are kept where that fits, for gathering them again takes longer. Recomputation is none, or of
        one kind as few layers of a rank as make it fit: between nothing and everything recomputed, time and the bytes
        of every phase are linear in the layers, which are equal. Memory is cheaper to price than time, so what cannot
        fit goes first; few of the columns matter to it, so each distinct row is priced once.

        Args:
            columns: Strategies.
            seconds: Seconds per step of strategies under one choice.
            peak: Peak bytes of them under several.
            few: Layers that they have to recompute under one choice.
            every: Prices under every choice that may be the best when simulated, not under the fastest one.
        """
        if not len(columns["pp"]):
            return _none(columns), columns
        given = columns
        capacity = self.goal.capacity_bytes * (1 + TIE)
        first, index = distinct(memory_key(columns))
        table = peak({n: c[first] for n, c in columns.items()}, self.choices)
        held = dict(zip(self.choices, table, strict=True))
        fits = self._fitting(held, self.regathers, capacity)[index]
        lost = {n: c[~fits] for n, c in columns.items()}
        self.cut["does not fit in memory"] += int((~fits).sum())
        columns, index = {n: c[fits] for n, c in columns.items()}, index[fits]
        if not len(index):
            return _none(columns), lost
        usual = self.regathers[0]
        tokens = self.tokens(columns)
        step = seconds(columns, (usual, 0))
        fast = step <= self.threshold * (1 + TIE) * tokens
        self.cut["slower by its bound"] += int((~fast).sum())
        step, tokens, index = step[fast], tokens[fast], index[fast]
        columns = {n: c[fast] for n, c in columns.items()}
        offers = _Offers(columns, usual, step / tokens, tokens)
        plain_fits = np.zeros(len(step), dtype=bool)
        whole: Array = np.full(len(step), np.nan)  # seconds where every layer is recomputed in full
        for regather in self.regathers:
            mine, start = np.arange(len(step)), step
            if regather != usual:
                cut = columns["tp_x"] * columns["tp_y"] > 1.0
                small = self._fitting(held, (regather,), capacity)[index]
                mine = np.flatnonzero(cut & ~plain_fits & small)
                start = seconds({n: c[mine] for n, c in columns.items()}, (regather, 0))
                still = start <= self.threshold * (1 + TIE) * tokens[mine]
                mine, start = mine[still], start[still]
            memory = held[regather, 0][index[mine]]
            plain = (memory <= capacity) & (0 in self.kinds)
            offers.add(mine[plain], start[plain], memory[plain], regather, 0, -1.0)
            plain_fits[mine] |= plain
            for kind in self.kinds:
                least = held[regather, kind][index[mine]]
                can = ~plain & (least <= capacity) & (kind > 0)
                if not can.any():
                    continue
                some = {n: c[mine[can]] for n, c in columns.items()}
                # A layer that is made again in full gathers its inputs anyway.
                known = kind == FULL and regather != usual
                more = whole[mine[can]] if known else seconds(some, (regather, kind))
                if kind == FULL:
                    whole[mine[can]] = more
                more = more - start[can]
                layers = np.ceil(self.numbers.layers / some["pp"])
                needed, used = layers, least[can]
                if 0 in self.kinds:
                    those, which = np.unique(index[mine[can]], return_inverse=True)
                    rows = {n: c[first[those]] for n, c in given.items()}
                    needed, used = (v[which] for v in few(rows, (regather, kind)))
                share = needed / layers
                some_layers = np.where(needed < layers, needed, -1.0)
                value = start[can] + share * more
                offers.add(mine[can], value, used, regather, kind, some_layers)
        return offers.leaves(every), lost

    def _fitting(
        self, held: Mapping[Choice, Array], regathers: Sequence[int], capacity: float
    ) -> NDArray[np.bool_]:
        """Rows that fit under a choice that may be taken."""
        allowed = itertools.product(regathers, self.kinds)
        found: NDArray[np.bool_] = np.any([held[c] <= capacity for c in allowed], axis=0)
        return found


def _none(columns: Columns) -> Leaves:
    empty = np.empty(0)
    return Leaves({**columns, "recompute": empty, "regather": empty}, empty, empty, empty, empty)


class _Offers:
    """Prices of rows under the choices of memory that were tried, the plainer choice first."""

    def __init__(self, columns: Columns, regather: int, least_s: Array, tokens: Array) -> None:
        self.columns, self.usual = columns, regather
        self.least_s, self.tokens = least_s, tokens
        self.parts: list[tuple[NDArray[np.intp], NDArray[np.float64]]] = []

    def add(
        self,
        rows: NDArray[np.intp],
        value: Array,
        memory: Array,
        regather: int,
        kind: int,
        layers: Array | float,
    ) -> None:
        """Seconds per step and peak bytes of some rows under a choice, and the layers it recomputes."""
        columns = (value, memory, np.full(len(rows), layers) if np.isscalar(layers) else layers)
        choice = (np.full(len(rows), float(regather)), np.full(len(rows), float(kind)))
        self.parts.append((rows, np.array([*columns, *choice])))

    def leaves(self, every: bool) -> Leaves:
        """The fastest choice of every row, infinite where there is none; or every choice of every row."""
        rows = np.concatenate([r for r, _ in self.parts])
        table = np.concatenate([t for _, t in self.parts], axis=1)
        if not every:
            best = np.zeros((5, len(self.least_s)))
            best[0], best[2], best[3] = np.inf, -1.0, self.usual
            for which, part in self.parts:
                # By more than rounding: what is as fast comes in the plainer way, which is offered first.
                better = part[0] < best[0, which] * (1 - TIE)
                best[:, which[better]] = part[:, better]
            rows, table = np.arange(len(self.least_s)), best
        value, memory, layers, regather, kind = table
        columns = {n: c[rows] for n, c in self.columns.items()}
        columns |= {"recompute": kind, "regather": regather}
        return Leaves(columns, value / self.tokens[rows], memory, layers, self.least_s[rows])
