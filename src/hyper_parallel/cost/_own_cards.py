"""Cards as files: those of this machine, which know how its numbers depend on the ranks at work, and writing any card.

Ranks of one host share cores, caches and memory, so every number depends on how many of them work. `calibrate` measures
1, 2, 4, ... ranks at once; between two of these numbers the constants follow a power of the ranks, and beyond the
last they stay.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from hyper_parallel.cost._cards import DeviceCard, StackCard, read_cards_by_ranks
from hyper_parallel.topology import cache_dir

Cards = tuple[DeviceCard, StackCard]
_Card = TypeVar("_Card", DeviceCard, StackCard)


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
    path = path or own_path()
    if not path.is_file():
        return None
    by_ranks = read_cards_by_ranks(path)
    device, _ = next(iter(by_ranks.values()))
    same = any(fnmatch.fnmatchcase(device_name, glob) for glob in device.devices)
    return at_ranks(by_ranks, ranks) if same else None


def at_ranks(by_ranks: Mapping[int, Cards], ranks: int) -> Cards:
    """The cards for a number of ranks at work, from those of measured numbers."""
    below = max((k for k in by_ranks if k <= ranks), default=min(by_ranks))
    above = min((k for k in by_ranks if k >= ranks), default=max(by_ranks))
    if below >= above:
        return by_ranks[below]
    share = math.log(ranks / below) / math.log(above / below)
    (device, stack), (crowded, slower) = by_ranks[below], by_ranks[above]
    return _between(device, crowded, share), _between(stack, slower, share)


def _between(low: _Card, high: _Card, share: float) -> _Card:
    """Numbers between those of two cards, in the logarithm where both are positive."""

    def mixed(a: float, b: float) -> float:
        if a > 0.0 and b > 0.0:
            return math.exp((1.0 - share) * math.log(a) + share * math.log(b))
        return (1.0 - share) * a + share * b

    changed: dict[str, Any] = {}
    for f in fields(high):
        a, b = getattr(low, f.name), getattr(high, f.name)
        if a == b or f.name in ("sources", "priors"):
            continue
        if isinstance(b, Mapping):
            changed[f.name] = {k: mixed(a[k], v) if k in a else v for k, v in b.items()}
        elif isinstance(b, float):
            changed[f.name] = mixed(a, b)
    return replace(high, **changed)


def write_own(path: Path, by_ranks: Mapping[int, Cards]) -> None:
    """Write the cards of this machine: those of the most ranks, and what differs with fewer."""
    most = max(by_ranks)
    device, stack = by_ranks[most]
    full = _numbers_of(device), _numbers_of(stack)
    fewer = {}
    for ranks, cards in sorted(by_ranks.items()):
        if ranks < most:
            fewer[ranks] = {
                "device": _different(_numbers_of(cards[0]), full[0]),
                "stack": _different(_numbers_of(cards[1]), full[1]),
            }
    _dump(path, _contents(device, stack, device.name) | {"ranks": most, "fewer": fewer})


def _different(own: dict[str, Any], of: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in own.items() if of.get(k) != v}


def write_card(path: Path, device: DeviceCard | None, stack: StackCard | None, name: str) -> None:
    """Write cards as a file that `read_card` reads; every number with its source and what was believed before."""
    _dump(path, _contents(device, stack, name))


def _contents(device: DeviceCard | None, stack: StackCard | None, name: str) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name}
    if device is not None:
        data |= {"devices": list(device.devices), "device": _numbers_of(device)}
    if stack is not None:
        data["stack"] = _numbers_of(stack)
    return data


def _dump(path: Path, data: dict[str, Any]) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(data, sort_keys=False, width=1000, default_flow_style=None)
    path.write_text(text, encoding="utf-8")


def _numbers_of(card: DeviceCard | StackCard) -> dict[str, Any]:
    """The numbers of a card that have a source; the others are defaults of the code."""

    def number(key: str, value: float) -> dict[str, Any]:
        told: dict[str, Any] = {"value": float(f"{value:.4g}")}
        if key in card.priors:
            told["prior"] = card.priors[key]
        return {**told, "source": card.sources[key]}

    found: dict[str, Any] = {}
    for f in fields(card):
        value = getattr(card, f.name)
        if f.name in ("sources", "priors", "name", "devices"):
            continue
        if isinstance(value, Mapping):
            told = {
                k: number(f"{f.name}.{k}", v)
                for k, v in value.items()
                if f"{f.name}.{k}" in card.sources
            }
            if told:
                found[f.name] = told
        elif f.name in card.sources:
            found[f.name] = number(f.name, value)
    return found
