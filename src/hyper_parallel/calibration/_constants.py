"""Constants of cards that a fit may change, with the widths of their priors; and writing of card files.

A card file contains the numbers that have a source, with this source; fitted numbers also have their prior value. The
path of a number is its key in the file, such as `passes` or `matmul.bfloat16`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from hyper_parallel.calibration._prediction import Cards
from hyper_parallel.cost import DeviceCard, StackCard, by_field, numbers_of, with_numbers
from hyper_parallel.errors import written
from hyper_parallel.owned_folder import check_output_file
from hyper_parallel.serde import write_text

Array = NDArray[np.float64]
C = TypeVar("C", DeviceCard, StackCard)


@dataclass(frozen=True, slots=True)
class Constant:
    """Constant that a fit may change: a factor on one or several numbers of cards, such as all link bandwidths."""

    name: str  # key of `Fit.factors`
    sd: float  # standard deviation of the prior on the natural logarithm of the factor
    cards: tuple[str, ...]  # cards that share the factor
    # paths of the numbers that share the factor, such as `matmul.bfloat16`; `matmul` means all its dtypes
    attributes: tuple[str, ...]
    rest: bool = False  # whether the factor applies to 1 - x instead of x, as for overlapped fractions


_HOPPER: Final = ("h100", "h100-96gb")
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_MODERN: Final = ("megatron", "nemo", "megatron-bridge", "mindspeed", "jax")
_TORCH: Final = ("torchtitan", "torchtitan-2024", "torchtitan-eager", "torch-fsdp")
_STACKS: Final = (*_MODERN, *_TORCH, "nanotron", "megatron-2022")
_DEVICES: Final = ("a100", *_HOPPER, *_BLACKWELL, "ascend-910b", "ascend-910c")

CONSTANTS: Final = (
    Constant("matmul a100", 0.06, ("a100",), ("matmul",)),
    Constant("matmul hopper bf16", 0.06, _HOPPER, ("matmul.bfloat16",)),
    Constant("matmul hopper fp8", 0.08, _HOPPER, ("matmul.float8_e4m3fn",)),
    Constant("matmul blackwell fp8", 0.08, _BLACKWELL, ("matmul.float8_e4m3fn", "matmul.mxfp8")),
    Constant("matmul blackwell nvfp4", 0.12, _BLACKWELL, ("matmul.nvfp4",)),
    Constant("matmul ascend", 0.08, ("ascend-910b", "ascend-910c"), ("matmul",)),
    Constant("clock h100-96gb", 0.08, ("h100-96gb",), ("matmul", "attention")),
    Constant("clock b200", 0.06, ("b200",), ("matmul", "attention")),
    Constant("clock b300", 0.06, ("b300",), ("matmul", "attention")),
    Constant("clock gb200", 0.06, ("gb200",), ("matmul", "attention")),
    Constant("clock gb300", 0.06, ("gb300",), ("matmul", "attention")),
    Constant("attention hopper", 0.10, _HOPPER, ("attention",)),
    Constant("attention blackwell", 0.15, _BLACKWELL, ("attention",)),
    Constant("attention ascend", 0.20, ("ascend-910b", "ascend-910c"), ("attention",)),
    Constant("portable attention", 0.15, (*_HOPPER, *_BLACKWELL), ("portable",)),
    Constant("saturation", 0.20, _DEVICES, ("saturation",)),
    Constant("links", 0.10, _DEVICES, ("link",)),
    Constant("network", 0.15, _DEVICES, ("network",)),
    Constant("network exchanges", 0.30, _DEVICES, ("exchange",)),
    Constant("element-wise passes", 0.12, _STACKS, ("passes",)),
    Constant("eager passes", 0.20, ("torchtitan-eager", "nanotron"), ("passes",)),
    Constant("casts", 0.25, _STACKS, ("quantize_bytes",)),
    Constant("stack nemo", 0.03, ("nemo",), ("compute",)),
    Constant("stack megatron-bridge", 0.03, ("megatron-bridge",), ("compute",)),
    Constant("stack torchtitan", 0.03, ("torchtitan", "torchtitan-2024", "torchtitan-eager"), ("compute",)),
    Constant("stack mindspeed", 0.04, ("mindspeed",), ("compute",)),
    Constant("stack megatron-2022", 0.05, ("megatron-2022",), ("compute",)),
    Constant("stack nanotron", 0.08, ("nanotron",), ("compute",)),
    Constant("tensor-parallel overlap", 0.30, _MODERN, ("overlap_tp",), rest=True),
    Constant("straggling", 0.40, _STACKS, ("straggle",)),
    Constant("step overhead", 0.50, _STACKS, ("step_s",)),
    Constant("nanotron collectives", 0.30, ("nanotron",), ("network",)),
    Constant("nanotron tensors", 0.40, ("nanotron",), ("tail_tensors",)),
    Constant("experts", 0.20, _STACKS, ("moe",)),
    Constant("expert host work", 0.40, _STACKS, ("moe_host_s",)),
    Constant("expert releases", 0.40, _STACKS, ("moe_month",)),
    Constant("expert releases hopper", 1.00, _HOPPER, ("maturing",)),
    Constant("expert copies", 0.50, _STACKS, ("moe_copy_s",)),
    Constant("expert rows", 0.40, _STACKS, ("expert_rows",)),
    Constant("bias passes", 0.40, _STACKS, ("bias_passes",)),
    Constant("expert overlap", 0.30, _MODERN, ("overlap_ep",), rest=True),
)  # fmt: skip
"""Constants that `hyper-parallel calibrate --runs` fits by regression."""


def apply(cards: Cards, factors: Array, constants: Sequence[Constant] = CONSTANTS) -> Cards:
    """Return cards whose numbers are multiplied by the factors on `constants`; `factors` are natural logarithms."""
    device, stack = dict(cards.device), dict(cards.stack)
    for constant, log_factor in zip(constants, factors, strict=True):
        for name in constant.cards:
            if name in device:
                device[name] = _scaled(device[name], constant, math.exp(log_factor))
            if name in stack:
                stack[name] = _scaled(stack[name], constant, math.exp(log_factor))
    return Cards(device, stack)


def _scaled(card: C, constant: Constant, factor: float) -> C:
    """Return a card with every number x of a constant multiplied by `factor`; with `Constant.rest`, 1 - x is."""
    changed = {}
    for path, value in numbers_of(card).items():
        if {path, path.partition(".")[0]} & {*constant.attributes}:
            complement = max(0.0, 1.0 - (1.0 - value) * factor)
            changed[path] = complement if constant.rest else value * factor
    return with_numbers(card, changed)


def with_prior_values(cards: Cards) -> Cards:
    """Return cards with every fitted number reset to its prior value."""
    return Cards(
        {name: with_numbers(card, card.priors) for name, card in cards.device.items()},
        {name: with_numbers(card, card.priors) for name, card in cards.stack.items()},
    )


def write_card(path: Path, device: DeviceCard | None, stack: StackCard | None, name: str) -> None:
    """Write a card file with a device card, a stack card or both; None: omitted.

    Raises:
        OutputNotWritable: HP105 if the file cannot be written, or exists and is no card file.
    """
    data: dict[str, Any] = {"name": name}
    if device is not None:
        data |= {"devices": list(device.devices), "device": _numbers_of(device)}
    if stack is not None:
        data["stack"] = _numbers_of(stack)
    _dump(path, data)


def write_local_cards(path: Path, by_ranks: Mapping[int, tuple[DeviceCard, StackCard]]) -> None:
    """Write one file with this machine's cards; `by_ranks` is a dict from number of concurrent ranks to the cards.

    The file has all numbers for the largest number of ranks; for fewer ranks, only the numbers that differ.

    Raises:
        OutputNotWritable: HP105 if the file cannot be written, or exists and is no card file.
    """
    numbers = {ranks: [_numbers_of(card) for card in by_ranks[ranks]] for ranks in sorted(by_ranks)}
    max_ranks, (device, stack) = numbers.popitem()
    fewer = {
        ranks: {
            kind: {key: number for key, number in part.items() if full.get(key) != number}
            for kind, part, full in zip(("device", "stack"), some, (device, stack), strict=True)
        }
        for ranks, some in numbers.items()
    }
    card = by_ranks[max_ranks][0]
    head = {"name": card.name, "devices": list(card.devices)}
    _dump(path, {**head, "device": device, "stack": stack, "ranks": max_ranks, "fewer": fewer})


def check_card_file(path: Path) -> None:
    """Raise OutputNotWritable (HP105) if a file exists and is not a card file."""

    def is_card(text: str) -> bool:
        start = re.match(r"(#.*\n)*name: ", text)
        return start is not None and ("\ndevice" in text or "\nstack:" in text)

    check_output_file(path, is_card, "a card", "--output")


def _dump(path: Path, data: dict[str, Any]) -> None:
    check_card_file(path)
    text = yaml.safe_dump(data, sort_keys=False, width=1000, default_flow_style=None)
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def _numbers_of(card: DeviceCard | StackCard) -> dict[str, Any]:
    """Return the content of a card file for the numbers of a card that have a source, with 4 significant digits."""

    def number(path: str, value: float) -> dict[str, Any]:
        prior = {"prior": card.priors[path]} if path in card.priors else {}
        return {"value": float(f"{value:.4g}"), **prior, "source": card.sources[path]}

    numbers = numbers_of(card).items()
    return by_field({path: number(path, value) for path, value in numbers if path in card.sources})
