"""Detection of modules that compute x W^T + b or x W + b, by their results on random values, for adapters."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

OUT_IN: Final = "out_in"
"""Order of a weight [out, in], as in `nn.Linear`."""
IN_OUT: Final = "in_out"
"""Order of a weight [in, out], as in the `Conv1D` of GPT-2."""


def is_linear_class(module: nn.Module) -> bool:
    """Return whether a module is of a class that peft wraps as a linear module."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def weight_order(module: nn.Module) -> str | None:
    """Return the order of dims of a linear module's weight, `OUT_IN` or `IN_OUT`; None for other modules.

    A module with a custom forward is run on random inputs with random parameters, so its own parameters may be on the
    meta device.
    """
    if type(module).forward is nn.Linear.forward:
        return OUT_IN
    names = {n for n, p in module._parameters.items() if p is not None}
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not names <= {"weight", "bias", "lora_A", "lora_B"}:
        return None
    draws = torch.Generator().manual_seed(0)
    values = {
        n: torch.rand(tuple(module.get_parameter(n).shape), generator=draws) - 0.5 for n in names & {"weight", "bias"}
    }
    for order, matrix in ((OUT_IN, values["weight"]), (IN_OUT, values["weight"].t())):
        x = torch.rand(2, 3, matrix.shape[1], generator=draws) - 0.5
        with suppress(Exception), torch.no_grad():
            actual = _plain_forward(module, values, x)
            expected = F.linear(x, matrix, values.get("bias"))
            same = actual.shape == expected.shape
            if same and (actual - expected).abs().max() <= 1e-4 * expected.abs().max():
                return order
    return None


def linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Return the `nn.Linear` and `Conv1D` modules of a model whose forward is a linear map, by name.

    Only the smallest module of every class is measured. Modules whose forward does not run, and those inside of
    `nn.MultiheadAttention`, are excluded.
    """
    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    # `nn.MultiheadAttention` reads the weights of its submodules without calling them: adapters have no effect there.
    unused = {part for m in attention for part in m.modules()}
    modules = {name: m for name, m in model.named_modules() if m not in unused}
    candidates = {name: module for name, module in modules.items() if is_linear_class(module)}
    smallest: dict[type[nn.Module], nn.Module] = {}
    for module in sorted(candidates.values(), key=lambda m: m.weight.numel()):
        smallest.setdefault(type(module), module)
    orders = {cls: weight_order(module) for cls, module in smallest.items()}
    return {name: module for name, module in candidates.items() if orders[type(module)] is not None}


def _plain_forward(module: nn.Module, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    original = module._parameters
    module.__dict__["_parameters"] = {**original, **values}
    try:
        result: torch.Tensor = type(module).forward(module, x)
        return result
    finally:
        module.__dict__["_parameters"] = original
