"""Workspace of kernels: bytes that a kernel allocates and frees before it returns.

Workspace never reaches the dispatcher, so a counter of storages cannot see it. The rules here cover workspace that
grows with the tensors, as measured by the allocator's own events (a test does so for every operator of a step).
Workspace that a library chooses is not covered: the blocks of flash attention on a CPU, and the operands that mkldnn
packs for bfloat16 products (1.5 MiB for layers of 256). `benchmarks/offload_meter.py` measures it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ARITHMETIC = tuple(
    getattr(torch.ops.aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
)


def device_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the workspace that ATen's definition of an operator implies on every device."""
    if func is torch.ops.aten.logsumexp.default:
        # exp(x - max) and the maxima, both in the dtype of the result.
        x, dims = args[0], args[1]
        reduced_numel = math.prod(
            n for i, n in enumerate(x.shape) if i not in {d % x.ndim for d in dims}
        )
        return (x.numel() + reduced_numel) * x.element_size()
    return 0


def cpu_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return `device_workspace` plus the copies that CPU kernels and gloo make, unlike accelerators and NCCL."""
    name = func.__name__
    if func.namespace == "c10d" and name.startswith(("_allgather_base_", "_reduce_scatter_base_")):
        # gloo gathers into a buffer of its own, and reduces in a copy; both have the size of the full tensor.
        return max(args[0].nbytes, args[1].nbytes)
    if func.namespace == "fsdp" and name.startswith("chunk_cat"):
        tensors, out = args[0], kwargs["out"]
        # Tensors of another dtype are converted one at a time.
        return max((t.nbytes for t in tensors if t.dtype != out.dtype), default=0)
    if func in _ARITHMETIC and isinstance(args[1], Tensor):
        # Operands of another dtype are converted as a whole, such as bfloat16 gradients added to float32 sums.
        dtype = torch.result_type(args[0], args[1])
        return sum(t.numel() * dtype.itemsize for t in args[:2] if t.ndim > 0 and t.dtype != dtype)
    return device_workspace(func, args, kwargs)
