"""The numbers of a machine that the cost formulas need: rates after efficiency, and the bandwidth of rank groups.

Efficiencies are few, per kind of device, and carry their source. They are not fitted to any training run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.topology import Supernode
from hyper_parallel.units import GiB

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a device's peaks a training stack reaches.

    Attributes:
        matmul: Share of the peak FLOP/s of a large matmul.
        saturation: Rows or columns at which a matmul reaches half of that share.
        attention: Share of the peak FLOP/s of the two attention products.
        memory: Share of the memory bandwidth of element-wise kernels.
        link: Share of the link bandwidth of collectives.
        overlap: Share of compute behind which FSDP, cp and expert traffic can hide.
        kernel_s: Seconds to launch one kernel or run one small operator.
        launch_hidden: Launches run ahead of the device, so only a layer shorter than its launches waits.
        context_bytes: Memory of driver context, communicators and workspaces.
        fragmentation: Memory the allocator holds but cannot use, as a share of the rest.
        source: Where these numbers come from.
    """

    matmul: float
    saturation: float
    attention: float
    memory: float
    link: float
    overlap: float
    kernel_s: float
    launch_hidden: bool
    context_bytes: int
    fragmentation: float
    source: str


ACCELERATOR: Final = Efficiency(
    matmul=0.70, saturation=128.0, attention=0.50, memory=0.80, link=0.80, overlap=0.90,
    kernel_s=4e-6, launch_hidden=True, context_bytes=GiB, fragmentation=0.04,
    source="general knowledge of large bf16 kernels and NCCL / HCCL rings; not fitted to a run",
)  # fmt: skip

CPU: Final = Efficiency(
    matmul=0.85, saturation=16.0, attention=0.45, memory=0.80, link=1.0, overlap=0.0,
    kernel_s=8e-6, launch_hidden=False, context_bytes=0, fragmentation=0.0,
    source="micro-benchmarks of torch CPU operators (docs/cost.md)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and of its links.

    Attributes:
        peak_flops: Dense peak FLOP/s in the compute dtype.
        memory_bytes: Capacity of the device's own memory.
        memory_bytes_s: Peak bytes/s of the device's own memory.
        tiers: Domain size (0: unlimited), bytes/s per device and direction, seconds per message; inner to outer.
        efficiency: Reached shares.
    """

    peak_flops: float
    memory_bytes: int
    memory_bytes_s: float
    tiers: tuple[tuple[int, float, float], ...]
    efficiency: Efficiency

    @classmethod
    def of(cls, supernode: Supernode, compute_dtype: str) -> Machine:
        """Read the numbers off a topology for a compute dtype."""
        device = supernode.device
        return cls(
            supernode.peak_flops(compute_dtype),
            int(device.memory_bytes.value),
            device.memory_bytes_s.value,
            tuple((t.size, t.bytes_s.value, t.latency_s.value) for t in supernode.tiers),
            CPU if device.kind == "cpu" else ACCELERATOR,
        )

    def ring_seconds(self, gathered_bytes: Array, size: Array, stride: Array) -> Array:
        """Seconds of one all-gather or reduce-scatter over groups of `size` ranks, `stride` ids apart.

        A ring sends (g-1)/g of the gathered tensor. The group is walked tier by tier: g_t of its ranks lie in one
        domain of tier t, and the ranks below a tier drive their links into it in parallel, so the rate is the least
        of g_(t-1) * bandwidth_t over the tiers the group crosses. Every doubling inside a tier costs its latency
        once.

        Args:
            gathered_bytes: Bytes of the whole tensor of the group.
            size: Ranks of a group, g.
            stride: Product of the degrees placed inside the group's axis.

        Source: ring collectives, Patarasuk and Yuan 2009; hierarchical rings for the latency.
        """
        rate, latency = self._rate(size, stride)
        sent = gathered_bytes * (size - 1) / size
        return np.where(size > 1, sent / rate + latency, 0.0)

    def all_to_all_seconds(self, local_bytes: Array, size: Array, stride: Array) -> Array:
        """Seconds of one all-to-all in which every rank holds `local_bytes` for the whole group, itself included.

        The slowest tier decides: of a rank's bytes the share (g - g_(t-1)) / g leaves its domain below tier t.
        """
        seconds = np.zeros(np.broadcast(local_bytes, size, stride).shape)
        latency = np.zeros_like(seconds)
        inside = np.ones_like(seconds)
        for index, (domain, bytes_s, hop_s) in enumerate(self.tiers):
            last = index == len(self.tiers) - 1
            reached = size * 1.0 if last else _reached(domain, size, stride)
            crossed = reached > inside
            leaving = local_bytes * (size - inside) / size / (bytes_s * self.efficiency.link)
            seconds = np.where(crossed, np.maximum(seconds, leaving), seconds)
            latency = latency + np.where(crossed, hop_s, 0.0)
            inside = np.maximum(inside, reached)
        return seconds + latency

    def _rate(self, size: Array, stride: Array) -> tuple[Array, Array]:
        shape = np.broadcast(size, stride).shape
        rate = np.full(shape, np.inf)
        latency = np.zeros(shape)
        inside = np.ones(shape)
        for index, (domain, bytes_s, hop_s) in enumerate(self.tiers):
            last = index == len(self.tiers) - 1
            reached = size * 1.0 if last else _reached(domain, size, stride)
            crossed = reached > inside
            rate = np.where(crossed, np.minimum(rate, inside * bytes_s), rate)
            hops = np.ceil(np.log2(np.maximum(reached / inside, 1.0)))
            latency = latency + np.where(crossed, hops * hop_s, 0.0)
            inside = np.maximum(inside, reached)
        return rate * self.efficiency.link, latency


def _reached(domain: int, size: Array, stride: Array) -> Array:
    """Ranks of a group that share one domain; `domain` 0 holds all of them."""
    if domain == 0:
        return size * 1.0
    return np.minimum(size, np.maximum(1.0, np.floor(domain / stride)))
