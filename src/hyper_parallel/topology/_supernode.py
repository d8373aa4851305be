"""Supernode: description of a machine for planning, in which every number has a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyper_parallel.errors import TopologyTooSmall, UnknownPeak

Certainty = Literal["stated", "derived", "general", "inferred", "measured"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """Number with its source.

    Attributes:
        value: Value in base units: bytes, bytes/s, FLOP/s, seconds.
        source: Source of the number, as a short phrase.
        certainty: Whether the number is stated in a public source, derived from stated numbers, general knowledge,
            inferred, or measured on this machine.
    """

    value: float
    source: str
    certainty: Certainty


@dataclass(frozen=True, slots=True)
class Device:
    """Accelerator, or the share of a CPU and its memory that one rank uses, with the rates of this share.

    Attributes:
        name: Name of the product, such as `NVIDIA H200`.
        kind: cuda, npu, tpu or cpu.
        peak_flops: Dense peak FLOP/s by dtype name.
        memory_bytes: Capacity of the device memory.
        memory_bytes_s: Bandwidth of the device memory, bytes/s.
        reported_as: Globs that match the device name in the vendor's tool, for detection.
        ranks_per_core: Ranks that share a CPU core, at least 1; 1 on an accelerator.
    """

    name: str
    kind: Literal["cuda", "npu", "tpu", "cpu"]
    peak_flops: dict[str, Quantity]
    memory_bytes: Quantity
    memory_bytes_s: Quantity
    reported_as: tuple[str, ...] = ()
    ranks_per_core: float = 1.0


@dataclass(frozen=True, slots=True)
class Tier:
    """Level of the interconnect hierarchy.

    Attributes:
        name: Name, such as `node` or `cluster`.
        size: Devices inside one domain of this tier; 0 is unlimited. Domains are runs of consecutive device ids.
        bytes_s: Bytes/s per device and direction inside the tier.
        latency_s: Seconds for an empty message between two devices of the tier.
        kind: full_mesh, switch, torus, or host (ranks of one CPU machine).
        shares_links: True if this tier and the next inner tier use the same links of a device, so that traffic of both
            tiers adds up. False if the device has separate links for this tier.
    """

    name: str
    size: int
    bytes_s: Quantity
    latency_s: Quantity
    kind: Literal["full_mesh", "switch", "torus", "host"]
    shares_links: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory beyond the device's own.

    Attributes:
        kind: dram, pool (shared by the supernode) or flash.
        bytes: Capacity of one pool.
        bytes_s: Bytes/s per device and direction.
        shared_by: Devices that share one pool.
        total_bytes_s: Bytes/s of the pool itself, reads and writes of all devices together; None: unknown.
    """

    kind: Literal["dram", "pool", "flash"]
    bytes: Quantity
    bytes_s: Quantity
    shared_by: int
    total_bytes_s: Quantity | None = None

    @property
    def shared_bytes_s(self) -> float:
        """Bytes/s per device and direction when all devices of the pool copy in both directions at once."""
        if self.total_bytes_s is None:
            return self.bytes_s.value
        return min(self.bytes_s.value, self.total_bytes_s.value / self.shared_by / 2)


@dataclass(frozen=True, slots=True)
class Supernode:
    """Machine with one kind of device, interconnect tiers and memory pools.

    Attributes:
        name: Name of the preset or topology file, or `local` for this machine.
        description: Description of the machine in one sentence.
        num_devices: Devices of one supernode (the default number to plan for).
        device: Device with its rates and its memory.
        tiers: Interconnect levels, inner to outer; the last may be unlimited.
        pools: Memory beyond the devices' own.
    """

    name: str
    description: str
    num_devices: int
    device: Device
    tiers: tuple[Tier, ...]
    pools: tuple[MemoryPool, ...] = ()

    @property
    def host_bytes(self) -> float | None:
        """Bytes of host memory per device: its share of the `dram` pool, else of the shared pool; None: unknown."""
        host = self._host
        return None if host is None else host.bytes.value / host.shared_by

    @property
    def host_bytes_s(self) -> float:
        """Bytes/s of copies to and from host memory per device and direction, with all devices active; 0 if unknown.

        For ranks on a CPU without memory pools, it is half the memory bandwidth, because a copy reads and writes.
        """
        host = self._host
        if host is not None:
            return host.shared_bytes_s
        return self.device.memory_bytes_s.value / 2 if self.device.kind == "cpu" else 0.0

    @property
    def _host(self) -> MemoryPool | None:
        pools = {pool.kind: pool for pool in self.pools}
        return pools.get("dram") or pools.get("pool")

    def peak_flops(self, dtype: str) -> float:
        """Return the dense peak FLOP/s of one device for a dtype name.

        Raises:
            UnknownPeak: HP310 when the device has no entry for the dtype.
        """
        peaks = self.device.peak_flops
        if dtype not in peaks:
            raise UnknownPeak(
                f"the topology `{self.name}` has no peak rate of {self.device.name} for {dtype}",
                got=dtype,
                allowed=sorted(peaks),
                hint=f"compute in {next(iter(peaks))}, or add `{dtype}` to a copy of the topology file",
            )
        return peaks[dtype].value

    def tier_of(self, span: int) -> Tier:
        """Return the innermost tier with domains of at least `span` consecutive devices.

        Raises:
            TopologyTooSmall: HP311 when no tier connects that many devices.
        """
        for tier in self.tiers:
            if tier.size == 0 or span <= tier.size:
                return tier
        raise TopologyTooSmall(
            f"no tier of the topology `{self.name}` connects {span} devices",
            got=span,
            allowed=f"1..{self.tiers[-1].size}",
            hint="add a `cluster` tier to a copy of the topology file, or plan for fewer devices",
        )
