"""Topology files: YAML in vendor units, each number with its source, validated and converted to base units.

Rates are in TFLOP/s and GB/s (10**9 bytes/s), links optionally in Gb/s, latencies in us. Capacities are in GB (10**9)
or GiB (2**30), as in the source. The presets in `topology/presets` are examples.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hyper_parallel.config import Section
from hyper_parallel.topology._supernode import Certainty, Device, MemoryPool, Quantity, Supernode, Tier
from hyper_parallel.units import GB, TFLOP, GiB

DeviceKind = Literal["cuda", "npu", "tpu", "cpu"]
TierKind = Literal["full_mesh", "switch", "torus", "host"]

_LARGEST = 1e12
"""Largest accepted number in the unit of its key, and inverse of the smallest one."""
_MOST_DEVICES = 2**24
"""Maximum number of devices in a machine or tier."""


class Number(Section):
    """`Quantity` in a topology file. The key states the unit, such as `memory_gb_s`."""

    value: float = Field(gt=0, ge=1 / _LARGEST, le=_LARGEST)
    source: str = Field(min_length=1)
    certainty: Certainty

    def scaled(self, factor: float) -> Quantity:
        """Return the quantity in base units, its value multiplied by `factor`."""
        return Quantity(self.value * factor, self.source, self.certainty)


def _one(**units: tuple[Number | None, float]) -> Quantity:
    """Return the only number that is not None, in base units; raise ValueError for none or several.

    Arguments are pairs of number and factor to base units, by key.
    """
    values = [number.scaled(factor) for number, factor in units.values() if number is not None]
    if len(values) != 1:
        raise ValueError(f"give exactly one of {', '.join(units)}")
    return values[0]


class _Entry(Section):
    def resolve(self) -> object:
        """Return the section's value in base units."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        self.resolve()
        return self


class DeviceEntry(_Entry):
    """`Device` in a topology file, with its memory in GB or GiB."""

    name: str
    kind: DeviceKind
    reported_as: tuple[str, ...] = ()
    peak_tflops: dict[str, Number] = Field(min_length=1)
    memory_gb: Number | None = None
    memory_gib: Number | None = None
    memory_gb_s: Number

    def resolve(self) -> Device:
        """Return the device in base units."""
        return Device(
            name=self.name,
            kind=self.kind,
            peak_flops={d: n.scaled(TFLOP) for d, n in self.peak_tflops.items()},
            memory_bytes=_one(memory_gb=(self.memory_gb, GB), memory_gib=(self.memory_gib, GiB)),
            memory_bytes_s=self.memory_gb_s.scaled(GB),
            reported_as=self.reported_as,
        )


class TierEntry(_Entry):
    """`Tier` in a topology file, with its links in GB/s, or in Gb/s as for network cards."""

    name: str
    size: int = Field(ge=0, le=_MOST_DEVICES)
    kind: TierKind
    gb_s: Number | None = None
    gbit_s: Number | None = None
    latency_us: Number
    shares_links: bool = False

    def resolve(self) -> Tier:
        """Return the tier in base units."""
        rate = _one(gb_s=(self.gb_s, GB), gbit_s=(self.gbit_s, GB / 8))
        latency = self.latency_us.scaled(1e-6)
        return Tier(self.name, self.size, rate, latency, self.kind, self.shares_links)


class PoolEntry(_Entry):
    """`MemoryPool` in a topology file, with its capacity in GB or GiB."""

    kind: Literal["dram", "pool", "flash"]
    capacity_gb: Number | None = None
    capacity_gib: Number | None = None
    gb_s: Number
    shared_by: int = Field(ge=1, le=_MOST_DEVICES)
    total_gb_s: Number | None = None

    def resolve(self) -> MemoryPool:
        """Return the pool in base units."""
        size = _one(capacity_gb=(self.capacity_gb, GB), capacity_gib=(self.capacity_gib, GiB))
        total = None if self.total_gb_s is None else self.total_gb_s.scaled(GB)
        return MemoryPool(self.kind, size, self.gb_s.scaled(GB), self.shared_by, total)


class TopologyFile(Section):
    """Content of a topology file: a `Supernode`, and for a preset its aliases."""

    name: str
    aliases: tuple[str, ...] = ()
    description: str
    num_devices: int = Field(ge=1, le=_MOST_DEVICES)
    device: DeviceEntry
    tiers: tuple[TierEntry, ...] = Field(min_length=1)
    pools: tuple[PoolEntry, ...] = ()

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
            name = self.tiers[0].name
            raise ValueError(f"the innermost tier `{name}` cannot set shares_links, because no tier is inside it")
        last = self.tiers[-1].size
        if last and self.num_devices > last:
            raise ValueError(f"num_devices {self.num_devices} exceeds {last}, the size of the outermost tier")
        return self

    def resolve(self) -> Supernode:
        """Return the machine in base units."""
        return Supernode(
            name=self.name,
            description=self.description,
            num_devices=self.num_devices,
            device=self.device.resolve(),
            tiers=tuple(tier.resolve() for tier in self.tiers),
            pools=tuple(pool.resolve() for pool in self.pools),
        )
