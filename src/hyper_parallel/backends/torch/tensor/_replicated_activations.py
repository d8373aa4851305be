"""Tensor parallelism with replicated activations: any model in which some modules are sharded.

    column-parallel projection   input unchanged; the gradient of the input is summed over the ranks
    row-parallel projection      output summed over the ranks; the gradient passes unchanged
    between these two            each rank computes its own heads or features
    all other modules            same computation on every rank, with the same random numbers; their gradients are
                                 complete on every rank and are not summed

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, the operators f and g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.in_flight import sum_backward
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.tensor._projections import Region
from hyper_parallel.backends.torch.tensor.collectives import join
from hyper_parallel.backends.torch.tensor.gradients import (
    TpGradients,
    to_local,
    use_local_parameters,
)
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.ir import Purpose


def call_with_summed_input_grad(
    group: ProcessGroup, region: Region | None, inner: Callable[..., Any], x: Tensor
) -> Any:
    """Return `inner(x)`, where `inner` is a column-parallel projection; backward sums the gradient of `x` over ranks.

    If the projections of a region have the same input, its gradient is all-reduced once for all of them. If `region` is
    None, only this projection reads `x`.
    """
    if region is None:
        return inner(sum_backward(x, group, Purpose.ACTIVATIONS))
    current = region.current
    if current.block_input is not x or current.block_input_summed_grad is None:
        current.block_input = x
        current.block_input_summed_grad = sum_backward(x, group, Purpose.ACTIVATIONS)
    return inner(current.block_input_summed_grad)


def share_random_numbers(group: ProcessGroup, device: torch.device) -> None:
    """Set the same random seed on all ranks of a group, because dropout on replicated activations needs equal masks."""
    seed = torch.randint(1 << 62, (1,)).to(device)
    dist.broadcast(seed, group=group, group_src=0)
    torch.manual_seed(int(seed))


def tied_heads(modules: Mapping[str, nn.Module], split: Mapping[str, str]) -> list[str]:
    """Return the names of the linear modules that share their weight with a sharded embedding.

    Args:
        modules: All modules of the model by name.
        split: Sharding style of each sharded module by name. It lacks the linear modules that this function finds,
            because a shared parameter is listed under one name only.
    """
    weights = [modules[name].weight for name, style in split.items() if style == "vocab"]
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and any(module.weight is weight for weight in weights)
    ]


class _GatheredParameters(dict[str, Any]):
    """Parameter dict of a row-sharded module that all-gathers a parameter when it is read."""

    def __init__(self, params: Mapping[str, Any], gradients: TpGradients, group: ProcessGroup) -> None:
        super().__init__(params)
        self.gradients, self.group = gradients, group

    def __getitem__(self, name: str) -> Tensor:
        return join(to_local(super().__getitem__(name), self.gradients), 0, self.group)


def gather_embedding_when_read(
    model: nn.Module, embedding: nn.Module, gradients: TpGradients, group: ProcessGroup
) -> None:
    """Gather the weight of a sharded embedding when the model's forward reads it, as Gemma 4 does."""

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = embedding._parameters
        embedding.__dict__["_parameters"] = _GatheredParameters(params, gradients, group)
        try:
            return inner(*args, **kwargs)
        finally:
            embedding.__dict__["_parameters"] = params

    wrap(model, forward)


def use_local_replicated_parameters(model: nn.Module, split: Mapping[str, str], gradients: TpGradients) -> None:
    """Replace the parameters of modules without sharded parameters by their local tensors during forward.

    The replacement is active during the forward of the layer that contains the module. For modules outside of layers,
    it is active during the forward of the model.
    """
    wrapped = {model.get_submodule(name) for name in split}
    for unit in (*view_of(model).layers, model):
        modules = [m for m in unit.modules() if m._parameters and m not in wrapped]
        wrapped.update(modules)
        use_local_parameters(unit, gradients, modules=modules)
