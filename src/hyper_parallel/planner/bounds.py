"""Rows of strategies, complete and partial ones: their prices, of partial ones lower bounds, and what fits.

A partial strategy lacks columns, and is priced with what is open at its best: without an order any group is on the
fastest links of the machine, without `zero` nothing is shared, and memory is that of whatever shards most. Memory is
freed in three ways: inputs that were gathered for matmuls are gathered again in backward, activations are computed
again, and what exceeds the device lies in host memory.
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
    Ring,
    Setting,
    few_layers,
    offloaded_bytes,
    step_seconds,
    under,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner.strategy_space import Columns, Space
from hyper_parallel.topology import Tier

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
Choice: TypeAlias = tuple[int, int, int]
"""Ways to free memory, columns `offload`, `regather` and `recompute`."""

FULL: Final = RECOMPUTE.index("full")
FREED: Final = ("offload", "regather", "recompute")
"""Columns that are solved inside a strategy, as a `Choice`."""
PRICES: Final = ("per_token_s", "memory_bytes", "layers")
"""Seconds per token, peak bytes, and layers of a rank that are recomputed as column `recompute` says, -1 for all."""
TIE: Final = 1e-9
"""Values that differ by less, relatively, are equal: the rest is rounding."""
_MANY: Final = 1e12  # microbatches, so many that nothing is left of what comes once per step
_CACHED: Final = 2**14
"""Rows whose columns, a few dozen at a time, a processor's cache holds: more at once take twice as long a row."""
_DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")


def select(rows: Columns, which: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    """Some of the rows."""
    if which.dtype == np.bool_:
        which = np.flatnonzero(which)  # an index is read faster than a mask
    return {name: column[which] for name, column in rows.items()}


def join(parts: Sequence[Columns]) -> Columns:
    """All rows of several; no row of no column when there are none."""
    if not parts:
        return dict.fromkeys((*Candidates.__slots__, *PRICES), np.empty(0))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def count(rows: Columns) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values())))


def tuples(rows: Columns, names: Sequence[str] = _DEGREES) -> list[tuple[int, ...]]:
    """Some columns of every row, as whole numbers: its degrees."""
    table = np.column_stack([rows[name] for name in names]).astype(int)
    return [tuple(row) for row in table.tolist()]


def ranked(rows: Columns) -> NDArray[np.intp]:
    """Positions, fastest first; ties go to smaller tp, cp, pp and ep, then to less memory and plainer choices."""
    value = rows["per_token_s"]
    rounded = np.round(value / value.min() / TIE) if len(value) else value
    plain = [rows[name] for name in sorted(rows) if name not in PRICES]
    keys = (*plain, rows["layers"], rows["memory_bytes"], rows["ep"], rows["pp"], rows["cp"])
    return np.lexsort((*keys, rows["tp_x"] * rows["tp_y"], rounded))


def strategy_at(
    rows: Columns, position: int, base: Strategy, workload: Workload
) -> tuple[Strategy, Workload]:
    """One complete strategy with its resolved workload; arguments as for `Candidates.at`."""
    row = {n: rows[n][[position]] for n in rows if n in Candidates.__slots__}
    strategy, resolved = Candidates.of_columns(**row).at(0, base, workload)
    layers = int(rows["layers"][position])
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved


@dataclass(frozen=True, slots=True)
class RelaxedMachine(Machine):
    """The same devices on one tier, at least as fast as the real ones wherever the ranks of a group lie.

    A ring sends at the least rate of the tiers it crosses, so the fastest tier bounds it. An all-to-all uses the links
    of several tiers at once, and may send a token once for several copies of it to another domain.
    """

    exchange_gain: float = 1.0  # bandwidth of all sets of links together over the fastest
    first_size: int = 1  # devices in the innermost domain
    joined_size: float = np.inf  # devices in the domain outside of which other links are used
    outside_bytes_s: float = np.inf  # bandwidth of all of those other links together

    @classmethod
    def around(cls, machine: Machine) -> RelaxedMachine:
        """All ranks as if on the fastest links, with the least latency."""
        sets: list[float] = []
        for tier in machine.tiers:
            reached = tier.bytes_s.value * machine.link_share(tier)
            if tier.shares_links and sets:
                sets[-1] = max(sets[-1], reached)
            else:
                sets.append(reached)
        first, latency = machine.tiers[0], min(t.latency_s.value for t in machine.tiers)
        rate = replace(first.bytes_s, value=max(sets) / machine.link_share(first))
        one = Tier("relaxed", 0, rate, replace(first.latency_s, value=latency), "full_mesh")
        joined = link_domains(machine)
        return cls(
            **{name: getattr(machine, name) for name in Machine.__slots__} | {"tiers": (one,)},
            exchange_gain=sum(sets) / max(sets),
            first_size=first.size or 1,
            joined_size=float(joined[0]) if joined else np.inf,
            outside_bytes_s=sum(sets[1:]) if joined else np.inf,
        )

    def ring(self, *axes: Axis) -> Ring:
        """As `Machine.ring`, of which there is little left on one tier."""
        size, tier = reduce(np.multiply, [degree for degree, _ in axes]), self.tiers[0]
        sends, delay = size > 1, tier.latency_s.value * self.card.latency
        if not sends.any():
            return Ring(size, np.full(1, np.inf), np.zeros(1))
        rate = tier.bytes_s.value * self.link_share(tier)
        return Ring(size, np.where(sends, rate, np.inf), np.where(sends, delay, 0.0))

    def all_to_all_seconds(
        self, local_bytes: Array, *axes: Axis, copies: float = 1.0, message: float = np.inf
    ) -> Array:
        """At most the seconds of the real machine, see `Machine.all_to_all_seconds`."""
        size, copies = reduce(np.multiply, [degree for degree, _ in axes]), max(copies, 1.0)
        near = np.minimum(size, self.first_size)
        # Inside the first domain a token goes once to each rank that holds several of its receivers.
        distinct = size * (1.0 - (1.0 - 1.0 / size) ** copies) / copies
        share = ((near - 1.0) * np.minimum(1.0, distinct) + (size - near) / copies) / size
        tier = self.tiers[0]
        inside = share / (tier.bytes_s.value * self.link_share(tier) * self.exchange_gain)
        if np.isfinite(self.outside_bytes_s):
            # What no domain holds leaves it, in the best case once for all copies to another domain.
            leaving = np.maximum(size - self.joined_size, 0.0) / size / copies
            piece = self.card.exchange / (1.0 + self.card.message_bytes / message)
            inside = np.maximum(inside, leaving / (self.outside_bytes_s * piece))
        return local_bytes * inside + self.latency(*axes)


def link_domains(machine: Machine) -> tuple[int, ...]:
    """Sizes of the domains beyond which other links are used; tiers of one fabric count as one domain."""
    return tuple(
        tier.size
        for tier, outer in itertools.pairwise(machine.tiers)
        if tier.size and not outer.shares_links
    )


class Pricer:
    """Seconds and bytes of rows; counts the rows.

    Attributes:
        choices: Ways to free memory that are priced, the plainest first; the leanest comes last.
        may: Which of them may be taken; the others are only the ends of lines.
        usual: The fastest: nothing recomputed or offloaded.
        capacity: Bytes of a device, with what rounding may add.
        rows: Rows priced.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.request, self.rows = space, space.request, 0
        self.machine = self.request.machine
        self.relaxed = RelaxedMachine.around(self.machine)
        self.capacity = self.machine.memory_bytes * (1 + TIE)
        kinds, regathers, stack = space.recomputes, space.regathers, self.machine.stack
        if 0 in kinds and stack.flash and stack.selective_kept >= 1.0:
            # Selective recomputation that keeps as much is never of use.
            kinds = [k for k in kinds if k in (0, FULL)]
        if 0 in regathers and not stack.keep_gathered * stack.sequence_parallel:
            regathers = [0]
        self.kinds = kinds
        self._pairs = list(itertools.product(regathers, sorted({0, *kinds})))
        self.choices: list[Choice] = [(o, *p) for o in space.offloads for p in self._pairs]
        self.may = np.array([kind in kinds for *_, kind in self.choices])
        self.usual: Choice = (0, regathers[0], 0)
        self._priced: tuple[int, int] = 0, 0
        self._blocks: BlockPrices
        # Of parameters and gradients sharded, or optimizer states alone, one holds least.
        self.leanest = [z for z in space.zeros if z in (3, 1)] or space.zeros

    def setting(self, columns: Columns, **fixed: float) -> Setting:
        """Rows to be priced, some columns of which are the same for all."""
        named: dict[str, Any] = columns | fixed
        named = {n: c for n, c in named.items() if n not in ("dp", "block")}
        if "zero" in named:
            # As `Candidates.of`: one microbatch's gradients are reduced layer by layer in any case.
            alone = (named["zero"] == 1) & (np.asarray(named["accumulation"]) == 1)
            named["zero"] = np.where(alone, 2.0, named["zero"])
        rows = Candidates.of_columns(**named)
        self.rows += len(rows)
        machine = self.machine if "order" in columns else self.relaxed
        return Setting(self.request.numbers, machine, self.request.workload, rows)

    def tokens(self, columns: Columns) -> Array:
        """Tokens of a step."""
        sequences = columns["microbatch"] * columns["accumulation"] * columns["dp"]
        return sequences * self.request.workload.seq_len

    def seconds(self, columns: Columns, choice: Choice) -> Array:
        """Seconds per step under one choice, at least."""
        if not count(columns):
            return np.empty(0)
        fixed, blocks = dict(zip(FREED, map(float, choice), strict=True)), None
        if "block" in columns:
            place = self._pairs.index(choice[1:]), columns["block"].astype(np.intp)
            blocks = self._blocks.at(self._priced, place)
        if "zero" in columns:
            return step_seconds(self.setting(columns, **fixed), blocks=blocks)
        return step_seconds(self.setting(columns, **fixed, dp_shard=1.0, zero=0.0), "pace", blocks)

    def price_blocks(self, columns: Columns) -> Columns:
        """Blocks with column `block`, by which those of their prices are found that pipelines and states do not change.

        These are the blocks of one slice: the deepest levels come first, so that nothing of another slice is priced
        before this one is done, but complete strategies, whose groups lie somewhere.
        """
        self._blocks = BlockPrices.of(under(self.setting(columns), self._pairs))
        self._priced = len(self._pairs), count(columns)
        return columns | {"block": np.arange(count(columns), dtype=np.float64)}

    def microbatch_s(self, columns: Columns) -> Array:
        """Least seconds per token of one microbatch over all layers, all stages equally full, without sharding."""
        once = dict.fromkeys(("pp", "dp_shard", "dp_replicate", "vpp"), 1.0)
        fixed = {**once, "zero": 0.0, "accumulation": _MANY, "regather": float(self.usual[1])}
        starts = range(0, count(columns), _CACHED)
        parts = ({n: c[at : at + _CACHED] for n, c in columns.items()} for at in starts)
        step = np.concatenate([step_seconds(self.setting(p, **fixed), "pace") for p in parts])
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.request.num_devices * columns["microbatch"] * self.request.workload.seq_len
        return step / _MANY * (1 - TIE) * ranks / tokens

    def peak(self, columns: Columns) -> Array:
        """Peak bytes under every choice, at least, [choices, rows]."""
        held = []
        for offload in self.space.offloads:
            ways = [
                offloaded_bytes(self.setting(columns, **open_, offload=float(offload)), self._pairs)
                for open_ in self._open(columns)
            ]
            held.append(np.minimum.reduce(ways))
        return np.concatenate(held)

    def few_layers(self, columns: Columns, choice: Choice) -> tuple[Array, Array]:
        """As few layers of a rank as have to be recomputed under a choice, and the peak bytes with them."""
        _, regather, kind = choice
        least, used = np.full(len(columns["pp"]), np.inf), np.zeros(len(columns["pp"]))
        for open_ in self._open(columns):
            setting = self.setting(columns, **open_, offload=0.0, regather=float(regather))
            few, held = few_layers(setting, kind, self.capacity)
            used, least = np.where(few < least, held, used), np.minimum(few, least)
        return least, used

    def _open(self, columns: Columns) -> list[dict[str, float]]:
        """What may stand for an open `zero`."""
        return [{}] if "zero" in columns else [{"zero": float(zero)} for zero in self.leanest]
