"""Sets of results to recompute, chosen by seconds per byte only, for comparison; the planner does not use them."""

from __future__ import annotations

import numpy as np

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory import MemoryMachine, UseDef
from hyper_parallel.memory.def_use import live_bytes
from hyper_parallel.memory.recompute import ChainFinder, longest_gap


def recompute_density(finder: ChainFinder) -> dict[int, float]:
    """Return the seconds per freed byte of every storage that may be recomputed after its longest idle gap."""
    sizes = finder.program.sizes
    result = ((s, finder.for_longest_gap(s)) for s in range(len(sizes)))
    return {s: chain.seconds / sizes[s] for s, chain in result if chain is not None}


def recompute_sets(program: MemoryProgram, machine: MemoryMachine, density: dict[int, float]) -> list[list[int]]:
    """Return sets of storages to recompute, for four limits on seconds per byte.

    The limits are none at all, far below a copy's, a copy's, and unlimited.
    """
    ranked = sorted(density, key=lambda s: (density[s], -program.sizes[s], s))
    transfer = 1 / machine.prefetch.bytes_s
    limits = (transfer / 8, transfer, float("inf"))
    return [[], *([s for s in ranked if density[s] <= limit] for limit in limits)]


def cheapest_at_peak(program: MemoryProgram, chains: UseDef, density: dict[int, float], allowed_s: float) -> list[int]:
    """Return storages whose recomputation lowers the memory peak, cheapest per byte first, within a time limit.

    Storages that are not idle at the peak are left out.

    Args:
        program: Sizes and seconds.
        chains: Accesses in the planned order.
        density: Seconds per freed byte of each storage that may be recomputed.
        allowed_s: Maximum total seconds of recomputation.
    """
    gaps = {s: gap for s in density if (gap := longest_gap(chains.uses[s])) is not None}
    items = sorted(gaps, key=lambda s: (density[s], -program.sizes[s], s))
    low = np.array([gaps[s][0] + 1 for s in items])
    high = np.array([gaps[s][1] for s in items])
    cost = np.array([density[s] * program.sizes[s] for s in items])
    free = np.ones(len(items), bool)
    profile = live_bytes(program, chains.uses)
    chosen: list[int] = []
    while items and len(profile):
        at = int(np.argmax(profile))
        if profile[at] <= 0:
            break
        covers = np.flatnonzero(free & (low <= at) & (at < high) & (cost <= allowed_s))
        if not len(covers):
            profile[at] = 0  # nothing lowers it any more
            continue
        pick = int(covers[0])
        free[pick] = False
        allowed_s -= float(cost[pick])
        chosen.append(items[pick])
        profile[low[pick] : high[pick]] -= program.sizes[items[pick]]
    return chosen
