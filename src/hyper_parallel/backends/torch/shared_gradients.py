"""Sum of the gradients of parameters that several ranks hold: weights of several stages, and copies of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.weights.shard_ranges import local


def divide_gradients(params: Sequence[nn.Parameter], holders: int) -> None:
    """Divide gradients by the number of ranks over which `sum_gradients` has summed them, before its next call."""
    for p in params:
        if p.grad is not None:
            local(p.grad).div_(holders)


def sum_gradients(
    params: Sequence[nn.Parameter],
    all_reduce: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None = None,
    *,
    optional: bool = True,
) -> None:
    """Replace the gradients of parameters by their sums over the ranks that hold these parameters.

    Args:
        params: The parameters, in the same order on all ranks that hold them.
        all_reduce: Function from a tensor [N] of this rank to the sum over ranks.
        dtype: Dtype of the sums; None: the dtype of the gradients.
        optional: Whether a parameter without a gradient on all ranks keeps None; if False, its gradient becomes zero.
    """
    if not params:
        return
    uses = [p.grad is not None for p in params] if optional else []
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [local(p.grad) for p in params if p.grad is not None]
    parts = [*(grad.reshape(-1) for grad in grads), grads[0].new_tensor(uses)]
    flat = torch.cat([part if dtype is None else part.to(dtype) for part in parts])
    *sums, counts = all_reduce(flat).split([part.numel() for part in parts])
    for grad, total in zip(grads, sums, strict=True):
        grad.copy_(total.view_as(grad))
    for p, count in zip(params if optional else (), counts.tolist(), strict=True):
        if not count:
            p.grad = None
