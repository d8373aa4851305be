"""Writing cards: every number with its source and what was believed before it was fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hyper_parallel.cost import DeviceCard, StackCard


def write_own(path: Path, by_ranks: Mapping[int, tuple[DeviceCard, StackCard]]) -> None:
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
