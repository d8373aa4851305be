"""A model without its bytes, for recording a step that nobody could run in one piece."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.errors import CaptureUnsupported


def _grouped_products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shapes of `_grouped_mm` for every format.

    torch's own shape rule knows bfloat16 only, as on a GPU; the CPU kernel also takes float32 and float16.
    """
    left = args[0] if args else None
    if func is not torch.ops.aten._grouped_mm.default or left.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    right = args[1]
    shape = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        # Groups are a dim of both, or parts of the one that is summed over.
        parts = args[2] if len(args) > 2 else kwargs["offs"]
        shape = (len(left) if left.dim() == 3 else len(parts), *shape)
    # Rows begin at multiples of 16 bytes, as in the kernels.
    unit = 16 // left.element_size()
    row = -(-shape[-1] // unit) * unit
    strides = (row, 1) if len(shape) == 2 else (shape[-2] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)


@contextmanager
def fake_copy(model: torch.nn.Module, device: torch.device) -> Iterator[Any]:
    """Inside, a copy of the model whose tensors have shapes and no bytes; its steps can be recorded.

    Args:
        model: A model in host memory.
        device: Where its steps will run; the operators that are recorded depend on it.

    Raises:
        CaptureUnsupported: HP511 when the model's code needs a value or a size that depends on the data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # numbers of the model's code
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    try:
        with mode, OperatorMode(_grouped_products):
            _move(fake, device)
            yield fake
    except DynamicOutputShapeException as error:
        raise CaptureUnsupported(
            f"`{error.func}` makes a result whose size depends on the data",
            hint="leave out --device-memory; for experts, `model.set_experts_implementation('grouped_mm')`",
        ) from error


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Put fake parameters and buffers on a device; `Module.to` cannot. What is shared stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    if isinstance(tensor, torch.nn.Parameter):
                        there = torch.nn.Parameter(there, tensor.requires_grad)
                    moved[id(tensor)] = there
                held[name] = moved[id(tensor)]  # type: ignore[index]
