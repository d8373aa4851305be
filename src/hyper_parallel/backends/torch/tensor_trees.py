"""Tensors nested in the arguments and results of operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator, in order, also those in tuples, lists and dicts."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())
    return tensors
