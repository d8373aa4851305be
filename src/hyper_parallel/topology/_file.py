"""Topology files: YAML in vendor units, each number with its source, validated and converted to base units.

Rates are TFLOP/s and GB/s (10**9), links may also be given in Gb/s, latencies are us; capacities are GB (10**9) or GiB
(2**30), whichever the source means. The presets in `topology/presets` are the examples of the form.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hyper_parallel.config import Section
from hyper_parallel.topology._supernode import (
    Certainty,
    Device,
    MemoryPool,
    Quantity,
    Supernode,
    Tier,
)
from hyper_parallel.units import GB, TFLOP, GiB

DeviceKind = Literal["cuda", "npu", "tpu", "cpu"]
TierKind = Literal["full_mesh", "switch", "torus", "host"]


class Number(Section):
    """One number of a topology file, in the unit its key names."""

    value: float = Field(gt=0)
    """The number."""
    source: str = Field(min_length=1)
    """Where it comes from, one short phrase."""
    certainty: Certainty
    """stated in a public source, derived from stated ones, general knowledge, inferred, or measured."""

    def scaled(self, factor: float) -> Quantity:
        """The quantity in base units."""
        return Quantity(self.value * factor, self.source, self.certainty)


def _one(**units: tuple[Number | None, float]) -> Quantity:
    """The single number among several units of one quantity, in base units."""
    given = [number.scaled(factor) for number, factor in units.values() if number is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(units)}")
    return given[0]


class DeviceEntry(Section):
    """The device of a topology file."""

    name: str
    """Name for people."""
    kind: DeviceKind
    """cuda, npu, tpu or cpu."""
    reported_as: tuple[str, ...] = ()
    """Globs over the name that nvidia-smi or npu-smi reports; empty: never detected."""
    peak_tflops: dict[str, Number] = Field(min_length=1)
    """Dense peak TFLOP/s by dtype name (bfloat16, float16, float32, float64, float8_e4m3fn)."""
    memory_gb: Number | None = None
    """Capacity in GB."""
    memory_gib: Number | None = None
    """Capacity in GiB."""
    memory_gb_s: Number
    """Memory bandwidth in GB/s."""

    def resolve(self) -> Device:
        """The device card in base units."""
        memory = _one(memory_gb=(self.memory_gb, GB), memory_gib=(self.memory_gib, GiB))
        return Device(
            name=self.name,
            kind=self.kind,
            peak_flops={d: n.scaled(TFLOP) for d, n in self.peak_tflops.items()},
            memory_bytes=memory,
            memory_bytes_s=self.memory_gb_s.scaled(GB),
            reported_as=self.reported_as,
        )

    @model_validator(mode="after")
    def _resolvable(self) -> DeviceEntry:
        self.resolve()
        return self


class TierEntry(Section):
    """One tier of a topology file."""

    name: str
    """node, supernode, pod, cluster or host."""
    size: int = Field(ge=0)
    """Devices in one domain; 0 is unlimited."""
    kind: TierKind
    """full_mesh, switch, torus or host."""
    gb_s: Number | None = None
    """GB/s per device and direction."""
    gbit_s: Number | None = None
    """The same in Gb/s, as network cards are sold."""
    latency_us: Number
    """Latency of one message in us."""
    shares_links: bool = False
    """Whether the tier uses the same links as the next inner one."""

    def resolve(self) -> Tier:
        """The tier in base units."""
        rate = _one(gb_s=(self.gb_s, GB), gbit_s=(self.gbit_s, GB / 8))
        latency = self.latency_us.scaled(1e-6)
        return Tier(self.name, self.size, rate, latency, self.kind, self.shares_links)

    @model_validator(mode="after")
    def _resolvable(self) -> TierEntry:
        self.resolve()
        return self


class PoolEntry(Section):
    """One memory pool of a topology file."""

    kind: Literal["dram", "pool", "flash"]
    """dram of the host, pool shared over the fabric, or flash."""
    capacity_gb: Number | None = None
    """Capacity of one pool in GB."""
    capacity_gib: Number | None = None
    """Capacity of one pool in GiB."""
    gb_s: Number
    """GB/s per device and direction."""
    shared_by: int = Field(ge=1)
    """Devices that share one pool."""
    total_gb_s: Number | None = None
    """GB/s of the pool itself, reads and writes of all devices together. None: never what limits."""

    def resolve(self) -> MemoryPool:
        """The pool in base units."""
        size = _one(capacity_gb=(self.capacity_gb, GB), capacity_gib=(self.capacity_gib, GiB))
        total = None if self.total_gb_s is None else self.total_gb_s.scaled(GB)
        return MemoryPool(self.kind, size, self.gb_s.scaled(GB), self.shared_by, total)

    @model_validator(mode="after")
    def _resolvable(self) -> PoolEntry:
        self.resolve()
        return self


class TopologyFile(Section):
    """A topology file: one kind of device, tiers inner to outer, memory pools."""

    name: str
    """Name of the machine."""
    aliases: tuple[str, ...] = ()
    """Other names of a preset."""
    description: str
    """One sentence for people."""
    num_devices: int = Field(ge=1)
    """Devices to plan for when nothing else is said."""
    device: DeviceEntry
    """The device card."""
    tiers: tuple[TierEntry, ...] = Field(min_length=1)
    """Interconnect levels, inner to outer."""
    pools: tuple[PoolEntry, ...] = ()
    """Memory beyond the devices' own."""

    @model_validator(mode="after")
    def _nested(self) -> TopologyFile:
        inner = 1
        for i, tier in enumerate(self.tiers):
            if tier.size == 0:
                if i + 1 < len(self.tiers):
                    raise ValueError(f"the unlimited tier `{tier.name}` is not the outermost")
            elif tier.size <= inner - (i == 0) or tier.size % inner:
                raise ValueError(
                    f"the tier `{tier.name}` has size {tier.size}, not a larger multiple of the inner size {inner}"
                )
            inner = tier.size or inner
        if self.tiers[0].shares_links:
            raise ValueError(
                f"the innermost tier `{self.tiers[0].name}` has no inner links to share"
            )
        last = self.tiers[-1].size
        if last and self.num_devices > last:
            raise ValueError(f"num_devices {self.num_devices} exceeds the outermost tier of {last}")
        return self

    def resolve(self) -> Supernode:
        """The machine in base units."""
        return Supernode(
            name=self.name,
            description=self.description,
            num_devices=self.num_devices,
            device=self.device.resolve(),
            tiers=tuple(tier.resolve() for tier in self.tiers),
            pools=tuple(pool.resolve() for pool in self.pools),
        )
