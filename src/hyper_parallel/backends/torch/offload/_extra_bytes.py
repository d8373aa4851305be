"""Device bytes that an operator takes beside the addresses of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.backends.torch._workspace import device_workspace
from hyper_parallel.backends.torch.offload._calls import Call
from hyper_parallel.backends.torch.offload._captured import Entry
from hyper_parallel.backends.torch.offload._into import into
from hyper_parallel.backends.torch.offload._pieces import columns, piece_bytes


def beside(call: Call, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Bytes of the results that a call makes elsewhere first."""
    if not call.made or into(call) is not None:
        return ()
    if pieces := columns(call):
        return piece_bytes(call, pieces)
    return tuple(entries[view.storage].num_bytes for _, view in call.made)


def inside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Bytes that a kernel takes for itself where an allocator counts them; the meter of a CPU does not."""
    if all(t.device.type == "cpu" for t in args if isinstance(t, torch.Tensor)):
        return ()
    taken = device_workspace(func, args, kwargs)
    return (taken,) if taken else ()
