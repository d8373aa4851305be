"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard. First fit comes within a few percent of the live peak (the lower bound); what
ended above it is then placed earlier and the fit repeated. What is there all the time lies at the bottom, in an order
that depends on nothing else. A storage that is there at both ends of the step but not in between has one address at
both: the next step finds it where this one leaves it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hyper_parallel.ir import Extent, MemoryPlan
from hyper_parallel.offload._exact import Packing, search

_TIGHT = 1.002  # an arena this close to the live peak is not worth another fit
GOOD = 1.02  # above this another order is tried
_CLOSER = 6  # times closer to the live peak than one fit: what further fits have reached at most
_FORWARD = 0.65  # of its rank is left to a stay that ended too high
_BEGUN = (
    3  # rounds of the squeaky wheel, before fits by weights: most of what it finds it finds at once
)
_POWERS = (0.2, 0.3, 0.5, 0.7)  # of a stay's time, in its weight
_BEHIND = 2.0  # times as far from the live peak as fits by weights: the wheel goes on no further
_CROWDED = 0.9  # stays that see this share of the live peak are placed before the others
_SEARCHED = 1500  # items: above, one placement of an exact search takes too long
_NODES = 400
_Item = tuple[Extent, ...]
"""Stays that share an address: one, or the last and the first of a storage that goes around."""
_Fit = tuple[np.ndarray, int]
"""An offset for every item, and the end of the highest one."""


def assign_addresses(
    stays: Sequence[Extent], sizes: Sequence[int], enough_bytes: int = 0
) -> tuple[tuple[Extent, ...], int]:
    """Offsets such that two stays that overlap in time never overlap in space.

    Args:
        stays: Intervals of actions, one per stay.
        sizes: Bytes in the arena by storage index.
        enough_bytes: An arena of this size need not become smaller, and what is far from it is given up; 0: the
            smallest is wanted.

    Returns:
        The stays with offsets, in the given order, and the arena's bytes.

    Source: squeaky wheel optimization, Joslin and Clements 1999, over first fit.
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
        offsets, arena = _fitted(items, sizes, bottom, enough_bytes)
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
    found = _searched(items, sizes, limit_bytes - bottom)
    if found.offsets is not None:
        return True
    return False if found.ended else None


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


def _items(stays: Sequence[Extent], end: int) -> list[_Item]:
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


def _fitted(items: Sequence[_Item], sizes: Sequence[int], bottom: int, enough: int) -> _Fit:
    """The best of several fits above the bottom: an offset for every item, and the end of the highest one."""
    live = _live(items, sizes)
    floor = int(live.max())
    # What goes around is as long as both of its stays, from the later one on.
    stays = [
        Extent(e[0].storage, e[0].start, e[0].stop + sum(x.stop - x.start for x in e[1:]))
        for e in items
    ]
    good = (bottom + floor) * GOOD - bottom
    tight = max((bottom + floor) * _TIGHT - bottom, min(enough - bottom, good))
    size = [sizes[stay.storage] for stay in stays]
    time = [stay.stop - stay.start for stay in stays]
    rounds = max(12, min(40, 30_000 // len(items)))

    def by(key: Callable[[int], Any]) -> list[int]:
        return sorted(range(len(items)), key=key)

    def wheel(order: list[int], rounds: int) -> Iterator[_Fit]:
        return _squeaky_wheel(items, sizes, order, floor, rounds)

    best = _first_fit(items, sizes, by(lambda i: (-size[i], -time[i])))

    def done(until: float) -> bool:
        # What is too far from what is wanted is given up.
        far = enough and enough - bottom < floor + (best[1] - floor) / _CLOSER
        return best[1] <= until or bool(far)

    def tried(fits: Iterator[_Fit], until: float) -> int:
        """The least arena of these fits; they end when one is good enough."""
        nonlocal best
        least = best[1]
        for count, fit in enumerate(fits):
            least = min(least, fit[1]) if count else fit[1]
            best = min(best, fit, key=_arena)
            if done(until):
                break
        return least

    if not done(tight):
        peak = wheel(by(_from_the_peak(stays, sizes, live)), rounds)
        begun = tried(islice(peak, _BEGUN), tight)
        if not done(good):
            weighed: dict[int, list[int]] = {}
            for power in _POWERS:
                weight = [-n * t**power for n, t in zip(size, time, strict=True)]
                order = by(weight.__getitem__)
                fit = _first_fit(items, sizes, order)
                weighed.setdefault(fit[1], order)
                best = min(best, fit, key=_arena)
            least = min(weighed)
            if not done(good):
                tried(islice(wheel(weighed[least], rounds // 3), 1, None), good)
            if not done(good) and len(items) <= _SEARCHED:
                tried(wheel(by(lambda i: (-time[i], -size[i])), rounds // 3), good)
            if not done(good) and begun - floor <= _BEHIND * (least - floor):
                tried(peak, good)
        elif not done(tight):
            tried(peak, tight)
    if best[1] > good and len(items) <= _SEARCHED:
        found = _searched(items, sizes, int(good))
        if found.offsets is not None:
            return found.offsets, int((found.offsets + np.array(size)).max())
    return best


def _searched(items: Sequence[_Item], sizes: Sequence[int], limit: int) -> Packing:
    """Search for offsets below a limit."""
    real = [i for i, item in enumerate(items) if sizes[item[0].storage]]
    times = [[(stay.start, stay.stop) for stay in items[i]] for i in real]
    found = search(times, [sizes[items[i][0].storage] for i in real], limit, _NODES)
    if found.offsets is None:
        return found
    offsets = np.zeros(len(items), np.int64)
    offsets[real] = found.offsets
    return Packing(offsets, found.ended)


def _arena(fit: _Fit) -> int:
    return fit[1]


def _squeaky_wheel(
    items: Sequence[_Item], sizes: Sequence[int], order: list[int], floor: int, rounds: int
) -> Iterator[_Fit]:
    """First fit, repeated with every item that ended above the live peak moved towards the front.

    It ends when so many rounds in turn gave nothing better.
    """
    size = np.array([sizes[item[0].storage] for item in items])
    best, idle = float("inf"), 0
    while idle < rounds:
        offsets, arena = _first_fit(items, sizes, order)
        yield offsets, arena
        idle = 0 if arena < best else idle + 1
        best = min(best, arena)
        over = offsets + size > floor
        key = {i: at * _FORWARD if over[i] else float(at) for at, i in enumerate(order)}
        order = sorted(order, key=key.__getitem__)


def _live(items: Sequence[_Item], sizes: Sequence[int]) -> np.ndarray:
    """Bytes of all stays at every action."""
    stays = [stay for item in items for stay in item]
    change = np.zeros(max(stay.stop for stay in stays) + 1, np.int64)
    np.add.at(change, [stay.start for stay in stays], [sizes[stay.storage] for stay in stays])
    np.add.at(change, [stay.stop for stay in stays], [-sizes[stay.storage] for stay in stays])
    return np.cumsum(change)


def _from_the_peak(
    stays: Sequence[Extent], sizes: Sequence[int], live: np.ndarray
) -> Callable[[int], tuple[int, ...]]:
    """An order that begins where there is no room to lose: at the peak, the longest lowest, then away from it."""
    top, at = int(live.max()), int(live.argmax())

    def key(i: int) -> tuple[int, ...]:
        stay = stays[i]
        away = max(0, stay.start - at, at + 1 - stay.stop)
        sees = int(live[stay.start : max(stay.stop, stay.start + 1)].max())
        size = sizes[stay.storage] if away else stay.stop - stay.start
        return int(sees < _CROWDED * top), away, -size

    return key


def _first_fit(items: Sequence[_Item], sizes: Sequence[int], order: Sequence[int]) -> _Fit:
    """Every item, in an order, at the lowest address that is free during all of its stays."""
    n = sum(len(item) for item in items)
    # What is placed, by its low end: start, stop, low, high.
    placed = np.zeros((4, n + 1), np.int64)
    offsets = np.zeros(len(items), np.int64)
    arena = count = 0
    for i in order:
        item = items[i]
        size = sizes[item[0].storage]
        if not size:
            continue
        start, stop, low, high = placed[:, :count]
        clash = (start < item[0].stop) & (stop > item[0].start)
        for stay in item[1:]:
            clash |= (start < stay.stop) & (stop > stay.start)
        lows = low[clash]
        # Gaps between neighbours: from the highest end so far to the next start.
        tops = np.maximum.accumulate(high[clash])
        offset = 0
        if len(lows) and lows[0] < size:
            fits = lows[1:] - tops[:-1] >= size
            first = int(fits.argmax()) if len(fits) else 0
            offset = int(tops[first] if len(fits) and fits[first] else tops[-1])
        at = int(low.searchsorted(offset, "right"))
        num = len(item)
        placed[:, at + num : count + num] = placed[:, at:count].copy()
        for k, stay in enumerate(item):
            placed[:, at + k] = stay.start, stay.stop, offset, offset + size
        count += num
        offsets[i] = offset
        arena = max(arena, offset + size)
    return offsets, arena
