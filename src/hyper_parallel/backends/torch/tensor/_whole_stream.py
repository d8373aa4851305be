"""Where every tensor-parallel rank holds the residual stream of all tokens: any model, of which some modules are split.

    projection in (rows split)     its input as it is; gradients of the input are summed over the ranks
    projection out (columns split) its output is summed over the ranks; the gradient passes as it is
    everything else                computes the same on every rank, with the same random numbers, so its gradients are
                                   whole and nobody sums them

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, the operators f and g.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import sum_backward
from hyper_parallel.backends.torch.model_structure import layers_of
from hyper_parallel.backends.torch.tensor._projections import Region
from hyper_parallel.backends.torch.tensor.collectives import join
from hyper_parallel.backends.torch.tensor.gradients import TpGradients, show_local, to_local
from hyper_parallel.ir import Purpose


def whole_input(
    group: ProcessGroup, region: Region | None, inner: Callable[..., Any], x: Tensor
) -> Any:
    """The forward of a projection in on `x`, which its siblings also read: one sum of gradients for all in a region."""
    if region is None:
        return inner(sum_backward(x, group, Purpose.ACTIVATIONS))
    if region.source is not x or region.shared is None:
        region.source = x
        region.shared = sum_backward(x, group, Purpose.ACTIVATIONS)
    return inner(region.shared)


def share_random_numbers(group: ProcessGroup, device: torch.device) -> None:
    """From now on the ranks draw the same: dropout of what is whole on each must be one."""
    seed = torch.randint(1 << 62, (1,)).to(device)
    dist.broadcast(seed, group=group, group_src=0)
    torch.manual_seed(int(seed))


def tied_heads(modules: Mapping[str, nn.Module], split: Mapping[str, str]) -> list[str]:
    """Projections to logits with the weight of a split embedding, whose parameter has the embedding's name alone."""
    weights = [modules[name].weight for name, style in split.items() if style == "vocab"]
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and any(module.weight is weight for weight in weights)
    ]


class _Joined(dict[str, Any]):
    """Parameters whose rows are split over ranks, whole for who reads one."""

    def __init__(
        self, params: Mapping[str, Any], gradients: TpGradients, group: ProcessGroup
    ) -> None:
        super().__init__(params)
        self.gradients, self.group = gradients, group

    def __getitem__(self, name: str) -> Tensor:
        return join(to_local(super().__getitem__(name), self.gradients), 0, self.group)


def join_when_read(
    model: nn.Module, embedding: nn.Module, gradients: TpGradients, group: ProcessGroup
) -> None:
    """Let the model's forward read rows of a split embedding's weight without calling it; Gemma 4 does."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = embedding._parameters
        embedding.__dict__["_parameters"] = _Joined(kept, gradients, group)
        try:
            return inner(*args, **kwargs)
        finally:
            embedding.__dict__["_parameters"] = kept

    model.forward = forward


def show_whole(model: nn.Module, split: Mapping[str, str], gradients: TpGradients) -> None:
    """Local parameters of what is not split, while the forward of its layer runs; outside of layers, the model's."""
    kept = {model.get_submodule(name) for name in split}
    for unit in (*layers_of(model), model):
        own = [m for m in unit.modules() if m._parameters and m not in kept]
        kept.update(own)
        show_local(unit, gradients, modules=own)
