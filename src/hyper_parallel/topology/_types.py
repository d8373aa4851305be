"""Supernode: a machine as planning sees it. Every number carries its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["stated", "derived", "general", "inferred", "measured"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number with its origin.

    Attributes:
        value: In base units: bytes, bytes/s, FLOP/s, seconds.
        source: Where the number comes from, one short phrase.
        certainty: stated in a public source, derived from stated ones, general knowledge, inferred, or measured here.
    """

    value: float
    source: str
    certainty: Certainty


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one CPU rank).

    Attributes:
        name: `Ascend 910C die`, `NVIDIA H200`, `cpu`.
        kind: cuda, npu, tpu or cpu.
        peak_flops: Dense peak FLOP/s by dtype name.
        memory_bytes: Bytes of its own memory.
        memory_bytes_s: Bytes/s of its own memory.
    """

    name: str
    kind: Literal["cuda", "npu", "tpu", "cpu"]
    peak_flops: dict[str, Quantity]
    memory_bytes: Quantity
    memory_bytes_s: Quantity


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the interconnect, inner to outer.

    Attributes:
        name: die, node, supernode, cluster.
        size: Devices inside one domain of this tier; 0 is unlimited.
        bytes_s: Bytes/s per device and direction inside the tier.
        latency_s: Seconds of one hop or message.
        kind: full_mesh, switch, torus, or host.
    """

    name: str
    size: int
    bytes_s: Quantity
    latency_s: Quantity
    kind: Literal["full_mesh", "switch", "torus", "host"]


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory beyond the device's own.

    Attributes:
        kind: dram, pool (shared by the supernode) or flash.
        bytes: Capacity of one pool.
        bytes_s: Bytes/s per device and direction.
        shared_by: Devices that share one pool.
    """

    kind: Literal["dram", "pool", "flash"]
    bytes: Quantity
    bytes_s: Quantity
    shared_by: int


@dataclass(frozen=True, slots=True)
class Supernode:
    """A machine: one kind of device, tiers inner to outer, memory pools.

    Attributes:
        name: Preset name.
        description: One sentence for people.
        num_devices: Devices of one supernode (the default number to plan for).
        device: The device card.
        tiers: Interconnect levels, inner to outer; the last may be unlimited.
        pools: Memory beyond the devices' own.
    """

    name: str
    description: str
    num_devices: int
    device: Device
    tiers: tuple[Tier, ...]
    pools: tuple[MemoryPool, ...] = ()

    def peak_flops(self, dtype: str) -> float:
        """Dense peak FLOP/s of one device; formats without an entry run at the widest listed one below them."""
        peaks = self.device.peak_flops
        if dtype in peaks:
            return peaks[dtype].value
        fallback = {"float16": "bfloat16", "float32": "bfloat16", "float64": "float32"}.get(dtype)
        if fallback in peaks and fallback is not None:
            return peaks[fallback].value / (1 if dtype == "float16" else 2)
        return min(q.value for q in peaks.values())

    def tier_of(self, span: int) -> Tier:
        """The innermost tier whose domain holds `span` consecutive devices."""
        for tier in self.tiers:
            if tier.size == 0 or span <= tier.size:
                return tier
        return self.tiers[-1]
