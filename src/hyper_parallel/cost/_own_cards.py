"""The cards of this machine, which know how its numbers depend on the ranks at work.

Ranks of one host share cores, caches and memory, so every number depends on how many of them work. `calibrate` measures
1, 2, 4, ... ranks at once; between two of these numbers the constants follow a power of the ranks, and beyond the
last they stay.
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
    """Where the cards of this machine are kept: `card.yaml` in the user's cache."""
    return cache_dir() / "card.yaml"


def own_cards(device_name: str, ranks: int, path: Path | None = None) -> Cards | None:
    """The cards that `calibrate` wrote for this device; None when it was not calibrated.

    Args:
        device_name: Name of the device in its topology.
        ranks: Ranks at work.
        path: The file; None: `own_path()`.

    Raises:
        CardUnreadable: HP313 when the file is damaged.
    """
    by_ranks = own_cards_by_ranks(device_name, path)
    return at_ranks(by_ranks, ranks) if by_ranks else None


def own_cards_by_ranks(device_name: str, path: Path | None = None) -> dict[int, Cards]:
    """The cards of this device by the numbers of ranks that were measured; empty when it was not calibrated.

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


def at_ranks(by_ranks: Mapping[int, Cards], ranks: int) -> Cards:
    """The cards for a number of ranks at work, from those of measured numbers."""
    below = max((k for k in by_ranks if k <= ranks), default=min(by_ranks))
    above = min((k for k in by_ranks if k >= ranks), default=max(by_ranks))
    if below >= above:
        return by_ranks[below]
    share = math.log(ranks / below) / math.log(above / below)
    (device, stack), (crowded, slower) = by_ranks[below], by_ranks[above]
    return _between(device, crowded, share), _between(stack, slower, share)


def _between(low: C, high: C, share: float) -> C:
    """Numbers between those of two cards, in the logarithm where both are positive."""

    def mixed(a: float, b: float) -> float:
        if a > 0.0 and b > 0.0:
            return math.exp((1.0 - share) * math.log(a) + share * math.log(b))
        return (1.0 - share) * a + share * b

    below = numbers_of(low)
    changed = {k: b for k, b in numbers_of(high).items() if below.get(k, b) != b}
    return with_numbers(high, {k: mixed(below[k], b) for k, b in changed.items()})
