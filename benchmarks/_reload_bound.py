"""Lower bound on the memory peak of any plan for an operator order, because evicted bytes must return before use.

The bound considers one position at a time. Bytes count as resident from the issue of their copy, so it also holds for
copies that begin in the previous step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.def_use import UseDef, use_definitions
from hyper_parallel.memory.memory_machine import MemoryMachine


@dataclass(frozen=True)
class ReloadBound:
    """Lower bound, and the position in the order that determines it.

    Attributes:
        num_bytes: Lower bound of the peak of every plan of this order within the time limit.
        position: Position that determines the bound.
        needed_bytes: Bytes that are live at the position and used there or later.
        reloaded_bytes: Bytes that the channel can reload between the position and the furthest next use.
        recomputed_bytes: Maximum bytes that recomputation can restore in the allowed time.
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
    """Return a lower bound on the peak of all plans for this order whose step takes at most `limit_s`.

    Evicted bytes that are used after a position must be reloaded or recomputed before that use. The channel can reload
    them until the last operator that needs any of them starts. Recomputing a result costs at least the seconds of its
    operator, and all recomputation takes at most the time by which `limit_s` exceeds the step without stalls. Bytes
    without a later use may be evicted at no cost.

    Args:
        program: Operators with their seconds.
        machine: Machine with the prefetch channel.
        order: Order of the operators.
        limit_s: Maximum seconds of the step.
        recompute: Whether plans may recompute results.
    """
    chains = use_definitions(program, order)
    n = len(order)
    live = np.zeros(n + 1, np.int64)
    for s, storage in enumerate(program.storages):
        uses = chains.uses[s]
        if uses:  # a storage without uses may stay off the device
            live[0 if storage.at_start else uses[0]] += program.sizes[s]
            live[uses[-1] + 1] -= program.sizes[s]
    live_bytes = np.cumsum(live[:-1])
    seconds = [program.operators[i].seconds for i in order]
    ends_s = np.cumsum(seconds)
    allowed_s = max(limit_s - program.seconds, 0.0)
    # All live bytes of a position are back by the start of their furthest next use.
    furthest = _furthest_next_use(program, chains, n)
    carry_s = np.maximum(ends_s[furthest] - np.take(seconds, furthest) - ends_s + allowed_s, 0.0)
    carried = np.where(furthest > np.arange(n), carry_s * machine.prefetch.bytes_s, 0.0)
    simple = live_bytes - np.minimum(np.ceil(carried), live_bytes)
    best = ReloadBound(0, 0, 0, 0, 0)
    prices = _recompute_prices(program, chains) if recompute else []
    for position in np.argsort(-simple, kind="stable").tolist():
        if simple[position] <= best.num_bytes:
            break
        recomputed = _knapsack(chains, prices, position, allowed_s)
        result = int(simple[position]) - recomputed
        if result > best.num_bytes:
            best = ReloadBound(
                result,
                position,
                int(live_bytes[position]),
                int(live_bytes[position] - simple[position]),
                recomputed,
            )
    return best


def _furthest_next_use(program: MemoryProgram, chains: UseDef, n: int) -> np.ndarray:
    """Return, per position, the furthest next use of any live storage that is idle there; without one, the position."""
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


def _recompute_prices(program: MemoryProgram, chains: UseDef) -> list[tuple[float, int, int]]:
    """Return (seconds per byte, bytes, storage) of every result that can be recomputed, cheapest first."""
    result = []
    for s, producer in enumerate(chains.producer):
        size = program.sizes[s]
        if producer >= 0 and size:
            op = program.operators[producer]
            if op.repeatable and not op.writes:
                result.append((op.seconds / sum(program.sizes[x] for x in op.allocs), size, s))
    return sorted(result)


def _knapsack(chains: UseDef, prices: list[tuple[float, int, int]], position: int, allowed_s: float) -> int:
    """Return the maximum bytes, idle at a position, that can be recomputed within a time; fractions are allowed."""
    freed = 0.0
    for price, size, s in prices:
        uses = chains.uses[s]
        after = bisect_right(uses, position)
        if not 0 < after < len(uses) or uses[after - 1] == position:
            continue
        if price * size >= allowed_s:
            return int(freed + (allowed_s / price if price else size)) + 1
        allowed_s -= price * size
        freed += size
    return int(freed)
