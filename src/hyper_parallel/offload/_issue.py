"""When reloads are issued: as late as possible on serial channels, computed backwards from the deadlines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryActionKind, MemoryProgram, MemoryTier
from hyper_parallel.offload._machine import MemoryMachine


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the step in which a storage is not on the device.

    Attributes:
        storage: Storage index.
        first: Position after which it leaves; -1 when it starts the step away.
        last: Position before which it must be back; the number of operators when it ends the step away.
        tier: Where it goes.
    """

    storage: int
    first: int
    last: int
    tier: MemoryTier


def issue_positions(
    gaps: Sequence[Gap],
    starts_s: np.ndarray,
    program: MemoryProgram,
    machine: MemoryMachine,
    window: float | None = None,
) -> list[tuple[int, Gap, MemoryActionKind]]:
    """When to issue every reload: as late as possible on one serial channel per direction, deadlines kept.

    Args:
        gaps: What comes back.
        starts_s: Start of each position without stalls.
        program: Sizes.
        machine: Channels.
        window: No copy starts earlier than this many of its own durations before its deadline. On a channel that is
            asked for more than it can carry, the serial schedule alone would fetch everything at once.

    Returns:
        (position before which to issue, gap, prefetch or copy_in), in issue order.
    """
    events: list[tuple[int, int, Gap, MemoryActionKind]] = []
    free_s = {"prefetch": float("inf"), "copy_in": float("inf")}
    due = sorted((g for g in gaps if g.last < len(starts_s)), key=lambda g: -g.last)
    times = starts_s.tolist()
    for rank, gap in enumerate(due):
        num_bytes = program.storages[gap.storage].num_bytes
        deadline = times[gap.last]
        kinds: tuple[MemoryActionKind, ...] = ("prefetch",)
        if gap.tier == "flash":
            kinds = ("prefetch", "copy_in")
        for kind in kinds:
            seconds = machine.channel(kind).seconds(num_bytes)
            begin = min(deadline, free_s[kind]) - seconds
            if window is not None:
                begin = max(begin, deadline - window * seconds)
            free_s[kind] = deadline = begin
            position = max(bisect_right(times, begin) - 1, gap.first + 1, 0)
            events.append((min(position, gap.last), -2 * rank - (kind == "copy_in"), gap, kind))
    events.sort(key=lambda e: (e[0], e[1]))
    return [(position, gap, kind) for position, _, gap, kind in events]
