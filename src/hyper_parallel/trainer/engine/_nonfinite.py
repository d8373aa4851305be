"""Where the first value that is not finite comes from: a step is run again with a hook on every module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch import local


def first_not_finite(model: nn.Module, again: Callable[[], Any], stage: int) -> str | None:
    """Name the first tensor of a step with NaN or infinity; every rank calls this, and all get the same.

    Args:
        model: The model; its gradients are gone afterwards.
        again: Runs forward and backward of the step that was not finite, with the same random numbers.
        stage: Place of this rank in the pipeline.

    Returns:
        Kind and name of the tensor and its rank; None when every value of the second pass is finite.
    """
    found: list[tuple[int, str]] = []

    def note(order: int, what: str, value: Any) -> None:
        if not found and isinstance(value, Tensor) and value.is_floating_point():
            value = local(value.detach())
            if not torch.isfinite(value).all():
                kind = "NaN" if torch.isnan(value).any() else "infinity"
                found.append((order, f"{what} has {kind}"))

    def watch(name: str, _: nn.Module, __: Any, output: Any) -> None:
        for value in tree_leaves(output):
            note(1, f"the output of module `{name}` in forward", value)
            if isinstance(value, Tensor) and value.requires_grad:
                what = f"the gradient of the output of module `{name}` in backward"
                value.register_hook(partial(note, 2, what))

    for name, parameter in model.named_parameters():
        note(0, f"parameter `{name}`, before the step,", parameter)
    if not _any(bool(found), model):
        hooks = [
            m.register_forward_hook(partial(watch, n or "the model"))
            for n, m in model.named_modules()
        ]
        try:
            again()
        finally:
            for hook in hooks:
                hook.remove()
        for name, parameter in model.named_parameters():
            note(3, f"the gradient of parameter `{name}`", parameter.grad)
    model.zero_grad(set_to_none=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Forward comes from the first stage, backward from the last.
    mine = [(order, -stage if order > 1 else stage, rank, what) for order, what in found]
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    first = min((one for each in everyone for one in each), default=None)
    return None if first is None else f"{first[3]} (rank {first[2]})"


def _any(flag: bool, model: nn.Module) -> bool:
    """Whether the flag is set on any rank."""
    if not dist.is_initialized():
        return flag
    raised = torch.tensor(float(flag), device=local(next(model.parameters())).device)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return bool(raised.item())
