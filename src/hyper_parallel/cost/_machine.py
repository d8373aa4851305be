"""The numbers of a machine that the cost formulas need: rates after efficiency, and the bandwidth of rank groups.

Efficiencies are few, per kind of device, and carry their source. They are not fitted to any training run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.topology import Supernode, Tier
from hyper_parallel.units import GiB

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a device's peaks a training stack reaches.

    Attributes:
        matmul: Share of the peak FLOP/s of a large matmul.
        saturation: Rows or columns at which a matmul reaches half of that share.
        attention: Share of the peak FLOP/s of the two attention products, by compute dtype.
        elementwise: Share of the memory bandwidth of element-wise and normalising kernels.
        stream: Share of the memory bandwidth of one long pass, as the optimizer makes.
        link: Share of the link bandwidth of collectives.
        overlap: Share of compute behind which FSDP and cp traffic can hide.
        kernel_s: Seconds to launch one kernel or run one small operator.
        launch_hidden: Launches run ahead of the device, so only a layer shorter than its launches waits.
        context_bytes: Memory of driver context, communicators and workspaces.
        fragmentation: Memory the allocator holds but cannot use, as a share of the rest.
        source: Where these numbers come from.
    """

    matmul: float
    saturation: float
    attention: Mapping[str, float]
    elementwise: float
    stream: float
    link: float
    overlap: float
    kernel_s: float
    launch_hidden: bool
    context_bytes: int
    fragmentation: float
    source: str


ACCELERATOR: Final = Efficiency(
    matmul=0.70,
    saturation=128.0,
    attention=MappingProxyType({"bfloat16": 0.5, "float16": 0.5, "float32": 0.5, "float64": 0.5}),
    elementwise=0.80,
    stream=0.80,
    link=0.80,
    overlap=0.90,
    kernel_s=4e-6,
    launch_hidden=True,
    context_bytes=GiB,
    fragmentation=0.04,
    source="general knowledge of large bfloat16 kernels and ring collectives; not fitted to a run",
)

CPU: Final = Efficiency(
    matmul=0.98,
    saturation=4.0,
    attention=MappingProxyType({"float32": 0.35, "bfloat16": 0.18, "float64": 0.25}),
    elementwise=0.55,
    stream=1.0,
    link=1.0,
    overlap=0.0,
    kernel_s=10e-6,
    launch_hidden=False,
    context_bytes=0,
    fragmentation=0.0,
    source="micro-benchmarks of torch operators on one core, see docs/cost.md; not fitted to a run",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and of its links.

    Attributes:
        peak_flops: Dense peak FLOP/s in the compute dtype.
        memory_bytes: Capacity of the device's own memory.
        memory_bytes_s: Peak bytes/s of the device's own memory.
        attention_flops: FLOP/s that attention reaches in the compute dtype.
        tiers: Interconnect levels, inner to outer.
        efficiency: Reached shares.
    """

    peak_flops: float
    memory_bytes: int
    memory_bytes_s: float
    attention_flops: float
    tiers: tuple[Tier, ...]
    efficiency: Efficiency

    @classmethod
    def of(cls, supernode: Supernode, compute_dtype: str) -> Machine:
        """Read the numbers off a topology for a compute dtype."""
        device = supernode.device
        efficiency = CPU if device.kind == "cpu" else ACCELERATOR
        peak = supernode.peak_flops(compute_dtype)
        return cls(
            peak,
            int(device.memory_bytes.value),
            device.memory_bytes_s.value,
            peak * efficiency.attention[compute_dtype],
            supernode.tiers,
            efficiency,
        )

    def ring_seconds(self, gathered_bytes: Array, size: Array, stride: Array) -> Array:
        """Seconds of one all-gather or reduce-scatter over groups of `size` ranks, `stride` ids apart.

        A ring sends (g-1)/g of the gathered tensor at the rate of `bandwidth`, after the latency of the tiers.

        Args:
            gathered_bytes: Bytes of the whole tensor of the group.
            size: Ranks of a group, g.
            stride: Product of the degrees placed inside the group's axis.

        Source: ring collectives, Patarasuk and Yuan 2009.
        """
        sent = gathered_bytes * (size - 1) / size
        # Thousands of candidates share a few group shapes: price each shape once.
        (sizes, strides), which = _distinct_pairs(size, stride)
        rate, delay = self.bandwidth(sizes, strides)[which], self.latency(sizes, strides)[which]
        return np.where(size > 1, sent / rate + delay, 0.0)

    def all_to_all_seconds(self, local_bytes: Array, size: Array, stride: Array) -> Array:
        """Seconds of one all-to-all in which every rank holds `local_bytes` for the whole group, itself included.

        Of a rank's bytes the share of the peers first met on a tier goes over that tier; tiers with links of their
        own work at once, tiers that share links one after the other.
        """
        (sizes, strides), which = _distinct_pairs(size, stride)
        slowest = busy = np.zeros_like(sizes)  # seconds per byte
        for hop in self._hops(sizes, strides):
            share = (hop.reached - hop.inside) / sizes
            seconds = share / (hop.tier.bytes_s.value * self.efficiency.link)
            busy = busy + seconds if hop.tier.shares_links else seconds
            slowest = np.maximum(slowest, busy)
        return local_bytes * slowest[which] + self.latency(sizes, strides)[which]

    def bandwidth(self, size: Array, stride: Array) -> Array:
        """Bytes/s at which every rank of a group sends in a ring: the least of g_local * bandwidth over its tiers.

        g_local ranks of the group lie in one domain below the links of a tier and drive them in parallel; where the
        group does not divide over the domains the one that holds the fewest decides. The same law as
        `topology.group_bandwidth`, over arrays of regular groups, times the link efficiency.
        """
        rate = np.full(np.broadcast(size, stride).shape, np.inf)
        for hop in self._hops(size, stride):
            rest = np.mod(size, hop.below)
            possible = np.where(rest > 0, rest, hop.below) * hop.tier.bytes_s.value
            rate = np.where(hop.reached > hop.inside, np.minimum(rate, possible), rate)
        return rate * self.efficiency.link

    def latency(self, size: Array, stride: Array) -> Array:
        """Seconds of a collective with a tiny message: steps on every tier times its latency.

        One step on a full mesh, a tree over a switch, a ring in both directions on a torus, a ring on one host.
        """
        total = np.zeros(np.broadcast(size, stride).shape)
        for hop in self._hops(size, stride):
            joined = np.ceil(hop.reached / hop.inside)
            if hop.tier.kind == "full_mesh":
                steps = np.ones_like(total)
            elif hop.tier.kind == "switch":
                steps = np.ceil(np.log2(np.maximum(joined, 2.0)))
            elif hop.tier.kind == "torus":
                steps = np.maximum(1.0, joined // 2)
            else:
                steps = joined - 1
            crossed = hop.reached > hop.inside
            total = total + np.where(crossed, steps * hop.tier.latency_s.value, 0.0)
        return total

    def _hops(self, size: Array, stride: Array) -> Iterator[_Hop]:
        inside = below = np.ones(np.broadcast(size, stride).shape)
        for index, tier in enumerate(self.tiers):
            outermost = index == len(self.tiers) - 1
            if tier.size == 0 or outermost:
                reached = np.broadcast_to(size * 1.0, inside.shape)
            else:
                reached = np.minimum(size, np.maximum(1.0, np.floor(tier.size / stride)))
            if not tier.shares_links:
                below = inside
            yield _Hop(tier, inside, below, np.maximum(reached, inside))
            inside = np.maximum(reached, inside)


def _distinct_pairs(size: Array, stride: Array) -> tuple[tuple[Array, Array], NDArray[np.intp]]:
    """The distinct (size, stride) pairs, and for every position which of them it has."""
    size, stride = np.broadcast_arrays(size, stride)
    width = int(stride.max(initial=1)) + 1
    code = size.astype(np.int64) * width + stride.astype(np.int64)
    codes = np.unique(code)  # few, so looking each up beats sorting positions
    pairs = ((codes // width).astype(np.float64), (codes % width).astype(np.float64))
    return pairs, np.searchsorted(codes, code.reshape(-1))


@dataclass(frozen=True, slots=True)
class _Hop:
    """A tier and how many ranks of a group lie inside it.

    Attributes:
        tier: The tier.
        inside: Ranks of the group in one domain of the next inner tier.
        below: Ranks of the group in one domain below the links that this tier uses.
        reached: Ranks of the group in one domain of this tier.
    """

    tier: Tier
    inside: Array
    below: Array
    reached: Array
