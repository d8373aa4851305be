"""What no plan can beat on a graph of any size: what is away must come back before it is used.

A bound of one position at a time. Bytes count as on the device from when their copy is issued, so it holds for copies
that begin in the step before as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.def_use import UseDef, use_definitions
from hyper_parallel.memory.host_updates import device_part
from hyper_parallel.memory.memory_machine import MemoryMachine


@dataclass(frozen=True)
class ReloadBound:
    """The bound, and the position it comes from.

    Attributes:
        num_bytes: No plan of this order has a lower peak within the time limit.
        position: Where that is decided.
        needed_bytes: What lives there and is used there or later.
        reloaded_bytes: What the channel carries from there to the last use of any of it.
        recomputed_bytes: What the allowed time gives again at most, by recomputation.
    """

    num_bytes: int
    position: int
    needed_bytes: int
    reloaded_bytes: int
    recomputed_bytes: int


def reload_bound(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    limit_s: float,
    *,
    recompute: bool = False,
) -> ReloadBound:
    """Bytes below which no plan of this order gets within `limit_s`.

    What is away while a position runs and is used after it must come back before that use: the channel has the seconds
    up to the start of the last operator that needs any of it. Or it is computed again: a result costs at least the
    seconds of its own operator, and all of them together what `limit_s` allows beyond the step without stalls (the
    same seconds are counted for the channel as well, which keeps this a bound). What is never used again may be away
    for nothing.

    Args:
        program: Operators with their seconds.
        machine: Its prefetch channel.
        order: Order of the operators.
        limit_s: Seconds the step may take.
        recompute: Results may be computed again.
    """
    program = device_part(program, machine)
    chains = use_definitions(program, order)
    n = len(order)
    live = np.zeros(n + 1, np.int64)
    for s, storage in enumerate(program.storages):
        uses = chains.uses[s]
        if uses:  # else it may live elsewhere for the whole step
            live[0 if storage.at_start else uses[0]] += program.sizes[s]
            live[uses[-1] + 1] -= program.sizes[s]
    held = np.cumsum(live[:-1])
    seconds = [program.operators[i].seconds for i in order]
    ends_s = np.cumsum(seconds)
    allowed_s = max(limit_s - program.seconds, 0.0)
    # Nothing live at a position is needed later than where the furthest next use begins.
    furthest = _furthest_next_use(program, chains, n)
    carry_s = np.maximum(ends_s[furthest] - np.take(seconds, furthest) - ends_s + allowed_s, 0.0)
    carried = np.where(furthest > np.arange(n), carry_s * machine.prefetch.bytes_s, 0.0)
    simple = held - np.minimum(np.ceil(carried), held)
    best = ReloadBound(0, 0, 0, 0, 0)
    dense = _dense(program, chains) if recompute else []
    for at in np.argsort(-simple, kind="stable").tolist():
        if simple[at] <= best.num_bytes:
            break
        recomputed = _knapsack(chains, dense, at, allowed_s)
        result = int(simple[at]) - recomputed
        if result > best.num_bytes:
            best = ReloadBound(result, at, int(held[at]), int(held[at] - simple[at]), recomputed)
    return best


def _furthest_next_use(program: MemoryProgram, chains: UseDef, n: int) -> np.ndarray:
    """For every position, the furthest of the next uses of what lives there and may be away; itself when none."""
    furthest = np.arange(n)
    for s, storage in enumerate(program.storages):
        uses = chains.uses[s]
        if not uses or not program.sizes[s]:
            continue
        before = -1 if storage.at_start else uses[0]
        for use in uses:
            if use > before + 1:
                span = slice(before + 1, use)
                furthest[span] = np.maximum(furthest[span], use)
            before = use
    return furthest


def _dense(program: MemoryProgram, chains: UseDef) -> list[tuple[float, int, int]]:
    """(seconds per byte, bytes, storage) of what may be computed again, cheapest first."""
    result = []
    for s, maker in enumerate(chains.maker):
        size = program.sizes[s]
        if maker >= 0 and size:
            op = program.operators[maker]
            if op.repeatable and not op.writes:
                result.append((op.seconds / sum(program.sizes[x] for x in op.allocs), size, s))
    return sorted(result)


def _knapsack(
    chains: UseDef, dense: list[tuple[float, int, int]], position: int, allowed_s: float
) -> int:
    """Most bytes that lie idle at a position and can be given again within a time, in fractions."""
    freed = 0.0
    for price, size, s in dense:
        uses = chains.uses[s]
        at = bisect_right(uses, position)
        if not 0 < at < len(uses) or uses[at - 1] == position:
            continue
        if price * size >= allowed_s:
            return int(freed + (allowed_s / price if price else size)) + 1
        allowed_s -= price * size
        freed += size
    return int(freed)
