"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard; first fit over a few orders comes within a few percent of the live peak
(the lower bound), largest-first almost always being the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hyper_parallel.ir.memory import Extent


def assign_addresses(
    stays: Sequence[Extent], sizes: Sequence[int]
) -> tuple[tuple[Extent, ...], int]:
    """Offsets such that two stays that overlap in time never overlap in space.

    Args:
        stays: Intervals of actions, one per stay.
        sizes: Rounded bytes by storage index.

    Returns:
        The stays with offsets, in the given order, and the arena's bytes.
    """
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (-sizes[stays[i].storage], stays[i].start - stays[i].stop, stays[i].start),
        lambda i: (-sizes[stays[i].storage] * (stays[i].stop - stays[i].start), stays[i].start),
        lambda i: (stays[i].start - stays[i].stop, -sizes[stays[i].storage]),
    )
    floor = _live_peak(stays, sizes)
    best: tuple[np.ndarray, int] | None = None
    for key in orders:
        offsets, arena = _first_fit(stays, sizes, sorted(range(len(stays)), key=key))
        if best is None or arena < best[1]:
            best = offsets, arena
        if best[1] <= floor:
            break
    if best is None:
        return (), 0
    best = _improve(stays, sizes, best, floor, sorted(range(len(stays)), key=orders[0]))
    placed = tuple(
        Extent(e.storage, e.start, e.stop, int(o)) for e, o in zip(stays, best[0], strict=True)
    )
    return placed, best[1]


def _improve(
    stays: Sequence[Extent],
    sizes: Sequence[int],
    best: tuple[np.ndarray, int],
    floor: int,
    order: list[int],
) -> tuple[np.ndarray, int]:
    """Place again with the stay that set the arena's size moved to the front, while time allows."""
    offsets = best[0]
    for _ in range(min(200, 200_000 // max(len(stays), 1))):
        if best[1] <= floor * 1.005:
            break
        tops = [offsets[i] + sizes[stays[i].storage] for i in range(len(stays))]
        worst = int(np.argmax(tops))
        at = order.index(worst)
        order.insert(at // 2, order.pop(at))
        offsets, arena = _first_fit(stays, sizes, order)
        if arena < best[1]:
            best = offsets, arena
    return best


def _live_peak(stays: Sequence[Extent], sizes: Sequence[int]) -> int:
    change: dict[int, int] = {}
    for stay in stays:
        change[stay.start] = change.get(stay.start, 0) + sizes[stay.storage]
        change[stay.stop] = change.get(stay.stop, 0) - sizes[stay.storage]
    live = peak = 0
    for at in sorted(change):
        live += change[at]
        peak = max(peak, live)
    return peak


def _first_fit(
    stays: Sequence[Extent], sizes: Sequence[int], order: Sequence[int]
) -> tuple[np.ndarray, int]:
    n = len(stays)
    start, stop = np.zeros(n, np.int64), np.zeros(n, np.int64)
    low, high = np.zeros(n, np.int64), np.zeros(n, np.int64)
    offsets = np.zeros(n, np.int64)
    arena = 0
    for count, i in enumerate(order):
        stay, size = stays[i], sizes[stays[i].storage]
        clash = (
            (start[:count] < stay.stop) & (stop[:count] > stay.start) & (high[:count] > low[:count])
        )
        lows, highs = low[:count][clash], high[:count][clash]
        by_low = np.argsort(lows, kind="stable")
        lows, tops = lows[by_low], np.maximum.accumulate(highs[by_low])
        # Gaps between neighbours: from the highest end so far to the next start.
        begin = np.concatenate(([0], tops))
        room = np.concatenate((lows, [np.iinfo(np.int64).max])) - begin
        offset = int(begin[int(np.argmax(room >= size))])
        start[count], stop[count] = stay.start, stay.stop
        low[count], high[count] = offset, offset + size
        offsets[i] = offset
        arena = max(arena, offset + size)
    return offsets, arena
