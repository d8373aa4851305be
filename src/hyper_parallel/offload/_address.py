"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard. First fit comes within a few percent of the live peak (the lower bound); what
ended above it is then placed earlier and the fit repeated. What is there all the time lies at the bottom, in an order
that depends on nothing else. A storage that is there at both ends of the step but not in between has one address at
both: the next step finds it where this one leaves it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from hyper_parallel.ir import Extent, MemoryPlan
from hyper_parallel.offload._exact import Packing, search
from hyper_parallel.offload._first_fit import SEARCHED, Fitting, Item

_NODES = 400


def assign_addresses(
    stays: Sequence[Extent], sizes: Sequence[int], wanted_bytes: int = 0
) -> tuple[tuple[Extent, ...], int]:
    """Offsets such that two stays that overlap in time never overlap in space.

    Args:
        stays: Intervals of actions, one per stay.
        sizes: Bytes in the arena by storage index.
        wanted_bytes: An arena of this size need not become smaller, and what is far from it is given up; 0: the
            smallest is wanted.

    Returns:
        The stays with offsets, in the given order, and the arena's bytes.
    """
    end = max((stay.stop for stay in stays), default=0)
    offset: dict[Extent, int] = {}
    bottom = 0
    always = [stay for stay in stays if stay.start == 0 and stay.stop == end]
    for stay in sorted(always, key=lambda stay: (-sizes[stay.storage], stay.storage)):
        offset[stay] = bottom
        bottom += sizes[stay.storage]
    items = _items([stay for stay in stays if stay not in offset], end)
    arena = 0
    if items:
        offsets, arena = _placed(items, sizes, bottom, wanted_bytes)
        for item, at in zip(items, offsets, strict=True):
            offset.update(dict.fromkeys(item, bottom + int(at)))
    placed = tuple(Extent(e.storage, e.start, e.stop, offset[e]) for e in stays)
    return placed, bottom + arena


def can_fit(stays: Sequence[Extent], sizes: Sequence[int], limit_bytes: int) -> bool | None:
    """Whether there are addresses for these stays below a limit; None when the search was given up.

    Args: as those of `assign_addresses`.
    """
    end = max((stay.stop for stay in stays), default=0)
    moving = [stay for stay in stays if stay.start > 0 or stay.stop < end]
    bottom = sum(sizes[stay.storage] for stay in stays) - sum(sizes[s.storage] for s in moving)
    items = _items(moving, end)
    if not items:
        return bottom <= limit_bytes
    result = _searched(items, sizes, limit_bytes - bottom)
    if result.offsets is not None:
        return True
    return False if result.ended else None


def wrong_address(plan: MemoryPlan) -> str | None:
    """A sentence when something in the plan has no address, or a wrong one; None when all is well."""
    placed = [(e.storage, e.start, e.stop) for e in plan.addresses]
    if placed != [(e.storage, e.start, e.stop) for e in plan.replayed.residency]:
        return "the addresses are not those of its actions"
    unit = plan.program.address_bytes
    if any(e.offset_bytes % unit for e in plan.addresses):
        return f"an address is no multiple of {unit}"
    if any(
        len({stay.offset_bytes for stay in item}) > 1
        for item in _items(plan.addresses, len(plan.actions))
    ):
        return "a storage ends the step at another address than it begins the next one"
    return find_overlap(plan.addresses, plan.program.spans, plan.arena_bytes)


def find_overlap(stays: Sequence[Extent], sizes: Sequence[int], arena_bytes: int) -> str | None:
    """A sentence when two stays overlap in time and space or one ends above the arena; None when all is well."""
    real = [e for e in stays if sizes[e.storage]]
    events = sorted(
        [(e.start, 1, e.offset_bytes, sizes[e.storage]) for e in real]
        + [(e.stop, 0, e.offset_bytes, sizes[e.storage]) for e in real]
    )
    taken: list[tuple[int, int]] = []  # (offset, end) of what is there now, ascending and disjoint
    for _, begins, offset, size in events:
        block = (offset, offset + size)
        at = bisect_left(taken, block)
        if not begins:
            del taken[at]
            continue
        below = taken[at - 1][1] if at else 0
        above = taken[at][0] if at < len(taken) else arena_bytes
        if offset < below or block[1] > above:
            return f"two stays share address {offset}, or one ends above the arena"
        insort(taken, block)
    return None


def _items(stays: Sequence[Extent], end: int) -> list[Item]:
    """Stays one by one, but the first and the last of a storage that is there at both ends of the step together."""
    first = {stay.storage: stay for stay in stays if stay.start == 0 and stay.stop < end}
    last = {
        stay.storage: stay
        for stay in stays
        if stay.stop == end and stay.start > 0 and stay.storage in first
    }
    around = {stay: (last[s], stay) for s, stay in first.items() if s in last}
    ends = set(last.values())
    return [around.get(stay, (stay,)) for stay in stays if stay not in ends]


def _placed(
    items: Sequence[Item], sizes: Sequence[int], bottom: int, wanted_bytes: int
) -> tuple[np.ndarray, int]:
    """An offset above the bottom for every item, and the end of the highest one."""
    fitting = Fitting(items, sizes, bottom, wanted_bytes)
    best = fitting.best
    if best[1] > fitting.good and len(items) <= SEARCHED:
        result = _searched(items, sizes, int(fitting.good))
        if result.offsets is not None:
            size = np.array([sizes[item[0].storage] for item in items])
            return result.offsets, int((result.offsets + size).max())
    return best


def _searched(items: Sequence[Item], sizes: Sequence[int], limit: int) -> Packing:
    """Search for offsets below a limit."""
    real = [i for i, item in enumerate(items) if sizes[item[0].storage]]
    times = [[(stay.start, stay.stop) for stay in items[i]] for i in real]
    result = search(times, [sizes[items[i][0].storage] for i in real], limit, _NODES)
    if result.offsets is None:
        return result
    offsets = np.zeros(len(items), np.int64)
    offsets[real] = result.offsets
    return Packing(offsets, result.ended)
