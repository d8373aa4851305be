"""Bytes that kernels take inside themselves and give back before they return.

Such bytes never reach the dispatcher, so a counter of storages cannot see them. Only those that grow with the tensors
are listed; all were found and measured with the allocator's own events (a test does so for every operator of a step).
Left out is what a library decides: the blocks of flash attention on a CPU, and the operands that mkldnn packs for
bfloat16 products (1.5 MiB for layers of 256). `with_kernel_bytes` measures those.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

_ARITHMETIC = tuple(
    getattr(torch.ops.aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
)

FILLED: Final = 0.8
"""The share of a device that storages may fill; the rest is for kernels and what an allocator cannot use. A guess."""


def allocatable_bytes(device: torch.device) -> int:
    """What an accelerator's allocator can give, with what it has given; of a CPU 0."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))


def has_room(device: torch.device, num_bytes: int) -> bool:
    """An accelerator can hold so many bytes more for a while; a CPU is told that it cannot."""
    if device.type == "cpu":
        return False
    taken = torch.get_device_module(device).memory_allocated(device)
    return bool(taken + num_bytes <= FILLED * allocatable_bytes(device))


def device_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Workspace that is part of an operator's definition in ATen, on every device."""
    if func is torch.ops.aten.logsumexp.default:
        # exp(x - max) and the maxima, both in the format of the result.
        x, dims = args[0], args[1]
        kept = math.prod(n for i, n in enumerate(x.shape) if i not in {d % x.ndim for d in dims})
        return (x.numel() + kept) * x.element_size()
    return 0


def cpu_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """`device_workspace`, and what CPU kernels and gloo add: copies that accelerators' kernels and NCCL do not make."""
    name = func.__name__
    if func.namespace == "c10d" and name.startswith(("_allgather_base_", "_reduce_scatter_base_")):
        # gloo gathers into a buffer of its own, and reduces in a copy: in both cases of the whole tensor.
        return max(args[0].nbytes, args[1].nbytes)
    if func.namespace == "fsdp" and name.startswith("chunk_cat"):
        tensors, out = args[0], kwargs["out"]
        # Another format is converted one tensor at a time.
        return max((t.nbytes for t in tensors if t.dtype != out.dtype), default=0)
    if func in _ARITHMETIC and isinstance(args[1], Tensor):
        # Operands of another format than the result are converted whole: bfloat16 gradients added to float32 sums.
        dtype = torch.result_type(args[0], args[1])
        return sum(t.numel() * dtype.itemsize for t in args[:2] if t.ndim > 0 and t.dtype != dtype)
    return device_workspace(func, args, kwargs)
