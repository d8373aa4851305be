"""Prices of partial and complete strategies during a search, and the best recomputation of each.

A bound prices a partial strategy without the terms that what is still open may avoid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates, Machine, ModelNumbers, Scores, kept_choices, score
from hyper_parallel.ir import Workload
from hyper_parallel.planner._leaves import TIE, Goal, Leaves
from hyper_parallel.planner._space import Columns, Space
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]
Pricer: TypeAlias = Callable[[Columns, int], Array]

AVOIDABLE: Final = frozenset(
    {
        "data-parallel reduction",
        "gradient norm",
        "optimizer",
        "offload copies",
        "every step",
        "stragglers",
        "gradient accumulation",
        "fsdp communication",
        "host work of axes",
    }
)
"""Terms that data parallelism decides, or that come once per step: left out of bounds before it is chosen."""

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
        kept: Columns that are the same for every strategy of this search.
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
        self.kinds = space.recomputes()
        self.kept = kept_choices(space.limits.base)
        self.threshold = goal.at_most_s_per_token or np.inf
        self.cut: Counter[str] = Counter()
        self.rows = 0

    def price(
        self,
        columns: Mapping[str, Array | float],
        machine: Machine,
        only: Literal["time", "peak"] = "time",
        **fixed: float,
    ) -> Scores:
        """Prices of strategies, some columns of which are the same for all."""
        named = {n: c for n, c in columns.items() if n != "dp" and n not in fixed}
        candidates = Candidates.of_columns(**{**self.kept, **named, **fixed})
        found = score(self.numbers, machine, self.workload, candidates, only)
        self.rows += max(found.step_s.size, found.memory_bytes.size)
        return found

    def microbatch_s(self, columns: Columns, machine: Machine) -> Array:
        """Seconds of one microbatch over all layers on one stage, without data parallelism.

        Priced as a step of very many microbatches, so that nothing is left of what comes once per step.
        """
        fixed = {"pp": 1.0, "dp_shard": 1.0, "dp_replicate": 1.0, "zero": 0.0, "vpp": 1.0}
        scores = self.price(columns, machine, "time", **fixed, accumulation=_MANY, recompute=0.0)
        return unavoidable(scores) / _MANY * (1 - TIE)

    def share(self, columns: Columns) -> Array:
        """Seconds per token for each second of one microbatch over all layers, when all stages are equally full."""
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.space.limits.num_devices * columns["microbatch"] * self.workload.seq_len
        return ranks / tokens

    def tokens(self, columns: Columns) -> Array:
        return (
            columns["microbatch"] * columns["accumulation"] * columns["dp"] * self.workload.seq_len
        )

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
        if 0 in zeros:
            return np.zeros(len(columns["pp"]))
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
        found = self.price(rows, machine, "time", recompute=0.0, zero=2.0, offload=0.0).time
        names = ("fsdp communication", "data-parallel reduction")
        least = sum((t.seconds for t in found if t.name in names), np.zeros(1))
        if 1 in zeros:
            whole = 1.5 * width * (dense / tp + experts / fold) / columns["pp"]
            sums = self.price(rows, machine, "time", recompute=0.0, zero=1.0, offload=0.0).time
            added = next(t.seconds for t in sums if t.name == "gradient accumulation")
            fits = (whole <= self.goal.capacity_bytes) | offload
            least = np.where(fits, np.minimum(least, added), least)
        return least * (1 - TIE)

    def pricers(self, machine: Machine) -> tuple[Pricer, Pricer]:
        """Seconds per step and peak bytes of complete strategies."""

        def seconds(rows: Columns, kind: int) -> Array:
            return self.price(rows, machine, "time", recompute=float(kind)).step_s

        def peak(rows: Columns, kind: int) -> Array:
            return self.price(rows, machine, "peak", recompute=float(kind)).memory_bytes

        return seconds, peak

    def complete(self, columns: Columns, seconds: Pricer, peak: Pricer) -> tuple[Leaves, Columns]:
        """Prices with the best recomputation, of what can be among the best; and what does not fit at all.

        Recomputation is none, or of one kind as few layers of a rank as make it fit: between nothing and everything
        recomputed, time and memory are linear in the layers, which are equal. Memory is cheaper to price than time,
        so what cannot fit goes first.

        Args:
            columns: Strategies.
            seconds: Seconds per step of strategies with one kind of recomputation.
            peak: Peak bytes of them.
        """
        capacity = self.goal.capacity_bytes * (1 + TIE)
        memory = peak(columns, 0)
        plain = (memory <= capacity) & (0 in self.kinds)
        over = np.flatnonzero(~plain)
        large = {n: c[over] for n, c in columns.items()}
        kinds = [k for k in self.kinds if k]
        with_kind = {k: peak(large, k) for k in kinds} if len(over) else {}
        fits = plain.copy()
        for needed_bytes in with_kind.values():
            fits[over] |= needed_bytes <= capacity
        lost = {n: c[~fits] for n, c in columns.items()}
        self.cut["does not fit in memory"] += int((~fits).sum())

        rows = np.flatnonzero(fits)
        columns = {n: c[rows] for n, c in columns.items()}
        if not len(rows):
            empty = np.empty(0)
            return Leaves({**columns, "recompute": empty}, empty, empty, empty, empty), lost
        tokens = self.tokens(columns)
        step = seconds(columns, 0)
        fast = step <= self.threshold * (1 + TIE) * tokens
        self.cut["slower by its bound"] += int((~fast).sum())
        rows, step, tokens = rows[fast], step[fast], tokens[fast]
        columns = {n: c[fast] for n, c in columns.items()}
        used, best = memory[rows], np.where(plain[rows], step, np.inf)
        chosen_kind, recomputed = np.zeros(len(rows)), np.full(len(rows), -1.0)
        # Where each of `rows` stands in `over`, for those that need recomputation.
        needy = np.flatnonzero(~plain[rows])
        where = np.searchsorted(over, rows[needy])
        for kind, bytes_ in with_kind.items():
            least = bytes_[where]
            can = least <= capacity
            if not can.any():
                continue
            mine, least = needy[can], least[can]
            some = {n: c[mine] for n, c in columns.items()}
            layers = np.ceil(self.numbers.layers / some["pp"])
            more, less = seconds(some, kind) - step[mine], memory[rows[mine]] - least
            needed = layers
            if 0 in self.kinds and not self.space.limits.executable:
                with np.errstate(divide="ignore", invalid="ignore"):
                    few = np.ceil((memory[rows[mine]] - capacity) / less * layers - TIE)
                needed = np.where((less > 0) & (few >= 1) & (few < layers), few, layers)
            share = needed / layers
            value = step[mine] + share * more
            better = value < best[mine]
            taken = mine[better]
            best[taken] = value[better]
            used[taken] = (memory[rows[mine]] - share * less)[better]
            chosen_kind[taken] = kind
            recomputed[taken] = np.where(needed < layers, needed, -1.0)[better]
        filled = {**columns, "recompute": chosen_kind}
        return Leaves(filled, best / tokens, used, recomputed, step / tokens), lost


def unavoidable(scores: Scores) -> Array:
    """Seconds per step without the terms of `AVOIDABLE`."""
    some = (t.seconds for t in scores.time if t.name not in AVOIDABLE)
    return sum(some, np.zeros(1))
