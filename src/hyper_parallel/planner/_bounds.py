"""Prices of rows of strategies, complete ones and partial ones, whose prices are lower bounds.

A partial strategy lacks columns, and is priced with what is open at its best: without an order any group is on the
fastest links of the machine, without `zero` nothing is shared, and memory is that of whatever shards most.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    Machine,
    Setting,
    few_layers,
    offloaded_bytes,
    step_seconds,
)
from hyper_parallel.planner._rows import TIE, count
from hyper_parallel.planner._space import Columns, Space
from hyper_parallel.topology import Tier

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
Choice: TypeAlias = tuple[int, int, int]
"""Ways to free memory, columns `offload`, `regather` and `recompute`."""

FULL: Final = RECOMPUTE.index("full")
_MANY: Final = 1e12  # microbatches, so many that nothing is left of what comes once per step


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
        pairs = itertools.product(space.offloads, regathers, sorted({0, *kinds}))
        self.choices: list[Choice] = list(pairs)
        self.may = np.array([kind in kinds for *_, kind in self.choices])
        self.usual: Choice = (0, regathers[0], 0)
        # Of parameters and gradients sharded, or optimizer states alone, one holds least.
        self.leanest = [z for z in space.zeros if z in (3, 1)] or space.zeros

    def setting(self, columns: Columns, **fixed: float) -> Setting:
        """Rows to be priced, some columns of which are the same for all."""
        named: dict[str, Array | float] = {
            n: c for n, c in columns.items() if n not in ("dp", *fixed)
        }
        if "zero" in named:
            # As `Candidates.of`: one microbatch's gradients are reduced layer by layer in any case.
            alone = (columns["zero"] == 1) & (columns["accumulation"] == 1)
            named["zero"] = np.where(alone, 2.0, columns["zero"])
        rows = Candidates.of_columns(**named, **fixed)
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
        fixed = dict(zip(("offload", "regather", "recompute"), map(float, choice), strict=True))
        if "zero" in columns:
            return step_seconds(self.setting(columns, **fixed))
        return step_seconds(self.setting(columns, **fixed, dp_shard=1.0, zero=0.0), "pace")

    def microbatch_s(self, columns: Columns) -> Array:
        """Least seconds per token of one microbatch over all layers, all stages equally full, without sharding."""
        once = dict.fromkeys(("pp", "dp_shard", "dp_replicate", "vpp"), 1.0)
        fixed = {**once, "zero": 0.0, "accumulation": _MANY, "regather": float(self.usual[1])}
        step = step_seconds(self.setting(columns, **fixed), "pace")
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.request.num_devices * columns["microbatch"] * self.request.workload.seq_len
        return step / _MANY * (1 - TIE) * ranks / tokens

    def peak(self, columns: Columns) -> Array:
        """Peak bytes under every choice, at least, [choices, rows]."""
        pairs = list(dict.fromkeys(choice[1:] for choice in self.choices))
        held = []
        for offload in self.space.offloads:
            ways = [
                offloaded_bytes(self.setting(columns, **open_, offload=float(offload)), pairs)
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
