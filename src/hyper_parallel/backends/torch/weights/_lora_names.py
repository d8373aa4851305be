"""Names of the parameters of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn

A: Final = "lora_A"
B: Final = "lora_B"


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter, by its name."""
    return name.rpartition(".")[2] in (A, B)


def base_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters` without those of adapters."""
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        if not is_adapter(name):
            yield name, param
