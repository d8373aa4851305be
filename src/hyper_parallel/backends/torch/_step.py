"""Forward and backward of one optimizer step, the same call on every layout.

A step is a list of microbatches. Without pipeline stages each runs forward and backward in turn; with them the plan's
schedule decides the order. Either way the gradients are those of the step's loss, a sum over tokens divided once by
`num_tokens`, and the numbers returned add up over all ranks of the model to that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch._handle import Handle, handle
from hyper_parallel.backends.torch.data._gradients import accumulate

Microbatch = Mapping[str, Any]
"""Arguments of the model's forward: input_ids and shift_labels of [B, S], and what else it takes."""
Span = Callable[[str, str], AbstractContextManager[Any]]


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    num_tokens: int | Tensor,
    span: Span = lambda name, kind: nullcontext(),
) -> Tensor:
    """Gradients of one step; call the optimizer and `clip_grad_norm_` afterwards.

    Args:
        model: A model that passed through `parallelize`.
        microbatches: This data-parallel rank's microbatches, equal on the ranks that share its data.
        num_tokens: Valid tokens of the whole step, over all ranks and microbatches; a tensor where the step is
            captured, so that the number is no constant of it.
        span: Context per piece of work, for a timeline: name and kind.

    Returns:
        This rank's share of the loss, a float64 scalar: the sum over all ranks is the loss of the step.
    """
    found = handle(model)
    if found.pipeline is not None:
        total = found.pipeline.step(
            model, microbatches, lambda part: _loss(model, part, num_tokens), span
        )
        return total if _reports(found) else torch.zeros_like(total)
    total = torch.zeros((), dtype=torch.float64, device=found.device)
    for i, microbatch in enumerate(microbatches):
        with accumulate(model) if i < len(microbatches) - 1 else nullcontext():
            with span("forward", "compute"):
                loss = _loss(model, microbatch, num_tokens)
            with span("backward", "compute"):
                loss.backward()
        total += loss.detach()
    return total if _reports(found) else torch.zeros_like(total)


@torch.no_grad()
def forward_loss(model: nn.Module, microbatches: Sequence[Microbatch], num_tokens: int) -> Tensor:
    """This rank's share of the loss of `microbatches`, as in `forward_backward`, without gradients."""
    found = handle(model)
    if found.pipeline is not None:
        total = found.pipeline.loss(
            model, microbatches, lambda part: _loss(model, part, num_tokens)
        )
        return total if _reports(found) else torch.zeros_like(total)
    total = torch.zeros((), dtype=torch.float64, device=found.device)
    for microbatch in microbatches:
        total += _loss(model, microbatch, num_tokens)
    return total if _reports(found) else torch.zeros_like(total)


def _loss(model: nn.Module, microbatch: Microbatch, num_tokens: int | Tensor) -> Tensor:
    labels = microbatch["shift_labels"]
    output = model(
        **{"labels": labels, **microbatch}, num_items_in_batch=num_tokens, use_cache=False
    )
    return output.loss


def _reports(found: Handle) -> bool:
    """Whether this rank's loss counts: ranks that see the same tokens compute the same loss, one of them has it."""
    coordinate = found.plan.mesh.coordinate(found.rank)
    return all(coordinate[axis] == 0 for axis in ("tp_x", "tp_y"))
