"""Writing cards as files that `cost` reads: every number with its source and what was believed before it was fitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.cost import DeviceCard, StackCard, by_field, numbers_of


def write_card(path: Path, device: DeviceCard | None, stack: StackCard | None, name: str) -> None:
    """Write a device card, a stack card or both."""
    data: dict[str, Any] = {"name": name}
    if device is not None:
        data |= {"devices": list(device.devices), "device": _numbers_of(device)}
    if stack is not None:
        data["stack"] = _numbers_of(stack)
    _dump(path, data)


def write_own(path: Path, by_ranks: Mapping[int, tuple[DeviceCard, StackCard]]) -> None:
    """Write the cards of this machine: those of the most ranks, and what differs with fewer."""
    numbers = {ranks: [_numbers_of(card) for card in by_ranks[ranks]] for ranks in sorted(by_ranks)}
    most, (device, stack) = numbers.popitem()
    fewer = {
        ranks: {
            kind: {key: number for key, number in own.items() if full.get(key) != number}
            for kind, own, full in zip(("device", "stack"), some, (device, stack), strict=True)
        }
        for ranks, some in numbers.items()
    }
    card = by_ranks[most][0]
    head = {"name": card.name, "devices": list(card.devices)}
    _dump(path, {**head, "device": device, "stack": stack, "ranks": most, "fewer": fewer})


def _dump(path: Path, data: dict[str, Any]) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(data, sort_keys=False, width=1000, default_flow_style=None)
    path.write_text(text, encoding="utf-8")


def _numbers_of(card: DeviceCard | StackCard) -> dict[str, Any]:
    """The numbers of a card that have a source; the others are defaults of the code."""

    def number(path: str, value: float) -> dict[str, Any]:
        prior = {"prior": card.priors[path]} if path in card.priors else {}
        return {"value": float(f"{value:.4g}"), **prior, "source": card.sources[path]}

    numbers = numbers_of(card).items()
    return by_field({path: number(path, value) for path, value in numbers if path in card.sources})
