"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard. First fit of a few stays, and piles of many (the lowest one always next), come
within a few percent of the live peak (the lower bound). What is there all the time lies at the bottom, in an order that
depends on nothing else. A storage that is there at both ends of the step but not in between has one address at both:
the next step finds it where this one leaves it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from hyper_parallel.ir import Extent, MemoryPlan

_TIGHT = 1.002  # of the live peak: an arena this close to it is not worth another order
_MANY = 3000  # items
_ROUNDS = 12  # of first fit
_CROWDED = 0.9  # stays that see this share of the live peak are placed before the others
_FORWARD = 0.65  # of its rank is left to a stay that ended too high
_CROWDS = 10  # classes of stays in piles, by the most bytes that live beside them

Item = tuple[Extent, ...]
"""Stays that share an address: one, or the last and the first of a storage that goes around."""


def assign_addresses(
    stays: Sequence[Extent], sizes: Sequence[int]
) -> tuple[tuple[Extent, ...], int]:
    """Offsets such that two stays that overlap in time never overlap in space.

    Args:
        stays: Intervals of actions, one per stay.
        sizes: Bytes in the arena by storage index.

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
    offsets, arena = _fitted(items, sizes)
    for item, at in zip(items, offsets, strict=True):
        offset.update(dict.fromkeys(item, bottom + int(at)))
    placed = tuple(Extent(e.storage, e.start, e.stop, offset[e]) for e in stays)
    return placed, bottom + arena


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


def _fitted(items: Sequence[Item], sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """An offset for every item, and the end of the highest one.

    First fit, the largest first; then from the peak outwards, and again with all that ended above the live peak moved
    towards the front. Many items are piled up instead, which takes a fifth of the time and leaves smaller gaps there.
    Source: squeaky wheel optimization, Joslin and Clements 1999.
    """
    size = np.array([sizes[item[0].storage] for item in items], np.int64)
    times = np.array([sum(stay.stop - stay.start for stay in item) for item in items], np.int64)
    stays = [(at, stay) for at, item in enumerate(items) for stay in item]
    owner = np.array([at for at, _ in stays], np.int64)
    start, stop = (
        np.array([getattr(stay, end) for _, stay in stays], np.int64) for end in ("start", "stop")
    )
    clashes = []
    for item in items:
        clash = np.zeros(len(stays), bool)
        for stay in item:
            clash |= (start < stay.stop) & (stop > stay.start)
        clashes.append(owner[clash])
    change = np.zeros(int(stop.max(initial=0)) + 1, np.int64)
    np.add.at(change, start, size[owner])
    np.add.at(change, stop, -size[owner])
    live = change.cumsum()
    floor = int(live.max())
    if len(items) > _MANY:
        return _by_piles(items, clashes, size, times, live)
    peak = int(live.argmax())

    def away(i: int) -> tuple[int, ...]:
        first, last = items[i][0].start, items[i][-1].stop
        if len(items[i]) > 1:  # around the end of the step
            last = len(live)
        distance = max(0, first - peak, peak + 1 - last)
        crowded = int(live[first : max(last, first + 1)].max()) >= _CROWDED * floor
        return int(not crowded), distance, -int(size[i] if distance else times[i])

    order: list[int] = np.lexsort((-times, -size)).tolist()
    best = np.zeros(len(items), np.int64), int(size.sum()) + 1
    for count in range(_ROUNDS):
        if count == 1:
            order = sorted(range(len(items)), key=away)
        low = _first_fit(clashes, size, order)
        best = min(best, (low, int((low + size).max(initial=0))), key=lambda fit: fit[1])
        if best[1] <= _TIGHT * floor:
            break
        over = low + size > floor
        rank = {i: at * _FORWARD if over[i] else float(at) for at, i in enumerate(order)}
        order = sorted(order, key=rank.__getitem__)
    return best


def _by_piles(
    items: Sequence[Item],
    clashes: Sequence[np.ndarray],
    size: np.ndarray,
    times: np.ndarray,
    live: np.ndarray,
) -> tuple[np.ndarray, int]:
    """The best of piles in three orders of preference."""
    floor = int(live.max())
    most = [
        max(int(live[e.start : max(e.stop, e.start + 1)].max()) for e in item) for item in items
    ]
    crowded = np.array(most, np.int64) * _CROWDS // max(floor, 1)
    orders = (  # with the part of the live peak by which the first is preferred to the last
        (np.lexsort((-times * size, -crowded)), 0.005),
        (np.lexsort((-size, -times)), 0.015),
        (np.argsort(-times * np.sqrt(size), kind="stable"), 0.03),
    )
    best = np.zeros(len(items), np.int64), int(size.sum()) + 1
    for order, ahead in orders:
        low = _piled(clashes, size, order, ahead * floor)
        best = min(best, (low, int((low + size).max(initial=0))), key=lambda fit: fit[1])
        if best[1] <= _TIGHT * floor:
            break
    return best


def _piled(
    clashes: Sequence[np.ndarray], size: np.ndarray, order: np.ndarray, ahead: float
) -> np.ndarray:
    """Every item on top of all that were placed before and are there at the same time; the lowest one is the next.

    Args:
        clashes: By item, those that are there at the same time.
        size: Bytes of each.
        order: The items, preferred ones first.
        ahead: Bytes by which the first of the order may lie higher than the last and still be placed before it.
    """
    low = np.zeros(len(size), np.int64)
    later = np.empty(len(size))
    later[order] = np.linspace(0.0, ahead, len(size))
    key = later.copy()  # infinite once it is placed
    for _ in range(len(size)):
        i = int(key.argmin())
        top = low[i] + size[i]
        key[i] = np.inf
        above = clashes[i]
        above = above[(low[above] < top) & (key[above] < np.inf)]
        low[above] = top
        key[above] = top + later[above]
    return low


def _first_fit(clashes: Sequence[np.ndarray], size: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Every item, in an order, at the lowest address that is free during all of its stays."""
    low, high = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    for i in order:
        there = clashes[i][high[clashes[i]] > 0]
        there = there[np.argsort(low[there], kind="stable")]
        # Gaps between neighbours: from the highest end so far to the next start.
        tops = np.maximum.accumulate(np.concatenate(([0], high[there])))
        fits = np.flatnonzero(low[there] - tops[:-1] >= size[i])
        low[i] = tops[fits[0]] if len(fits) else tops[-1]
        high[i] = low[i] + size[i]
    return low
