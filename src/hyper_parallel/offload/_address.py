"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard. First fit comes within a few percent of the live peak (the lower bound); what
ended above it is then placed earlier and the fit repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hyper_parallel.ir import Extent

_TIGHT = 1.002  # an arena this close to the live peak is not worth another fit


def assign_addresses(
    stays: Sequence[Extent], sizes: Sequence[int]
) -> tuple[tuple[Extent, ...], int]:
    """Offsets such that two stays that overlap in time never overlap in space.

    Args:
        stays: Intervals of actions, one per stay.
        sizes: Rounded bytes by storage index.

    Returns:
        The stays with offsets, in the given order, and the arena's bytes.

    Source: squeaky wheel optimization, Joslin and Clements 1999, over first fit.
    """
    if not stays:
        return (), 0
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (-sizes[stays[i].storage], stays[i].start - stays[i].stop),
        lambda i: (stays[i].start - stays[i].stop, -sizes[stays[i].storage]),
        lambda i: (-sizes[stays[i].storage] * (stays[i].stop - stays[i].start), stays[i].start),
    )
    floor = _live_peak(stays, sizes)
    rounds = max(1, min(40, 30_000 // len(stays)))
    tried = [_squeaky_wheel(stays, sizes, sorted(range(len(stays)), key=orders[0]), floor, 1)]
    for key in orders:
        if tried[-1][1] <= floor * _TIGHT:
            break
        order = sorted(range(len(stays)), key=key)
        tried.append(_squeaky_wheel(stays, sizes, order, floor, rounds))
    offsets, arena = min(tried, key=lambda result: result[1])
    placed = tuple(
        Extent(e.storage, e.start, e.stop, int(o)) for e, o in zip(stays, offsets, strict=True)
    )
    return placed, arena


def _squeaky_wheel(
    stays: Sequence[Extent], sizes: Sequence[int], order: list[int], floor: int, rounds: int
) -> tuple[np.ndarray, int]:
    """First fit, repeated with every stay that ended above the live peak moved half way to the front."""
    size = np.array([sizes[stay.storage] for stay in stays])
    best = _first_fit(stays, sizes, order)
    offsets = best[0]
    for _ in range(rounds - 1):
        if best[1] <= floor * _TIGHT:
            break
        over = offsets + size > floor
        key = {i: at * 0.5 if over[i] else float(at) for at, i in enumerate(order)}
        order = sorted(order, key=key.__getitem__)
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
