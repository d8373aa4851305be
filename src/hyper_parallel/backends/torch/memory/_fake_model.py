"""Fake copies of a model, for recording a step that would not fit on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeCopyMode, FakeTensorMode

from hyper_parallel.backends.torch.memory._fake_values import grouped_products
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.errors import CaptureUnsupported


@contextmanager
def fake_copy(model: torch.nn.Module, device: torch.device) -> Iterator[Any]:
    """Yield a copy of the model on fake tensors; its steps can be recorded inside the context.

    Args:
        model: A model in host memory.
        device: Device of the steps; the recorded operators depend on it.

    Raises:
        CaptureUnsupported: HP511 when the model's code needs a value or a size that depends on the data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # numbers of the model's code
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    try:
        with mode, OperatorMode(grouped_products):
            _move(fake, device)
            yield fake
    except DynamicOutputShapeException as error:
        raise CaptureUnsupported(
            f"`{error.func}` makes a result whose size depends on the data",
            hint="leave out --device-memory; for experts, `model.set_experts_implementation('grouped_mm')`",
        ) from error


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Put fake parameters and buffers on a device, which `Module.to` cannot; shared tensors stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    target = tensor.detach().to(device)
                    if isinstance(tensor, torch.nn.Parameter):
                        target = torch.nn.Parameter(target, tensor.requires_grad)
                    moved[id(tensor)] = target
                tensors[name] = moved[id(tensor)]  # type: ignore[index]
