"""Contexts that keep code without a plan within a device budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory.hardware import FILLED, allocatable_bytes


def spill_mode(
    device: torch.device,
    budget_bytes: int | None = None,
    *,
    keep_offloaded: bool = False,
    owned: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> LruSpillMode:
    """Return an LRU spill mode for the budget; on an accelerator also limited to the free share for storages."""
    if device.type != "cpu":
        free_bytes = allocatable_bytes(device)
        budget_bytes = int(
            FILLED * (free_bytes if budget_bytes is None else min(free_bytes, budget_bytes))
        )
    mode = LruSpillMode(budget_bytes, device, keep_offloaded=keep_offloaded)
    mode.owned = owned
    return mode


def within_device(
    device: torch.device, owned: Callable[[], Iterable[torch.Tensor]] = tuple
) -> AbstractContextManager[Any]:
    """Return a context for a step without a plan: on an accelerator, storages are limited to its free memory.

    Args:
        device: Device of the step.
        owned: See `LruSpillMode`.
    """
    return nullcontext() if device.type == "cpu" else spill_mode(device, owned=owned)
