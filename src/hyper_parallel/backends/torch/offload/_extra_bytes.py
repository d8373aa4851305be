"""Device bytes that an operator takes beside the addresses of its results.

What a kernel takes for itself and gives back before it returns depends on the kernel that a device chooses: sums in
float32, sorted rows, workspaces. So the allocator of an accelerator is asked while the step is recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.backends.torch._workspace import device_workspace
from hyper_parallel.backends.torch.offload._calls import COMMUNICATION, Call
from hyper_parallel.backends.torch.offload._captured import Entry
from hyper_parallel.backends.torch.offload._into import into
from hyper_parallel.backends.torch.offload._pieces import columns, piece_bytes, widest


def beside(call: Call, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Bytes of the results that a call makes elsewhere first."""
    if not call.made or into(call) is not None:
        return ()
    if pieces := columns(call):
        return piece_bytes(call, pieces)
    return tuple(entries[view.storage].num_bytes for _, view in call.made)


def run(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, tuple[int, ...]]:
    """Run an operator.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its named arguments.
        tensors: The tensors among them.

    Returns:
        Its outputs, and the bytes that its kernel had for itself beside them. The allocator's peak begins anew.
    """
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    if device is None or func.namespace in COMMUNICATION:
        return func(*args, **kwargs), ()
    module: Any = torch.get_device_module(device)
    told = hasattr(module, "max_memory_allocated")
    if not told or any(isinstance(t, FakeTensor) for t in tensors):
        taken = device_workspace(func, args, kwargs)
        return func(*args, **kwargs), (taken,) if taken else ()
    with _no_collection():
        module.reset_peak_memory_stats(device)
        out = func(*args, **kwargs)
        # What stays is a result, or a workspace that a library keeps.
        taken = int(module.max_memory_allocated(device) - module.memory_allocated(device))
    return out, (taken,) if taken else ()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that is freed meanwhile would count as the kernel's."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def of_piece(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], taken: tuple[int, ...]
) -> tuple[int, ...]:
    """What of `taken` remains where a plan runs the call in pieces: one of them is run."""
    pieces = columns(call)
    if not taken or not pieces:
        return taken
    part = widest(pieces, args)
    return run(call.func, part, kwargs, [t for t in part if isinstance(t, torch.Tensor)])[1]
