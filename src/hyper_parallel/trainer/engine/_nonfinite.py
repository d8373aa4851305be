"""Search for the first value that is not finite: a step runs rerun with a hook on every module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch import local
from hyper_parallel.runtime import gather_objects


def first_not_finite(model: nn.Module, rerun: Callable[[], Any], stage: int) -> str | None:
    """Return the first tensor of a step with NaN or infinity; every rank calls this and gets the same result.

    Args:
        model: The model; its gradients are cleared.
        rerun: Runs forward and backward of the step rerun, with the same random numbers.
        stage: Pipeline stage of this rank.

    Returns:
        Kind and name of the tensor and its rank; None when every value of the second pass is finite.
    """
    hits: list[tuple[int, str]] = []

    def note(order: int, what: str, value: Any) -> None:
        if not hits and isinstance(value, Tensor) and value.is_floating_point():
            value = local(value.detach())
            if not torch.isfinite(value).all():
                kind = "NaN" if torch.isnan(value).any() else "infinity"
                hits.append((order, f"{what} has {kind}"))

    def watch(name: str, _: nn.Module, __: Any, output: Any) -> None:
        for value in tree_leaves(output):
            note(1, f"the output of module `{name}` in forward", value)
            if isinstance(value, Tensor) and value.requires_grad:
                what = f"the gradient of the output of module `{name}` in backward"
                value.register_hook(partial(note, 2, what))

    for name, parameter in model.named_parameters():
        note(0, f"parameter `{name}`, before the step,", parameter)
    if not any(gather_objects(bool(hits))):
        hooks = [
            m.register_forward_hook(partial(watch, n or "the model"))
            for n, m in model.named_modules()
        ]
        try:
            rerun()
        finally:
            for hook in hooks:
                hook.remove()
        for name, parameter in model.named_parameters():
            note(3, f"the gradient of parameter `{name}`", parameter.grad)
    model.zero_grad(set_to_none=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Forward starts at the first stage, backward at the last.
    own = [(order, -stage if order > 1 else stage, rank, what) for order, what in hits]
    first = min((one for each in gather_objects(own) for one in each), default=None)
    return None if first is None else f"{first[3]} (rank {first[2]})"
