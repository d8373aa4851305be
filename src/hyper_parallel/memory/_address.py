"""Assignment of static addresses: every live range on the device gets an offset in one buffer, the arena.

The optimal assignment is NP-hard, so offsets are found by first fit (for few live ranges) or stacking (for many). The
live peak, the maximum of bytes live at one time, is a lower bound of the arena. Ranges that cover the whole step lie at
the bottom, in an order that does not depend on other ranges. A storage that is resident at both ends of the step but
not in between has one address at both ends, where the next step finds it.

An item is one live range, or two ranges of a storage that must get the same address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from hyper_parallel.ir import Extent, MemoryPlan

_TIGHT = 1.002  # ratio of arena to live peak at which packing stops
_MANY_ITEMS = 3000  # more items are stacked instead of placed by first fit
_ROUNDS = 12  # rounds of first fit
_HOT_FRACTION = 0.9  # items that are live when this fraction of the live peak is live are placed first
_PROMOTION = 0.65  # factor on the index of an item in the order, if it ends above the live peak
_HEAT_CLASSES = 10  # number of classes of stacked items, by the most bytes that are live while they are

Item = tuple[Extent, ...]
"""Live ranges at one address: a single range, or the last and first range of a storage (see the module docstring)."""


def assign_addresses(ranges: Sequence[Extent], sizes: Sequence[int]) -> tuple[tuple[Extent, ...], int]:
    """Return offsets such that no two live ranges overlap in both time and space.

    Args:
        ranges: Live ranges, as intervals of action indices.
        sizes: Bytes of each storage, by storage index.

    Returns:
        The live ranges with offsets, in the same order, and the bytes of the arena.
    """
    end = max((e.stop for e in ranges), default=0)
    offset: dict[Extent, int] = {}
    bottom = 0
    always = [e for e in ranges if e.start == 0 and e.stop == end]
    for e in sorted(always, key=lambda e: (-sizes[e.storage], e.storage)):
        offset[e] = bottom
        bottom += sizes[e.storage]
    items = _items([e for e in ranges if e not in offset], end)
    offsets, arena = _pack(items, sizes)
    for item, low in zip(items, offsets, strict=True):
        offset.update(dict.fromkeys(item, bottom + int(low)))
    placed = tuple(Extent(e.storage, e.start, e.stop, offset[e]) for e in ranges)
    return placed, bottom + arena


def wrong_address(plan: MemoryPlan) -> str | None:
    """Return a message about an invalid address of a plan; None if all addresses are valid.

    Raises:
        MemoryPlanInvalid: HP404 for an illegal action of the plan.
    """
    placed = [(e.storage, e.start, e.stop) for e in plan.addresses]
    if placed != [(e.storage, e.start, e.stop) for e in plan.replayed.residency]:
        return "the addresses do not match the live ranges of the actions"
    unit = plan.program.address_bytes
    if any(e.offset_bytes % unit for e in plan.addresses):
        return f"an address is not a multiple of {unit}"
    items = _items(plan.addresses, len(plan.actions))
    if any(len({e.offset_bytes for e in item}) > 1 for item in items):
        return "a storage ends the step at another address than it begins the next one"
    return find_overlap(plan.addresses, plan.program.spans, plan.arena_bytes)


def find_overlap(ranges: Sequence[Extent], sizes: Sequence[int], arena_bytes: int) -> str | None:
    """Return an error message if two live ranges overlap in time and space, or one ends above the arena; else None.

    Live ranges of 0 bytes are ignored.
    """
    real = [e for e in ranges if sizes[e.storage]]
    events = sorted(
        [(e.start, 1, e.offset_bytes, sizes[e.storage]) for e in real]
        + [(e.stop, 0, e.offset_bytes, sizes[e.storage]) for e in real]
    )
    occupied: list[tuple[int, int]] = []  # (offset, end) of resident ranges, ascending and disjoint
    for _, begins, offset, size in events:
        block = (offset, offset + size)
        index = bisect_left(occupied, block)
        if not begins:
            del occupied[index]
            continue
        below = occupied[index - 1][1] if index else 0
        above = occupied[index][0] if index < len(occupied) else arena_bytes
        if offset < below or block[1] > above:
            return f"two live ranges share address {offset}, or one ends above the arena"
        insort(occupied, block)
    return None


def _items(ranges: Sequence[Extent], end: int) -> list[Item]:
    first = {e.storage: e for e in ranges if e.start == 0 and e.stop < end}
    last = {e.storage: e for e in ranges if e.start > 0 and e.stop == end and e.storage in first}
    wrapped = {e: (last[s], e) for s, e in first.items() if s in last}
    ends = set(last.values())
    return [wrapped.get(e, (e,)) for e in ranges if e not in ends]


def _pack(items: Sequence[Item], sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return an offset for every item, and the bytes of the arena.

    More than `_MANY_ITEMS` items are stacked. Otherwise, the first round is first fit by size. The second round places
    items first that are live when many bytes are live. After each further round, items that end at an address above the
    live peak move forward in the order (squeaky wheel optimization, Joslin and Clements 1999).
    """
    size = np.array([sizes[item[0].storage] for item in items], np.int64)
    times = np.array([sum(e.stop - e.start for e in item) for item in items], np.int64)
    owner = np.array([number for number, item in enumerate(items) for _ in item], np.int64)
    start = np.array([e.start for item in items for e in item], np.int64)
    stop = np.array([e.stop for item in items for e in item], np.int64)
    clashes = []
    for item in items:
        clash = np.zeros(len(owner), bool)
        for e in item:
            clash |= (start < e.stop) & (stop > e.start)
        clashes.append(owner[clash])
    change = np.zeros(int(stop.max(initial=0)) + 1, np.int64)
    np.add.at(change, start, size[owner])
    np.add.at(change, stop, -size[owner])
    live = change.cumsum()
    floor = int(live.max())
    if len(items) > _MANY_ITEMS:
        return _pack_in_stacks(items, clashes, size, times, live)
    peak = int(live.argmax())

    def priority(i: int) -> tuple[int, ...]:
        first, last = items[i][0].start, items[i][-1].stop
        if len(items[i]) > 1:  # the item wraps around the end of the step
            last = len(live)
        distance = max(0, first - peak, peak + 1 - last)
        hot = int(live[first : max(last, first + 1)].max()) >= _HOT_FRACTION * floor
        return int(not hot), distance, -int(size[i] if distance else times[i])

    def attempts() -> Iterator[np.ndarray]:
        yield _first_fit(clashes, size, np.lexsort((-times, -size)).tolist())
        order = sorted(range(len(items)), key=priority)
        for _ in range(1, _ROUNDS):
            low = _first_fit(clashes, size, order)
            yield low
            too_high = low + size > floor
            rank = {i: n * _PROMOTION if too_high[i] else float(n) for n, i in enumerate(order)}
            order.sort(key=rank.__getitem__)

    return _tightest(attempts(), size, floor)


def _pack_in_stacks(
    items: Sequence[Item], clashes: Sequence[np.ndarray], size: np.ndarray, times: np.ndarray, live: np.ndarray
) -> tuple[np.ndarray, int]:
    floor = int(live.max())
    most = [max(int(live[e.start : max(e.stop, e.start + 1)].max()) for e in item) for item in items]
    hot = np.array(most, np.int64) * _HEAT_CLASSES // max(floor, 1)
    orders = (  # each with its preference as a fraction of the live peak
        (np.lexsort((-times * size, -hot)), 0.005),
        (np.lexsort((-size, -times)), 0.015),
        (np.argsort(-times * np.sqrt(size), kind="stable"), 0.03),
    )
    attempts = (_stack(clashes, size, order, part * floor) for order, part in orders)
    return _tightest(attempts, size, floor)


def _tightest(attempts: Iterator[np.ndarray], size: np.ndarray, floor: int) -> tuple[np.ndarray, int]:
    best = np.zeros(len(size), np.int64), int(size.sum()) + 1
    for low in attempts:
        best = min(best, (low, int((low + size).max(initial=0))), key=lambda fit: fit[1])
        if best[1] <= _TIGHT * floor:
            break
    return best


def _stack(clashes: Sequence[np.ndarray], size: np.ndarray, order: np.ndarray, preference: float) -> np.ndarray:
    """Return offsets by stacking: each item lies above all previously placed items that overlap it in time.

    `clashes` has, for each item, the items that it overlaps in time. The item with the lowest possible address is
    placed next. Early items of `order` are preferred: the last item is treated as if its address were `preference`
    bytes higher, items before it proportionally less.
    """
    low = np.zeros(len(size), np.int64)
    later = np.empty(len(size))
    later[order] = np.linspace(0.0, preference, len(size))
    key = later.copy()  # infinite once the item is placed
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
    low, high = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    for i in order:
        neighbours = clashes[i][high[clashes[i]] > 0]
        neighbours = neighbours[np.argsort(low[neighbours], kind="stable")]
        # Free gaps: from the highest end so far to the next start.
        tops = np.maximum.accumulate(np.concatenate(([0], high[neighbours])))
        fits = np.flatnonzero(low[neighbours] - tops[:-1] >= size[i])
        low[i] = tops[fits[0]] if len(fits) else tops[-1]
        high[i] = low[i] + size[i]
    return low
