"""Static addresses: one arena for every stay on the device, no allocator at run time.

Interval colouring with sizes is NP-hard. First fit comes within a few percent of the live peak (the lower bound); what
ended above it is then placed earlier and the fit repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hyper_parallel.ir import Extent

_TIGHT = 1.002  # an arena this close to the live peak is not worth another fit
_GOOD = 1.02  # above this another order is tried
_CROWDED = 0.9  # stays that see this share of the live peak are placed before the others


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
    floor = _live_peak(stays, sizes)
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        _from_the_peak(stays, sizes),
        lambda i: (-sizes[stays[i].storage], stays[i].start - stays[i].stop),
        lambda i: (stays[i].start - stays[i].stop, -sizes[stays[i].storage]),
        lambda i: (-sizes[stays[i].storage] * (stays[i].stop - stays[i].start), stays[i].start),
    )
    rounds = max(8, min(40, 30_000 // len(stays)))
    tried = [_squeaky_wheel(stays, sizes, sorted(range(len(stays)), key=orders[1]), floor, 1)]
    for key in orders:
        if min(arena for _, arena in tried) <= floor * (_TIGHT if len(tried) == 1 else _GOOD):
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


def _live(stays: Sequence[Extent], sizes: Sequence[int]) -> np.ndarray:
    """Bytes of all stays at every action."""
    change = np.zeros(max(stay.stop for stay in stays) + 1, np.int64)
    np.add.at(change, [stay.start for stay in stays], [sizes[stay.storage] for stay in stays])
    np.add.at(change, [stay.stop for stay in stays], [-sizes[stay.storage] for stay in stays])
    return np.cumsum(change)


def _live_peak(stays: Sequence[Extent], sizes: Sequence[int]) -> int:
    return int(_live(stays, sizes).max())


def _from_the_peak(
    stays: Sequence[Extent], sizes: Sequence[int]
) -> Callable[[int], tuple[int, ...]]:
    """An order that begins where there is no room to lose: at the peak, the longest lowest, then away from it."""
    live = _live(stays, sizes)
    top, at = int(live.max()), int(live.argmax())

    def key(i: int) -> tuple[int, ...]:
        stay = stays[i]
        away = max(0, stay.start - at, at + 1 - stay.stop)
        sees = int(live[stay.start : max(stay.stop, stay.start + 1)].max())
        size = sizes[stay.storage] if away else stay.stop - stay.start
        return int(sees < _CROWDED * top), away, -size

    return key


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
