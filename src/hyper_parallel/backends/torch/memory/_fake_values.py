"""Known values among fake tensors, and the workspace of kernels.

Fake tensors have sizes and no values, but programs read some values: whether a batch is packed, how many rows an expert
receives. These values decide which operators run, so they must be right. Three rules provide them:

    small tensors that depend only on known ones (positions, masks, token ids) are computed on real tensors
    a router chooses experts evenly: `topk` of unknown scores is round robin
    all ranks have equal known values: a collective of known tensors is computed from this rank's tensors

Workspace is the bytes that a kernel allocates and frees before it returns. These allocations never reach the
dispatcher, so a counter of storages cannot see them. The rules here cover workspace that grows with the tensors, as
measured by the allocator's own events. Workspace that a library chooses is not covered: the blocks of flash attention
on a CPU, and the operands that mkldnn packs for bfloat16 products. `benchmarks/offload_meter.py` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from hyper_parallel.units import round_up

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Function that returns the workspace bytes of a kernel: operator, arguments, keyword arguments."""
_KNOWN_BYTES = 1 << 27
"""Maximum bytes of a result that is computed on real tensors in a fake mode."""


def fake_mode() -> Any:
    """Return the active `FakeTensorMode`, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def run_with_known_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Run an operator and return its result; in a fake mode, small results of known tensors are known too.

    `tensors` are the tensors among the arguments. Without a fake mode, the operator runs as usual.
    """
    if fake_mode() is None:
        return func(*args, **kwargs)
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        out = grouped_products(func, args, kwargs)
        if func is torch.ops.aten.topk.default:
            return out[0], _round_robin(out[1], args[0].shape[-1])
        return out
    if not func._schema.is_mutable:
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = None  # compute the result from the known values
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        large = any(t.untyped_storage().nbytes() > _KNOWN_BYTES for t in results)
        if large or (not tensors and any(t.is_floating_point() for t in results)):
            return out
    with unset_fake_temporarily():
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            _from_equal_ranks(func, args)
        return out


def grouped_products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; for `_grouped_mm` on fake tensors, accept every dtype.

    torch's own shape rule of `_grouped_mm` allows bfloat16 only, although the CPU kernel accepts float32 and float16.
    """
    left = args[0] if args else None
    if func is not torch.ops.aten._grouped_mm.default or left.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    right = args[1]
    shape = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        # Groups are a dim of both operands, or slices of the contracted dim.
        parts = args[2] if len(args) > 2 else kwargs["offs"]
        shape = (len(left) if left.dim() == 3 else len(parts), *shape)
    # Rows begin at multiples of 16 bytes, as in the kernels.
    unit = 16 // left.element_size()
    row = round_up(shape[-1], unit)
    strides = (row, 1) if len(shape) == 2 else (shape[-2] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)


def _round_robin(index: Tensor, choices: int) -> Tensor:
    with unset_fake_temporarily():
        return (torch.arange(index.numel()) % choices).view(index.shape)


def _from_equal_ranks(func: Any, args: tuple[Any, ...]) -> None:
    """Set the result of a sum, an all-gather or an even all-to-all in place, as if all ranks had equal inputs."""
    name = func.__name__
    if name.startswith("allreduce_"):
        group, op = dist.ProcessGroup.unbox(args[1]), dist.ReduceOp.unbox(args[2])
        for tensor in args[0] if op == dist.ReduceOp.SUM else ():
            tensor.mul_(group.size())
    elif name.startswith(("_allgather_base_", "alltoall_base_")):
        out, own, group = args[0], args[1], dist.ProcessGroup.unbox(args[2])
        if name.startswith("alltoall"):
            assert not args[3], "uneven splits of known values"
            own = own.chunk(group.size())[group.rank()]
        out.copy_(torch.cat([own] * group.size()).view_as(out))


_ARITHMETIC = tuple(
    getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
)


def device_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the workspace bytes that ATen's definition of an operator implies on every device; 0 without a rule."""
    if func is torch.ops.aten.logsumexp.default:
        # exp(x - max) and the maxima, both in the dtype of the result.
        x, dims = args[0], args[1]
        reduced_numel = math.prod(n for i, n in enumerate(x.shape) if i not in {d % x.ndim for d in dims})
        return (x.numel() + reduced_numel) * x.element_size()
    return 0


def cpu_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the workspace bytes of an operator on a CPU: copies by its kernel or by gloo; 0 without a rule."""
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
