"""Memory tiers of a topology in the form of a memory plan's machine: device, host memory and files."""

from __future__ import annotations

from typing import Final

from hyper_parallel.memory import Channel, MemoryMachine
from hyper_parallel.topology import Supernode

FLASH_BYTES_S: Final = 1e9
"""Rate of one NVMe drive, a generic figure, used when the topology names no flash."""


def host_machine(node: Supernode, dram_bytes: int | None, flash: bool) -> MemoryMachine:
    """Return device, DRAM and an optional file tier, with copies at the rates of the topology.

    Args:
        node: The topology.
        dram_bytes: Bytes of DRAM; None: unlimited.
        flash: Add a tier of files.
    """
    # Without host memory in the topology, a copy reads and writes the device's memory.
    host = Channel(node.host_bytes_s or node.device.memory_bytes_s.value / 2)
    drives = [pool.bytes_s.value for pool in node.pools if pool.kind == "flash"]
    drive = Channel(drives[0] if drives else FLASH_BYTES_S) if flash else None
    return MemoryMachine(host, host, drive, drive, dram_bytes=dram_bytes)
