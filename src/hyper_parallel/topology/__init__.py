"""Descriptions of machines for planning (`Supernode`), from YAML presets, topology files, or detection."""

from hyper_parallel.topology._supernode import Device, MemoryPool, Quantity, Supernode, Tier
from hyper_parallel.topology.cpu_machine import (
    RankCapacity,
    cache_dir,
    forget_measurements,
    rank_capacity,
    rank_threads,
)
from hyper_parallel.topology.loading import (
    Accelerator,
    detect_local,
    find_accelerators,
    is_this_machine,
    load_topology,
    preset_names,
    read_topology,
    topology_hint,
)

__all__ = [
    "Accelerator",
    "Device",
    "MemoryPool",
    "Quantity",
    "RankCapacity",
    "Supernode",
    "Tier",
    "cache_dir",
    "detect_local",
    "find_accelerators",
    "forget_measurements",
    "is_this_machine",
    "load_topology",
    "preset_names",
    "rank_capacity",
    "rank_threads",
    "read_topology",
    "topology_hint",
]
