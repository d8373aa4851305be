"""When copies may be issued.

Reloads as late as possible on serial channels, computed backwards from the deadlines; stores from when their content
is final.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.ir import MemoryActionKind, MemoryProgram, MemoryTier
from hyper_parallel.memory.memory_machine import MemoryMachine

if TYPE_CHECKING:
    from hyper_parallel.memory.recompute import Recomputes


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


@dataclass(slots=True)
class Pending:
    """A running copy out of the device (or out of DRAM) that a detach waits for."""

    storage: int
    into: MemoryTier
    leaves: bool  # False: the storage was needed again before the copy was done


def issue_positions(
    gaps: Sequence[Gap],
    starts_s: np.ndarray,
    program: MemoryProgram,
    machine: MemoryMachine,
    ready: Callable[[Gap], int] = lambda gap: gap.first + 1,
) -> list[tuple[int, Gap, MemoryActionKind]]:
    """When to issue every reload: as late as possible on one serial channel per direction, deadlines kept.

    Args:
        gaps: What comes back.
        starts_s: When each position is expected to start.
        program: Sizes.
        machine: Channels.
        ready: Position from which on a gap's reload may be issued.

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
            free_s[kind] = deadline = begin
            position = max(bisect_right(times, begin) - 1, ready(gap), 0)
            events.append((min(position, gap.last), -2 * rank - (kind == "copy_in"), gap, kind))
    events.sort(key=lambda e: (e[0], e[1]))
    return [(position, gap, kind) for position, _, gap, kind in events]


def early_stores(
    gaps: Sequence[Gap],
    program: MemoryProgram,
    num_positions: int,
    recomputes: Recomputes,
    writes: Sequence[Sequence[int]],
) -> list[list[Gap]]:
    """Per position, what has its content from there on and leaves later: its copy may run before it leaves.

    Args:
        gaps: What leaves.
        program: Storages.
        num_positions: Length of the order.
        recomputes: Accesses; what is dropped to be made again must not be under a copy then, so it is left out.
        writes: Positions that change each storage after it was made, ascending.
    """
    early: list[list[Gap]] = [[] for _ in range(num_positions)]
    dropped = {*recomputes.gaps, *(h for helpers in recomputes.helpers.values() for h in helpers)}
    for g in gaps:
        uses = recomputes.uses[g.storage]
        if g.first < 0 or not uses or g.tier != "dram" or g.storage in dropped:
            continue
        changed = writes[g.storage]
        at = bisect_right(changed, g.first)
        begun = 0 if program.storages[g.storage].at_start else uses[0]
        since = changed[at - 1] if at else begun
        if since < g.first:
            early[since].append(g)
    return early
