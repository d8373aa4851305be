"""Number of local ranks that this machine can run at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hyper_parallel.topology.cpu_machine import free_memory_bytes, read_cpu
from hyper_parallel.units import GiB, format_bytes

CPU_RANK_BYTES: Final = int(0.4 * GiB)
"""Bytes of memory of a CPU rank without its model: library pages that it writes, buffers of gloo, threads."""

_CPU_RANKS: Final = 16
_CPU_RANKS_PER_CORE: Final = 4
"""CPU ranks that may start on any machine, and CPU ranks per core on machines with more cores."""


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """Largest number of local ranks that this machine can run.

    Attributes:
        num_ranks: Number of ranks, at least one.
        limit: Resource that limits the number, as a phrase for errors.
        is_cpu: True if ranks share the CPU, False if each rank needs an accelerator.
    """

    num_ranks: int
    limit: str
    is_cpu: bool


def rank_capacity(num_accelerators: int) -> RankCapacity:
    """Return the number of ranks that this machine can run: one per accelerator, or as CPU and memory allow.

    Args:
        num_accelerators: Accelerators that ranks may use; 0: ranks compute on the CPU.
    """
    if num_accelerators:
        return RankCapacity(num_accelerators, f"accelerators: {num_accelerators}", is_cpu=False)
    cores, free = read_cpu().cores, free_memory_bytes()
    by_cores = max(_CPU_RANKS, _CPU_RANKS_PER_CORE * cores)
    by_memory = max(1, free // CPU_RANK_BYTES)
    if by_memory < by_cores:
        each = format_bytes(CPU_RANK_BYTES)
        return RankCapacity(
            by_memory, f"{format_bytes(free)} of free memory, {each} per rank", is_cpu=True
        )
    return RankCapacity(by_cores, f"{cores} cores", is_cpu=True)
