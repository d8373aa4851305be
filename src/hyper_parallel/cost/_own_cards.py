"""Cards of this machine, by the number of concurrent ranks.

Ranks of one host share cores, caches and memory, so every number depends on how many run. `calibrate` measures
1, 2, 4, ... concurrent ranks. Between two measured counts the constants follow a power law of the ranks; beyond the
last they are constant.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hyper_parallel.cost._cards import (
    C,
    DeviceCard,
    StackCard,
    numbers_of,
    read_cards_by_ranks,
    with_numbers,
)
from hyper_parallel.topology import cache_dir

LOCAL_CARD: Final = "local"
"""Name of a card that was measured on this machine."""

Cards = tuple[DeviceCard, StackCard]


def own_path() -> Path:
    """Return the path of this machine's cards: `card.yaml` in the user's cache."""
    return cache_dir() / "card.yaml"


def own_cards(device_name: str, ranks: int, path: Path | None = None) -> Cards | None:
    """Return the cards that `calibrate` wrote for this device; None if it was not calibrated.

    Args:
        device_name: Name of the device in its topology.
        ranks: Number of concurrent ranks.
        path: The file; None: `own_path()`.

    Raises:
        CardUnreadable: HP313 when the file is damaged.
    """
    by_ranks = own_cards_by_ranks(device_name, path)
    return cards_for_ranks(by_ranks, ranks) if by_ranks else None


def own_cards_by_ranks(device_name: str, path: Path | None = None) -> dict[int, Cards]:
    """Return the cards of this device by the measured numbers of ranks; empty if it was not calibrated.

    Raises:
        CardUnreadable: HP313 when the file is damaged.
    """
    path = path or own_path()
    if not path.is_file():
        return {}
    by_ranks = dict(read_cards_by_ranks(path))
    device, _ = next(iter(by_ranks.values()))
    same = any(fnmatch.fnmatchcase(device_name, glob) for glob in device.devices)
    return by_ranks if same else {}


def cards_for_ranks(by_ranks: Mapping[int, Cards], ranks: int) -> Cards:
    """Return the cards for a number of concurrent ranks, interpolated between measured numbers."""
    low_ranks = max((k for k in by_ranks if k <= ranks), default=min(by_ranks))
    high_ranks = min((k for k in by_ranks if k >= ranks), default=max(by_ranks))
    if low_ranks >= high_ranks:
        return by_ranks[low_ranks]
    share = math.log(ranks / low_ranks) / math.log(high_ranks / low_ranks)
    (device, stack), (device_high, stack_high) = by_ranks[low_ranks], by_ranks[high_ranks]
    return _between(device, device_high, share), _between(stack, stack_high, share)


def _between(low: C, high: C, share: float) -> C:
    """Return a card with numbers interpolated between two cards, in the logarithm if both are positive."""

    def interpolate(a: float, b: float) -> float:
        if a > 0.0 and b > 0.0:
            return math.exp((1.0 - share) * math.log(a) + share * math.log(b))
        return (1.0 - share) * a + share * b

    low_ranks = numbers_of(low)
    changed = {k: b for k, b in numbers_of(high).items() if low_ranks.get(k, b) != b}
    return with_numbers(high, {k: interpolate(low_ranks[k], b) for k, b in changed.items()})
