"""Forward and backward of one optimizer step, with the same interface on every layout.

A step is a list of microbatches. Without pipeline stages, each microbatch runs forward and backward in turn; with
stages, the plan's schedule decides the order. The built-in loss of a step is the sum of the cross entropy over target
tokens, divided once by their number `num_tokens`. The losses that ranks return with `num_tokens` add up to this loss.

An objective, `objective(first, batch) -> scalar`, replaces the cross entropy; `first` is a result of the model, and
`batch` the microbatch. Ranks that share a microbatch compute the same value, and backward counts its gradient once.
With `over="logits"`, each rank instead computes the objective of its own tokens, and the values are summed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch._logits_hook import cut_batch
from hyper_parallel.backends.torch.collectives import all_reduce, purpose
from hyper_parallel.backends.torch.data.fsdp import set_last_backward
from hyper_parallel.backends.torch.experts.routing import (
    RoutingStatistics,
    collect_routing,
    routing_statistics,
)
from hyper_parallel.backends.torch.in_flight import sum_forward
from hyper_parallel.backends.torch.parallel_handle import Handle, handle
from hyper_parallel.backends.torch.partial_use import extend_backward, refuse_other_inputs
from hyper_parallel.backends.torch.pipeline.apply import TARGETS, Microbatch, Span, StepActions
from hyper_parallel.backends.torch.submodels.exchange import Source
from hyper_parallel.backends.torch.submodels.step_runs import Joint, Rounds
from hyper_parallel.backends.torch.token_rows import TOKEN_MASK
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import IGNORED, cross_entropy, shifted
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import BadObjective, BadValue, NoLoss, UnsupportedSharding
from hyper_parallel.ir import Purpose
from hyper_parallel.shard import completed_changes

Objective = Callable[[Any, Mapping[str, Any]], Tensor]
Over = Literal["logprobs", "logits", "output"]
OVER: Final = ("logprobs", "logits", "output")


def _no_span(name: str, kind: str) -> AbstractContextManager[None]:
    return nullcontext()


def token_logprobs(model: nn.Module, **batch: Any) -> Tensor:
    """Return the log-probabilities of the next tokens from one forward pass.

    Without pipeline stages, the result is differentiable. Every rank of the model must call this function.

    Args:
        model: A causal language model that passed through `parallelize`.
        batch: Arguments of the model's forward. Targets are `shift_labels` [B, S], else `labels` shifted by one token,
            else `input_ids` shifted likewise, except where a 2-D `attention_mask` is 0.

    Returns:
        Log-probability of the target at each position, [B, S], float64 for float64 logits, else float32. It is 0 where
        the target is -100; shifted labels have this target at the last position. Ranks with the same data get equal
        values for full sequences, also under context parallelism.

    Raises:
        NoLoss: HP514 when the model does not compute logits of next tokens, or the batch has no targets.
        UnsupportedSharding: HP205 with pipeline stages and gradients enabled; use `forward_backward` instead.
    """
    attached = handle(model)
    pipeline = attached.pipeline
    if pipeline is None:
        return _logprobs(model, attached, batch)
    if torch.is_grad_enabled():
        raise UnsupportedSharding(
            "with pipeline stages, token log-probabilities have gradients only inside an objective",
            where=type(model).__name__,
            allowed="with torch.no_grad(): token_logprobs(...)",
            hint="forward_backward(model, microbatches, objective=...)",
        )
    part = _forward_kwargs(model, batch)
    out = pipeline.forward(model, part, lambda: _logprobs(model, attached, batch))
    compute = getattr(torch, attached.plan.workload.compute_dtype)
    dtype = torch.promote_types(compute, torch.float32)
    if out is None:
        out = torch.empty(part["input_ids"].shape, dtype=dtype, device=attached.device)
    with purpose(Purpose.LOSS_STATISTICS):
        last = pipeline.stages.rank_of[pipeline.last]
        dist.broadcast(out, group=pipeline.group, group_src=last)
    return out


def _objective_loss(
    model: nn.Module,
    attached: Handle,
    batch: Mapping[str, Any],
    objective: Objective,
    over: Over | None,
    share: float,
) -> Tensor:
    """Return this rank's loss of one microbatch, a scalar on which backward is called.

    The sum over cp ranks is the objective's value for the microbatch, plus the router loss if gradients are enabled.
    With pipeline stages, the last stage adds the router loss later.
    `share` is the weight of this rank's microbatch in the router loss of the step.
    """
    scores = over is None and scores_tokens(model)
    over = over or ("logprobs" if scores or _has_token_loss(model, attached) else "output")
    value: Tensor
    if over == "output":
        if attached.pipeline is not None:
            raise UnsupportedSharding(
                'with pipeline stages, no rank has the model\'s full output, which over="output" needs',
                where=type(model).__name__,
                allowed=OVER[:2],
                hint='over="logprobs" for a causal language model, else a plan without pipeline stages',
            )
        value = _value(objective, model(**_forward_kwargs(model, batch)), batch)
    elif over == "logprobs":
        if scores:
            assert attached.loss is not None
            targets = targets_of(model, batch)
            first = _intercepted(model, attached, batch, targets, attached.loss.scores)
        else:
            first = _logprobs(model, attached, batch)
        value = _value(objective, first, batch)
    elif over == "logits":
        first, own, is_shared = _own_logits(model, attached, batch)
        value = _value(objective, first, own)
        if attached.tp is not None and is_shared:
            value = sum_forward(value, attached.tp.group, Purpose.LOSS)
    else:
        raise BadValue(
            "unknown value of `over`, which selects the first argument of an objective",
            where="over",
            got=over,
            allowed=OVER,
            hint='over="logprobs"',
        )
    # All ranks that hold parts of the same sequences compute the value; one reports it.
    repeats = attached.context is not None and attached.context.group.rank() > 0
    if over != "logits" and repeats:
        value = value - value.detach()
    if attached.balance is None or not torch.is_grad_enabled():
        return value
    return attached.balance.loss_hook(value, share)


def _value(objective: Objective, first: Any, batch: Mapping[str, Any]) -> Tensor:
    value = objective(first, batch)
    number = isinstance(value, Tensor) and value.numel() == 1
    if not number or (torch.is_grad_enabled() and not value.requires_grad):
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
        raise BadObjective(
            "an objective must return one number that depends on its first argument",
            where=getattr(objective, "__qualname__", type(objective).__name__),
            got=got,
            allowed="a scalar tensor that requires grad, computed from the first argument",
            hint="return the tensor itself, without `.item()`, `.detach()` or `torch.no_grad()`",
        )
    return value.reshape(())


def _logprobs(model: nn.Module, attached: Handle, batch: Mapping[str, Any]) -> Tensor:
    targets, tap = targets_of(model, batch), attached.loss
    if tap is not None and _has_token_loss(model, attached):
        return _intercepted(model, attached, batch, targets, tap.logprobs)
    out = None if _is_encoder_decoder(model) else model(**_forward_kwargs(model, batch))
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if logits is None or logits.shape[:-1] != targets.shape or scores_tokens(model):
        kind = "an encoder-decoder model" if out is None else type(out).__name__
        raise _no_loss(
            model,
            attached,
            "the model does not return logits of the next token at every position",
            got=kind if logits is None else f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            allowed="logits of shape [batch, sequence, vocabulary], from a model without an encoder",
        )
    flat = targets.to(logits.device).reshape(-1)
    return -cross_entropy(None, logits, flat, summed=False).view(targets.shape)


def _own_logits(model: nn.Module, attached: Handle, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any], bool]:
    """Return the logits [N, V] of the N tokens that this rank owns, and the batch reduced to these tokens.

    The third value is True if tensor-parallel ranks own different tokens, and False if each of them owns all tokens.
    """
    targets, tap = targets_of(model, batch), attached.loss
    if tap is None or not _has_token_loss(model, attached):
        raise _no_loss(model, attached, 'over="logits" needs a causal language model')
    index, is_shared = targets.new_empty(0), False

    def select_own(logits: Tensor, _: Tensor) -> Tensor:
        nonlocal index, is_shared
        is_shared = attached.tp is not None and attached.tp.head != "whole"
        index = tap.own_tokens(targets.to(logits.device))
        return tap.own_logits(logits, index)

    logits = _intercepted(model, attached, batch, targets, select_own)
    return logits, cut_batch({**batch, "shift_labels": targets}, targets, index), is_shared


def _intercepted(
    model: nn.Module,
    attached: Handle,
    batch: Mapping[str, Any],
    targets: Tensor,
    transform: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run one forward pass and return `transform(logits, targets)`."""
    tap = attached.loss
    assert tap is not None
    kwargs = {**_forward_kwargs(model, batch), "labels": targets, "shift_labels": targets}
    with tap.intercept(transform):
        out = model(**kwargs, use_cache=False)
    if not tap.called:
        why = "the model's forward does not call its `loss_function`, from which its logits are taken"
        raise _no_loss(model, attached, why)
    loss: Tensor = out.loss
    return loss


def _check_loss(model: nn.Module, attached: Handle) -> None:
    """Raise HP514 if the losses that the model computes for microbatches do not add up to the loss of the step."""
    # A forward with this argument divides its loss by the number of tokens of the step.
    divides = "num_items_in_batch" in _forward_parameters(model)
    if not (divides or _has_token_loss(model, attached)):
        raise _no_loss(model, attached, "the built-in cross entropy needs a causal language model")


def _no_loss(
    model: nn.Module,
    attached: Handle,
    what: str,
    got: str | None = None,
    allowed: str | None = None,
) -> NoLoss:
    hint = 'forward_backward(model, microbatches, objective=..., over="output")'
    return NoLoss(
        what,
        where=type(model).__name__,
        got=got,
        allowed=allowed,
        hint=hint if attached.pipeline is None else None,
    )


def targets_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the target ids [B, S] of a batch, as `token_logprobs` defines them; raise HP514 if it has none."""
    targets: Tensor | None = batch.get("shift_labels")
    return shifted(_labels_of(model, batch)) if targets is None else targets


def _labels_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the label ids [B, S] of a batch without `shift_labels`; the model's loss shifts them by one token."""
    labels: Tensor | None
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if labels is None and ids is not None:
        mask = batch.get("attention_mask")
        two_dims = isinstance(mask, Tensor) and mask.dim() == 2
        labels = ids.masked_fill(mask == 0, IGNORED) if two_dims else ids
    if labels is None:
        raise NoLoss(
            "a microbatch has no targets",
            where=type(model).__name__,
            got=sorted(batch),
            allowed="shift_labels, labels or input_ids",
            hint='add the token ids [B, S] as batch["labels"], with -100 where no loss is wanted',
        )
    return labels


def _forward_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _has_token_loss(model: nn.Module, attached: Handle) -> bool:
    """Return whether the loss that a model computes is the next-token cross entropy.

    This excludes reward models, and encoder-decoder models, whose labels are not shifted.
    """
    takes = "labels" in _forward_parameters(model) or _accepts_any_kwargs(model)
    classifies = _is_encoder_decoder(model) or scores_tokens(model)
    return attached.loss is not None and takes and not classifies


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _accepts_any_kwargs(model: nn.Module) -> bool:
    """Return whether all parameters of the model's forward are variadic: `*args` or `**kwargs`."""
    kinds = {p.kind for p in _forward_parameters(model).values()}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _forward_kwargs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model's forward in a batch: accepted items except targets, and the `token_mask`."""
    named, free = _forward_parameters(model), _accepts_any_kwargs(model)
    accepted = batch if free else {*named, TOKEN_MASK}
    return {k: v for k, v in batch.items() if k in accepted and k not in TARGETS}


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Microbatch | None],
    num_tokens: int | Tensor | None = None,
    span: Span = _no_span,
    *,
    objective: Objective | None = None,
    over: Over | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute the gradients of one step and add them to `grad` of the parameters.

    Call `clip_grad_norm_` and the optimizer afterwards.

    Args:
        model: A model that passed through `parallelize` or `parallelize_submodels`.
        microbatches: Microbatches of this data-parallel rank; the tp, cp and pp ranks of one data-parallel rank pass
            the same ones. Each has the arguments of the model's forward; `token_logprobs` explains the targets. An
            objective may use further items. After `parallelize_submodels`, pass the microbatches that
            `microbatch_sources` lists.
        num_tokens: Number of target tokens of the step, over all ranks and microbatches. Pass a tensor if the step is
            captured, because a captured number would be a constant. None: the tokens are counted. Must be None with
            an objective.
        span: Function that records a timeline: it gets the name and the kind of a task, such as "forward" and
            "compute", and returns a context around the task.
        objective: `objective(first, batch) -> scalar`, in place of the cross entropy. The loss of the step is the sum
            of these scalars over microbatches and data-parallel ranks. For a mean over the step, the objective itself
            must divide by the number of tokens of the step.
        over: First argument of the objective. logprobs: [B, S], see `token_logprobs`. logits: [N, V] of the N tokens
            that this rank owns, while the batch has items [N, ...] and targets `shift_labels` [N]. The objective must
            be a sum over tokens, because it is summed over ranks. output: return value of the model, only without
            pipeline stages. None: logprobs for a causal language model, scores [B, S] of the tokens for a reward
            model, else output.
        scale: Factor of the gradients; the returned loss is not scaled.

    Returns:
        The loss of the step, with the load-balancing loss of experts: a float64 scalar without gradient, equal on all
        ranks. With `num_tokens`, only this rank's part of the loss: no collective sums the parts of all ranks.

    Raises:
        NoLoss: HP514 when the model or the microbatches have no loss.
        BadObjective: HP515 when an objective does not return a scalar that depends on its first argument.
        BadValue: HP102 for `num_tokens` with an objective, and for an unknown `over`.
        UnsupportedSharding: HP205 for a microbatch, or a value of `over`, that the axes of the plan do not support.
    """
    return _run(model, microbatches, num_tokens, span, objective, over, train=True, scale=scale)


@torch.no_grad()
def forward_loss(
    model: nn.Module,
    microbatches: Sequence[Microbatch | None],
    num_tokens: int | None = None,
    *,
    objective: Objective | None = None,
    over: Over | None = None,
) -> Tensor:
    """Return the loss of a step without the load-balancing loss, and compute no gradients.

    Arguments, result and errors are those of `forward_backward`.
    """
    return _run(model, microbatches, num_tokens, _no_span, objective, over, train=False)


def _run(
    model: nn.Module,
    microbatches: Sequence[Microbatch | None],
    num_tokens: int | Tensor | None,
    span: Span,
    objective: Objective | None,
    over: Over | None,
    train: bool,
    scale: float = 1.0,
) -> Tensor:
    attached = handle(model)
    submodels = attached.submodels
    arguments = (num_tokens, span, objective, over, train, scale)
    if submodels is None:
        return _run_losses(model, attached, [p for p in microbatches if p is not None], *arguments)
    own, served = submodels.divided(microbatches)
    towers: Rounds | Joint
    if submodels.joint is None:
        towers = Rounds(submodels, served, span, train, accumulate)
    else:
        count = len(own) or len(served[0])
        towers = Joint(submodels, count, served, span, train, accumulate)
    total = torch.zeros((), dtype=torch.float64, device=attached.device)
    if submodels.language is not None:
        part, reader = submodels.language
        inputs = [p for p in own if p is not None]
        step = StepActions(towers.actions, towers.begin, towers.run, reader.send)
        with reader.step(towers.owner):
            total = _run_losses(part, handle(part), inputs, *arguments, step=step)
            towers.end()
    else:
        towers.end()
    for role in submodels.roles:
        role.side.outgoing.flush()
    if num_tokens is not None:
        return total
    totals = [total, *(torch.zeros_like(total) for _ in submodels.roles[1:])]
    return submodels.sum_over_parts(totals)


def _run_losses(
    model: nn.Module,
    attached: Handle,
    microbatches: Sequence[Microbatch],
    num_tokens: int | Tensor | None,
    span: Span,
    objective: Objective | None,
    over: Over | None,
    train: bool,
    scale: float,
    step: StepActions | None = None,
) -> Tensor:
    """Run microbatches and return their loss, summed over ranks unless `num_tokens` is set."""
    strategy = attached.plan.strategy
    axes = [axis for axis in ("pp", "cp") if getattr(strategy, axis) > 1]
    # A microbatch may have items that only the objective reads: they are no arguments of the forward.
    parts = microbatches if objective is None else [_forward_kwargs(model, p) for p in microbatches]
    with completed_changes(strategy):
        for part in parts:
            refuse_other_inputs(model, axes, part)
    local_only = num_tokens is not None
    if attached.average:
        # FSDP divides gradients by dp, but the loss is already divided by the tokens of all data-parallel ranks.
        scale *= strategy.dp
    if objective is None:
        _check_loss(model, attached)
        if num_tokens is None:
            num_tokens = _count(model, attached, microbatches)
    elif local_only:
        raise BadValue(
            "`num_tokens` applies to the built-in cross entropy only; an objective divides by its own total",
            where="num_tokens",
            got=f"num_tokens={num_tokens}",
            hint="num_tokens=None",
        )

    def loss_of(i: int) -> Tensor:
        part = microbatches[i]
        if objective is None:
            loss = _model_loss(model, part, num_tokens)
        else:
            share = 1 / (len(microbatches) * strategy.dp * strategy.cp)
            loss = _objective_loss(model, attached, part, objective, over, share)
        return loss if scale == 1.0 else loss * scale

    with completed_changes(strategy), extend_backward(model, strategy) if train else nullcontext():
        if attached.pipeline is not None:
            total = attached.pipeline.run(model, parts, loss_of, span, train, scale, step)
        else:
            total = _run_in_turn(model, attached, len(microbatches), loss_of, span, train, step)
    if not _is_first(attached, "tp_x", "tp_y"):
        total = torch.zeros_like(total)  # another rank reports the loss of the same tokens
    total = total if scale == 1.0 else total / scale
    return total if local_only else _sum_over_ranks(attached, total)


def _model_loss(model: nn.Module, batch: Microbatch, num_tokens: int | Tensor | None) -> Tensor:
    kwargs = dict(batch)
    if "labels" not in kwargs:
        targets = kwargs.get("shift_labels")
        kwargs["labels"] = _labels_of(model, batch) if targets is None else targets
    loss: Tensor = model(**kwargs, num_items_in_batch=num_tokens, use_cache=False).loss
    return loss


def _run_in_turn(
    model: nn.Module,
    attached: Handle,
    count: int,
    loss_of: Callable[[int], Tensor],
    span: Span,
    train: bool,
    step: StepActions | None,
) -> Tensor:
    """Run forward, and backward if `train`, of each microbatch in turn, and return the sum of the losses.

    A microbatch that uses no trained parameter has no backward, for example text if only the encoder of images is
    trained. It raises HP205 with data or context parallelism, because other ranks would wait in gradient reductions.
    """
    strategy = attached.plan.strategy
    total = torch.zeros((), dtype=torch.float64, device=attached.device)
    is_trained = step is not None or any(p.requires_grad for p in model.parameters())
    for i in range(count):
        if step is not None:
            step.begin(i)
        with accumulate(model) if train and i < count - 1 else nullcontext():
            with span("forward", "compute"):
                loss = loss_of(i)
            without_backward = is_trained and not loss.requires_grad
            if train and without_backward and strategy.dp * strategy.cp > 1:
                raise UnsupportedSharding(
                    "a microbatch uses no trained parameter, so this rank has no backward to run with the others",
                    where=f"microbatch {i}",
                    allowed="images or audio in every microbatch, if only their encoder is trained",
                    hint="give every microbatch media, or train part of the language model too, see `training.freeze`",
                )
            if train and not without_backward:
                with span("backward", "compute"):
                    loss.backward()
        total += loss.detach()
    return total


def _count(model: nn.Module, attached: Handle, microbatches: Sequence[Microbatch]) -> Tensor:
    """Return the number of target tokens of a step over all ranks, at least 1."""
    count = torch.zeros((), dtype=torch.float64, device=attached.device)
    for part in microbatches:
        count += (targets_of(model, part) != IGNORED).sum()
    if not _is_first(attached, "pp", "cp", "tp_x", "tp_y"):
        count.zero_()  # another rank counts the same tokens
    return _sum_over_ranks(attached, count).clamp(min=1)


def _is_first(attached: Handle, *axes: str) -> bool:
    coordinate = attached.plan.mesh.coordinate(attached.ranks.rank)
    return not any(coordinate[axis] for axis in axes)


def _sum_over_ranks(attached: Handle, value: Tensor) -> Tensor:
    group = attached.ranks.world_group
    return value if group is None else all_reduce(value, group, Purpose.LOSS)


def data_share(model: nn.Module) -> tuple[int, int]:
    """Return (`rank`, `num_replicas`) of this rank for a `DistributedSampler`.

    Ranks that differ only in their tp, cp or pp coordinates get equal values, because they read the same data.
    """
    attached = handle(model)
    strategy = attached.plan.strategy
    coordinate = attached.plan.mesh.coordinate(attached.ranks.rank)
    return coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"], strategy.dp


def microbatch_sources(model: nn.Module, count: int) -> list[Source]:
    """Return the microbatches that this rank must pass to `forward_backward`, in order.

    After `parallelize_submodels`, a rank with an encoder gets the microbatches for which it computes features. Other
    ranks run their own microbatches.

    Args:
        model: A model that passed through `parallelize` or `parallelize_submodels`.
        count: Number of microbatches of each data-parallel rank in the step.

    Returns:
        (data-parallel rank, index) of each microbatch. A rank with the language model lists its own microbatches first,
        then those for which its encoders compute features. An entry None stands for no microbatch: pass None at its
        position, so that all ranks of an encoder run the same number of passes.
    """
    submodels = handle(model).submodels
    if submodels is not None:
        return submodels.sources(count)
    share = data_share(model)[0]
    return [(share, index) for index in range(count)]


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Defer gradient reductions in this context; use it for all microbatches of a step except the last one.

    The all-reduce over replicas and the sum over tensor-parallel ranks run once, in the backward pass outside this
    context. FSDP still reduce-scatters the gradients of each microbatch unless only optimizer states are sharded
    (ZeRO-1).
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

    The norm is that of the unsharded gradients on any layout. Every rank of the model must call this function.

    Args:
        model: A model that passed through `parallelize` or `parallelize_submodels`.
        max_norm: Maximum norm; None or infinity: measure without scaling.

    Returns:
        The norm before scaling: a scalar tensor, not a DTensor, equal on every rank.
    """
    submodels = handle(model).submodels
    grads: list[Tensor] = []
    if submodels is None:
        total = _square_sum(model, grads)
    else:
        sums = [_square_sum(role.part, grads) for role in submodels.roles]
        total = submodels.sum_over_parts(sums)
    norm = total.sqrt()
    if max_norm is not None and math.isfinite(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale.to(dtype))
    return norm


def _square_sum(model: nn.Module, local_gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares of a model's unsharded gradients; append this rank's shards to `local_gradients`."""
    attached = handle(model)
    by_copies: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    wide = torch.float32  # dtype of the sum: equal on all ranks, also on a rank without gradients
    for name, param in model.named_parameters():
        wide = torch.promote_types(wide, param.dtype)
        if param.grad is None:
            continue
        grad = local(param.grad)
        wide = torch.promote_types(wide, grad.dtype)
        if grad.numel():
            by_copies.setdefault((attached.copies(name), grad.dtype), []).append(grad)
            local_gradients.append(grad)
    total = torch.zeros((), dtype=wide, device=attached.device)
    for (copies, dtype), grads in by_copies.items():
        norms = torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32))
        total = total + torch.stack(norms).square().sum() / copies
    if attached.ranks.world_group is not None:
        total = all_reduce(total, attached.ranks.world_group, Purpose.GRADIENT_NORM)
    return total


@torch.no_grad()
def count_routing(model: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Sum the routing counts of a step over all ranks, update the router biases, and reset the counts.

    Every rank calls this function after each optimizer step. It does not read tensor values on the host, so it can be
    captured together with the step.

    Returns:
        Counts and auxiliary loss. None for a model without experts, or when no token was routed and the model has no
        pipeline stages. The counts [layers, E + 1] are float64 and equal on every rank. Columns 0 to E - 1 are the
        number of tokens routed to each expert, NaN for experts that a layer lacks. The last column is the number of
        (token, expert) pairs that were not dropped. The loss is None if training adds no auxiliary loss.
    """
    attached = handle(model)
    total = None if attached.experts is None else collect_routing(model, attached.experts)
    loss = None if attached.balance is None else attached.balance.mean()
    return None if total is None else (total, loss)


def end_step(model: nn.Module) -> RoutingStatistics | None:
    """Call `count_routing` and return the routing statistics of the step, equal on every rank.

    Every rank calls this function after each optimizer step. The result is None for a model without experts, and when
    no token was routed.
    """
    counted = count_routing(model)
    return None if counted is None else routing_statistics(*counted)
