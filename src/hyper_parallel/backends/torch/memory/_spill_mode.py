"""Modes that keep code without a plan within a budget of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory._workspace import FILLED, allocatable_bytes


def spill_mode(
    device: torch.device,
    budget_bytes: int | None = None,
    *,
    stays_away: bool = False,
    owned: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> LruSpillMode:
    """For code without a plan: within the budget and, on an accelerator, what is free, less what is left to kernels."""
    if device.type != "cpu":
        most = allocatable_bytes(device)
        budget_bytes = int(FILLED * (most if budget_bytes is None else min(most, budget_bytes)))
    mode = LruSpillMode(budget_bytes, device, stays_away=stays_away)
    mode.owned = owned
    return mode


def within_device(
    device: torch.device, owned: Callable[[], Iterable[torch.Tensor]] = tuple
) -> AbstractContextManager[Any]:
    """Around a step without a plan: on an accelerator storages share what is free.

    Args:
        device: Where the step runs.
        owned: See `LruSpillMode`.
    """
    return nullcontext() if device.type == "cpu" else spill_mode(device, owned=owned)
