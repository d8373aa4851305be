"""Forward and backward of one optimizer step, the same call on every layout.

A step is a list of microbatches. Without pipeline stages each runs forward and backward in turn; with them the plan's
schedule decides the order. Either way the gradients are those of the step's loss, a sum over tokens divided once by
`num_tokens`, and the numbers returned add up over all ranks of the model to that loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.data.fsdp import set_last_backward
from hyper_parallel.backends.torch.experts.routing import (
    RoutingStatistics,
    collect_routing,
    routing_statistics,
)
from hyper_parallel.backends.torch.parallel_handle import Handle, handle
from hyper_parallel.backends.torch.partial_use import refuse_other_inputs
from hyper_parallel.backends.torch.pipeline.apply import Microbatch, Span
from hyper_parallel.backends.torch.user_objective import (
    Objective,
    Over,
    check_loss,
    objective_loss,
    stage_inputs,
    targets_of,
)
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import Purpose


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    num_tokens: int | Tensor | None = None,
    span: Span = lambda name, kind: nullcontext(),
    *,
    objective: Objective | None = None,
    over: Over | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Gradients of one step; call the optimizer and `clip_grad_norm_` afterwards.

    Args:
        model: A model that passed through `parallelize`.
        microbatches: This data-parallel rank's microbatches, equal on the ranks that share its data: arguments of the
            model's forward with `labels`, or `shift_labels` that were moved already; for an objective also whatever
            else it needs.
        num_tokens: Valid tokens of the whole step, over all ranks and microbatches; a tensor where the step is
            captured, so that the number is no constant of it. None: they are counted.
        span: ContextState per piece of work, for a timeline: name and kind.
        objective: `objective(first, batch) -> scalar`, in place of the cross entropy. The loss of the step is the sum
            of its values over microbatches and data-parallel ranks: divide by what the whole step has.
        over: What it is given first. logprobs: [B, S], as `token_logprobs`. logits: [N, V] of this rank's own tokens,
            each token on one of the ranks that share it, with a batch cut likewise to [N, ...] and its targets
            `shift_labels` [N]; a sum over tokens, which is added up over these ranks. output: what the model returns,
            without pipeline stages. None: logprobs for a causal language model, else output.
        scale: Gradients are those of so many times the loss; the loss that is returned is not scaled.

    Returns:
        The loss of the step, a float64 scalar, equal on all ranks. With `num_tokens` this rank's share of it, so that
        no collective is spent: the sum over all ranks is the loss.

    Raises:
        NoLoss: HP514 when model or microbatches give no loss. BadObjective: HP515 when an objective gives no scalar.
    """
    return _run(model, microbatches, num_tokens, span, objective, over, train=True, scale=scale)


@torch.no_grad()
def forward_loss(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    num_tokens: int | None = None,
    *,
    objective: Objective | None = None,
    over: Over | None = None,
) -> Tensor:
    """The loss of `microbatches`, as in `forward_backward`, without gradients."""
    span: Span = lambda name, kind: nullcontext()  # noqa: E731
    return _run(model, microbatches, num_tokens, span, objective, over, train=False)


def _run(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    num_tokens: int | Tensor | None,
    span: Span,
    objective: Objective | None,
    over: Over | None,
    train: bool,
    scale: float = 1.0,
) -> Tensor:
    attached = handle(model)
    axes = [axis for axis in ("pp", "cp") if getattr(attached.plan.strategy, axis) > 1]
    for part in microbatches:
        refuse_other_inputs(model, axes, stage_inputs(model, part, objective))
    shares = num_tokens is not None
    if attached.average:  # the loss is one of the whole step already
        scale *= attached.plan.strategy.dp
    if objective is None:
        check_loss(model, attached)
        if num_tokens is None:
            num_tokens = _count(model, attached, microbatches)
    elif shares:
        raise BadValue(
            "an objective divides by what it wants itself; `num_tokens` belongs to the cross entropy",
            got=f"num_tokens={num_tokens}",
            hint="num_tokens=None",
        )

    def scaled(loss: Tensor) -> Tensor:
        return loss if scale == 1.0 else loss * scale

    def loss_of(i: int) -> Tensor:
        part = microbatches[i]
        if objective is not None:
            strategy = attached.plan.strategy
            share = 1 / (len(microbatches) * strategy.dp * strategy.cp)
            return scaled(objective_loss(model, attached, part, objective, over, share))
        given = dict(part)
        if "labels" not in given:
            given = {"labels": targets_of(model, part), **given}
        return scaled(model(**given, num_items_in_batch=num_tokens, use_cache=False).loss)

    if attached.pipeline is not None:
        parts = [stage_inputs(model, p, objective) for p in microbatches]
        total = attached.pipeline.run(model, parts, loss_of, span, train, scale)
    else:
        total = torch.zeros((), dtype=torch.float64, device=attached.device)
        for i in range(len(microbatches)):
            with accumulate(model) if train and i < len(microbatches) - 1 else nullcontext():
                with span("forward", "compute"):
                    loss = loss_of(i)
                if train:
                    with span("backward", "compute"):
                        loss.backward()
            total += loss.detach()
    # One of the ranks that see the same tokens, which all compute the loss, reports it.
    coordinate = attached.plan.mesh.coordinate(attached.ranks.rank)
    reports = all(coordinate[axis] == 0 for axis in ("tp_x", "tp_y"))
    total = total if reports else torch.zeros_like(total)
    total = total if scale == 1.0 else total / scale
    return total if shares else _add_up(attached, total)


def _count(model: nn.Module, attached: Handle, microbatches: Sequence[Microbatch]) -> Tensor:
    """Valid tokens of a step over all ranks."""
    count = torch.zeros((), dtype=torch.float64, device=attached.device)
    for part in microbatches:
        count += (targets_of(model, part) != -100).sum()
    coordinate = attached.plan.mesh.coordinate(attached.ranks.rank)
    if any(coordinate[axis] for axis in ("pp", "cp", "tp_x", "tp_y")):
        count.zero_()  # another rank has counted the same tokens
    return _add_up(attached, count).clamp(min=1)


def _add_up(attached: Handle, value: Tensor) -> Tensor:
    """Sum over all ranks of the model."""
    group = attached.ranks.world_group
    return value if group is None else all_reduce(value, group, Purpose.LOSS)


def data_share(model: nn.Module) -> tuple[int, int]:
    """Which share of the data this rank reads, and how many there are: `rank` and `num_replicas` of a sampler.

    Ranks of one tensor-, context- or pipeline-parallel group read the same share.
    """
    attached = handle(model)
    strategy = attached.plan.strategy
    at = attached.plan.mesh.coordinate(attached.ranks.rank)
    return at["dp_replicate"] * strategy.dp_shard + at["dp_shard"], strategy.dp


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Context for every microbatch of a step but the last: sums that can wait for the last one wait.

    FSDP still reduce-scatters each microbatch unless zero is 1, see `set_last_backward`; the all-reduce over replicas
    and the sum over tensor-parallel ranks happen once, in the backward pass outside this context.
    """
    attached = handle(model)
    _set_last(attached, False)
    try:
        yield
    finally:
        _set_last(attached, True)


def _set_last(attached: Handle, last: bool) -> None:
    set_last_backward(attached.fsdp, attached.plan.strategy, last)
    if attached.tp is not None:
        attached.tp.gradients.enabled = last


def clip_grad_norm_(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    The norm counts every element of every logical gradient once, on any layout: local sums of squares, divided by the
    number of ranks that hold the same elements, are added in one all-reduce of one number.

    Args:
        model: A model that passed through `parallelize`.
        max_norm: Largest norm allowed; None only measures.

    Returns:
        The norm before scaling, a plain scalar tensor, equal on every rank.
    """
    attached = handle(model)
    by_copies: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    wide = torch.float32  # one number format on all ranks, also on a rank that trains nothing
    for name, param in model.named_parameters():
        wide = torch.promote_types(wide, param.dtype)
        if param.grad is None:
            continue
        grad = local(param.grad)
        wide = torch.promote_types(wide, grad.dtype)
        if grad.numel():
            by_copies.setdefault((attached.copies(name), grad.dtype), []).append(grad)
    total = torch.zeros((), dtype=wide, device=attached.device)
    for (copies, dtype), grads in by_copies.items():
        norms = torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32))
        total = total + torch.stack(norms).square().sum() / copies
    if attached.ranks.world_group is not None:
        total = all_reduce(total, attached.ranks.world_group, Purpose.GRADIENT_NORM)
    norm = total.sqrt()
    if max_norm is not None and math.isfinite(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (_, dtype), grads in by_copies.items():
            torch._foreach_mul_(grads, scale.to(dtype))
    return norm


@torch.no_grad()
def count_routing(model: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Add up the routing of a step over all ranks, balance the router biases, and begin to count anew.

    Every rank calls this after each optimizer step. It reads no value, so that it can be captured with the step.

    Returns:
        [layers, E + 1] rows that each expert got and rows that were kept, float64, equal on every rank, and the
        auxiliary loss; None for a model without experts, or when nothing was routed.
    """
    attached = handle(model)
    total = None if attached.experts is None else collect_routing(model, attached.experts)
    loss = None if attached.balance is None else attached.balance.mean()
    return None if total is None else (total, loss)


def end_step(model: nn.Module) -> RoutingStatistics | None:
    """`count_routing`, and the statistics; every rank calls this after each optimizer step.

    Returns:
        The statistics, equal on every rank; None for a model without experts, or when nothing was routed.
    """
    counted = count_routing(model)
    return None if counted is None else routing_statistics(*counted)
