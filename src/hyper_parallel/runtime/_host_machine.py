"""Device, host memory and files of a topology, as a memory plan sees them."""

from __future__ import annotations

from typing import Final

from hyper_parallel.memory import Channel, MemoryMachine
from hyper_parallel.topology import Supernode

FLASH_BYTES_S: Final = 1e9
"""One NVMe drive, a general figure, where the topology names no flash."""


def host_machine(node: Supernode, dram_bytes: int | None, flash: bool) -> MemoryMachine:
    """Device, DRAM and, where wanted, files, with the copies between them at the topology's rates.

    Args:
        node: The topology.
        dram_bytes: Bytes of DRAM; None: unlimited.
        flash: Whether there is a tier of files.
    """
    # Where the topology names no host memory, a copy reads and writes the only one that it names.
    host = Channel(node.host_bytes_s or node.device.memory_bytes_s.value / 2)
    drives = [pool.bytes_s.value for pool in node.pools if pool.kind == "flash"]
    drive = Channel(drives[0] if drives else FLASH_BYTES_S) if flash else None
    return MemoryMachine(host, host, drive, drive, dram_bytes=dram_bytes)
