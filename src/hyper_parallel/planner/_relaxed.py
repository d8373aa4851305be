"""A machine that is at least as fast as the real one wherever the ranks of a group lie: for lower bounds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Machine
from hyper_parallel.topology import Tier

Array = NDArray[np.float64]
Axis = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class RelaxedMachine(Machine):
    """The same devices on one tier.

    A ring sends at the least rate of the tiers it crosses, so the fastest tier bounds it. An all-to-all uses the links
    of several tiers at once, and may send a token once for several copies of it to another domain.

    Attributes:
        exchange_gain: Bandwidth of all sets of links together over the fastest.
        first_size: Devices in the innermost domain.
        joined_size: Devices in the domain outside of which other links are used.
        outside_bytes_s: Bandwidth of all of those other links together.
    """

    exchange_gain: float = 1.0
    first_size: int = 1
    joined_size: float = np.inf
    outside_bytes_s: float = np.inf

    def all_to_all_seconds(
        self, local_bytes: Array, *axes: Axis, copies: float = 1.0, message: float = np.inf
    ) -> Array:
        """At most the seconds of the real machine, see `Machine.all_to_all_seconds`."""
        size = _size(axes)
        near = np.minimum(size, self.first_size)
        # Inside the first domain a token goes once to each rank that holds several of its receivers.
        distinct = size * (1.0 - (1.0 - 1.0 / size) ** max(copies, 1.0)) / max(copies, 1.0)
        share = ((near - 1.0) * np.minimum(1.0, distinct) + (size - near) / max(copies, 1.0)) / size
        tier = self.tiers[0]
        rate = tier.bytes_s.value * self.link_share(tier) * self.exchange_gain
        inside = share / rate
        if np.isfinite(self.outside_bytes_s):
            # What no domain holds leaves it, in the best case once for all copies to another domain.
            leaving = np.maximum(size - self.joined_size, 0.0) / size / max(copies, 1.0)
            piece = self.card.exchange / (1.0 + self.card.message_bytes / message)
            inside = np.maximum(inside, leaving / (self.outside_bytes_s * piece))
        return local_bytes * inside + self.latency(*axes)

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
        latency = min(t.latency_s.value for t in machine.tiers)
        first = machine.tiers[0].size or 1
        relaxed = cls._on(machine, max(sets), latency, sum(sets) / max(sets), first)
        joined = [
            tier.size
            for tier, outer in itertools.pairwise(machine.tiers)
            if tier.size and not outer.shares_links
        ]
        if not joined:
            return relaxed
        return replace(relaxed, joined_size=float(joined[0]), outside_bytes_s=sum(sets[1:]))

    @classmethod
    def _on(
        cls, machine: Machine, reached: float, latency_s: float, gain: float, first: int
    ) -> RelaxedMachine:
        tier = machine.tiers[0]
        one = Tier(
            "relaxed",
            0,
            replace(tier.bytes_s, value=reached / machine.link_share(tier)),
            replace(tier.latency_s, value=latency_s),
            "full_mesh",
        )
        values = {name: getattr(machine, name) for name in Machine.__slots__}
        return cls(**{**values, "tiers": (one,)}, exchange_gain=gain, first_size=first)


def _size(axes: tuple[Axis, ...]) -> Array:
    size: Array = np.ones(1)
    for degree, _ in axes:
        size = size * degree
    return size


def link_domains(machine: Machine) -> tuple[int, ...]:
    """Sizes of the domains beyond which other links are used; tiers of one fabric count as one domain."""
    return tuple(
        tier.size
        for tier, outer in itertools.pairwise(machine.tiers)
        if tier.size and not outer.shares_links
    )
