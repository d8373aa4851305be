"""Predicted time and memory of complete strategies, and lower bounds of both for partial strategies.

Strategies are rows of a table with the columns of `cost.Candidates`. A partial strategy lacks columns, and its bounds
assume the best value of every missing column. Without an order of the mesh axes, every process group is on the fastest
links of the machine. Without the column `zero`, the bound of time assumes that no states are sharded. The bound of
memory then assumes the allowed ZeRO stage with the least memory.

A choice states whether inputs of matmuls are re-gathered in backward, which activations are recomputed, and whether
bytes that exceed device memory are offloaded to host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    RECOMPUTE,
    BlockPrices,
    Candidates,
    Machine,
    PricingCase,
    min_recompute_layers,
    offloaded_bytes,
    step_seconds,
    with_choices,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner.strategy_space import Columns, Space
from hyper_parallel.topology import Tier

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
Choice: TypeAlias = tuple[int, int, int]
"""Values of the columns `offload`, `regather` and `recompute`, which determine how memory is freed."""

FULL: Final = RECOMPUTE.index("full")
FREED: Final = ("offload", "regather", "recompute")
"""Columns of a `Choice`; `Completer` finds their values for each strategy."""
PRICES: Final = ("per_token_s", "memory_bytes", "layers")
"""Columns of predictions: seconds per token, peak bytes, and layers per rank that `recompute` applies to (-1: all)."""
TIE: Final = 1e-9
"""Relative difference up to which two values count as equal; rounding errors are smaller."""
_MANY_MICROBATCHES: Final = 1e12  # makes costs once per step negligible
_ROWS_IN_CACHE: Final = 2**14
"""Maximum number of rows per pricing call of `Pricer.microbatch_s`; its columns then fit in the processor's cache."""
_DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")


def select(rows: Columns, indices: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    """Return the rows at the given indices, or those for which a mask is True."""
    if indices.dtype == np.bool_:
        indices = np.flatnonzero(indices)  # indexing is faster than masking
    return {name: column[indices] for name, column in rows.items()}


def join(parts: Sequence[Columns]) -> Columns:
    """Return the concatenated rows of several tables; for no tables, an empty table with all columns."""
    if not parts:
        return dict.fromkeys((*Candidates.__slots__, *PRICES), np.empty(0))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def count(rows: Columns) -> int:
    """Return the number of rows."""
    return len(next(iter(rows.values())))


def tuples(rows: Columns, names: Sequence[str] = _DEGREES) -> list[tuple[int, ...]]:
    """Return one tuple of integers per row, with the values of the columns `names`; by default the degrees."""
    table = np.column_stack([rows[name] for name in names]).astype(int)
    return [tuple(row) for row in table.tolist()]


def ranked(rows: Columns) -> NDArray[np.intp]:
    """Return row indices sorted by seconds per token; ties prefer smaller tp, cp, pp, ep, then less memory."""
    value = rows["per_token_s"]
    rounded = np.round(value / value.min() / TIE) if len(value) else value
    plain = [rows[name] for name in sorted(rows) if name not in PRICES]
    keys = (*plain, rows["layers"], rows["memory_bytes"], rows["ep"], rows["pp"], rows["cp"])
    return np.lexsort((*keys, rows["tp_x"] * rows["tp_y"], rounded))


def strategy_at(rows: Columns, position: int, base: Strategy, workload: Workload) -> tuple[Strategy, Workload]:
    """Return the complete strategy in one row, and its resolved workload; arguments as for `Candidates.strategy_at`."""
    row = {n: rows[n][[position]] for n in rows if n in Candidates.__slots__}
    strategy, resolved = Candidates.of_columns(**row).strategy_at(0, base, workload)
    layers = int(rows["layers"][position])
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved


@dataclass(frozen=True, slots=True)
class RelaxedMachine(Machine):
    """Machine with a single tier of links, for lower bounds of communication time.

    The tier is as fast as the fastest real tier, whichever ranks form a process group. A ring sends at the lowest rate
    of the tiers that it crosses, so the fastest rate gives a lower bound of its time. An all-to-all uses the links of
    several tiers at once. It sends a token at most once to a domain, even if the token has several receivers there. A
    domain is a set of devices connected by one tier, such as a node.
    """

    exchange_gain: float = 1.0  # total bandwidth of all sets of links / that of the fastest set
    first_size: int = 1  # devices in the innermost domain; 1 if their number is unlimited
    domain_size: float = np.inf  # devices in the innermost domain with separate links to the outside
    outside_bytes_s: float = np.inf  # total bandwidth of the links outside of that domain

    @classmethod
    def relax(cls, machine: Machine) -> RelaxedMachine:
        """Return the relaxed form of a machine: all ranks on its fastest links, with its least latency."""
        sets: list[float] = []
        for tier in machine.tiers:
            bandwidth = tier.bytes_s.value * machine.link_share(tier)
            if tier.shares_links and sets:
                sets[-1] = max(sets[-1], bandwidth)
            else:
                sets.append(bandwidth)
        first, latency = machine.tiers[0], min(t.latency_s.value for t in machine.tiers)
        rate = replace(first.bytes_s, value=max(sets) / machine.link_share(first))
        least_latency = replace(first.latency_s, value=latency)
        relaxed_tier = Tier("relaxed", 0, rate, least_latency, "full_mesh")
        domains = link_domains(machine)
        return cls(
            **{name: getattr(machine, name) for name in Machine.__slots__} | {"tiers": (relaxed_tier,)},
            exchange_gain=sum(sets) / max(sets),
            first_size=first.size or 1,
            domain_size=float(domains[0]) if domains else np.inf,
            outside_bytes_s=sum(sets[1:]) if domains else np.inf,
        )

    def all_to_all_seconds(
        self, local_bytes: Array, *axes: Axis, copies: float = 1.0, message: float = np.inf
    ) -> Array:
        """Return a lower bound of `Machine.all_to_all_seconds`."""
        size, copies = reduce(np.multiply, [degree for degree, _ in axes]), max(copies, 1.0)
        near = np.minimum(size, self.first_size)
        # Inside the first domain a token is sent once to each rank with several of its receivers.
        distinct = size * (1.0 - (1.0 - 1.0 / size) ** copies) / copies
        share = ((near - 1.0) * np.minimum(1.0, distinct) + (size - near) / copies) / size
        tier = self.tiers[0]
        inside = share / (tier.bytes_s.value * self.link_share(tier) * self.exchange_gain)
        if np.isfinite(self.outside_bytes_s):
            # A token with receivers outside the domain leaves it, at best once per receiving domain.
            leaving = np.maximum(size - self.domain_size, 0.0) / size / copies
            piece = self.card.exchange / (1.0 + self.card.message_bytes / message)
            inside = np.maximum(inside, leaving / (self.outside_bytes_s * piece))
        return local_bytes * inside + self.latency(*axes)


def link_domains(machine: Machine) -> tuple[int, ...]:
    """Return the devices per domain, inner to outer, of bounded tiers whose next outer tier has separate links."""
    return tuple(tier.size for tier, outer in itertools.pairwise(machine.tiers) if tier.size and not outer.shares_links)


class Pricer:
    """Predictor of time and memory of the strategies in a table.

    Attributes:
        choices: All choices, the simplest first, the one with the least memory last.
        selectable: Mask over `choices`; False for choices that only serve to interpolate partial recomputation.
        fastest_choice: Choice without recomputation and offload, and with re-gathered inputs only if pinned.
        capacity: Usable bytes of device memory, plus a tolerance for rounding.
        rows: Number of rows priced so far.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.request, self.rows = space, space.request, 0
        self.machine = self.request.machine
        self.relaxed = RelaxedMachine.relax(self.machine)
        self.capacity = self.machine.memory_bytes * (1 + TIE)
        kinds, regathers, stack = space.recomputes, space.regathers, self.machine.stack
        if 0 in kinds and stack.flash and stack.selective_kept >= 1.0:
            # Selective recomputation that saves no memory is never useful.
            kinds = [k for k in kinds if k in (0, FULL)]
        if 0 in regathers and not stack.keep_gathered * stack.sequence_parallel:
            regathers = [0]
        self.kinds = kinds
        self._pairs = list(itertools.product(regathers, sorted({0, *kinds})))
        self.choices: list[Choice] = [(o, *p) for o in space.offloads for p in self._pairs]
        self.selectable = np.array([kind in kinds for *_, kind in self.choices])
        self.fastest_choice: Choice = (0, regathers[0], 0)
        self._priced: tuple[int, int] = 0, 0
        self._blocks: BlockPrices
        # Memory is least with parameters and gradients sharded, or with optimizer states alone sharded.
        self.leanest = [z for z in space.zeros if z in (3, 1)] or space.zeros

    def case(self, columns: Columns, **fixed: float) -> PricingCase:
        """Return the inputs of the cost formulas for all rows; `fixed` are columns with one value for all rows."""
        named: dict[str, Any] = columns | fixed
        named = {n: c for n, c in named.items() if n not in ("dp", "block")}
        if "halves" not in named:
            named |= self.space.open_overlap(named)
        if "zero" in named:
            # Same rule as `Candidates.of`: gradients of a single microbatch are reduced layer by layer.
            single_microbatch = (named["zero"] == 1) & (np.asarray(named["accumulation"]) == 1)
            named["zero"] = np.where(single_microbatch, 2.0, named["zero"])
        rows = Candidates.of_columns(**named)
        self.rows += len(rows)
        machine = self.machine if "order" in columns else self.relaxed
        return PricingCase(self.request.numbers, machine, self.request.workload, rows)

    def tokens(self, columns: Columns) -> Array:
        """Return the tokens per step of every row."""
        sequences = columns["microbatch"] * columns["accumulation"] * columns["dp"]
        return sequences * self.request.workload.seq_len

    def seconds(self, columns: Columns, choice: Choice) -> Array:
        """Return a lower bound of the seconds per step of every row under one choice; exact for complete rows."""
        if not count(columns):
            return np.empty(0)
        fixed, blocks = dict(zip(FREED, map(float, choice), strict=True)), None
        if "block" in columns:
            index = self._pairs.index(choice[1:]), columns["block"].astype(np.intp)
            blocks = self._blocks.take(self._priced, index)
        if "zero" in columns:
            return step_seconds(self.case(columns, **fixed), blocks=blocks)
        return step_seconds(self.case(columns, **fixed, dp_shard=1.0, zero=0.0), "pace", blocks)

    def price_blocks(self, columns: Columns) -> Columns:
        """Cache the seconds of layers for all rows; return the rows with column `block`, the index into the cache.

        Rows that are expanded by pipeline and data-parallel columns keep the index, so `seconds` reuses the cache. A
        call replaces the previous cache. The cache is for strategies without an order of the mesh axes only.
        """
        self._blocks = BlockPrices.of(with_choices(self.case(columns), self._pairs))
        self._priced = len(self._pairs), count(columns)
        return columns | {"block": np.arange(count(columns), dtype=np.float64)}

    def microbatch_s(self, columns: Columns) -> Array:
        """Return a lower bound of the seconds per token, for rows without pipeline and data-parallel columns.

        The bound is the time of layers and head for one microbatch, divided by the tokens that all devices process
        meanwhile. Stages are assumed equal, and FSDP and pipelines free of cost.
        """
        fixed = dict.fromkeys(("pp", "dp_shard", "dp_replicate", "vpp"), 1.0)
        fixed |= {"zero": 0.0, "accumulation": _MANY_MICROBATCHES}
        fixed["regather"] = float(self.fastest_choice[1])
        starts = range(0, count(columns), _ROWS_IN_CACHE)
        parts = ({n: c[at : at + _ROWS_IN_CACHE] for n, c in columns.items()} for at in starts)
        step = np.concatenate([step_seconds(self.case(p, **fixed), "pace") for p in parts])
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.request.num_devices * columns["microbatch"] * self.request.workload.seq_len
        return step / _MANY_MICROBATCHES * (1 - TIE) * ranks / tokens

    def peak(self, columns: Columns) -> Array:
        """Return lower bounds of the peak bytes under every choice, [choices, rows]; exact for complete rows."""
        peaks = []
        for offload in map(float, self.space.offloads):
            zeros = self._zero_choices(columns)
            cases = [self.case(columns, **zero, offload=offload) for zero in zeros]
            peaks.append(np.minimum.reduce([offloaded_bytes(c, self._pairs) for c in cases]))
        return np.concatenate(peaks)

    def min_recompute_layers(self, columns: Columns, choice: Choice) -> tuple[Array, Array]:
        """Return (layers, peak bytes) per row: the least number of recomputed layers per rank that fits, else all."""
        _, regather, kind = choice
        min_layers, peak = np.full(len(columns["pp"]), np.inf), np.zeros(len(columns["pp"]))
        for zero_column in self._zero_choices(columns):
            case = self.case(columns, **zero_column, offload=0.0, regather=float(regather))
            layers, peaks = min_recompute_layers(case, kind, self.capacity)
            peak = np.where(layers < min_layers, peaks, peak)
            min_layers = np.minimum(layers, min_layers)
        return min_layers, peak

    def _zero_choices(self, columns: Columns) -> list[dict[str, float]]:
        """Return dicts that add column `zero` to rows without it, one per value to try; [{}] for rows with it."""
        return [{}] if "zero" in columns else [{"zero": float(zero)} for zero in self.leanest]
