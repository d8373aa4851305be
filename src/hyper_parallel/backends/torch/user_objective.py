"""Objectives of the user's own over whole sequences, logits or outputs, on any layout.

An objective is a function of what the model gave and of a microbatch, `objective(first, batch) -> scalar`. It sees what
it would see on one device, so one function serves every layout. On ranks that share a microbatch it computes the same
number; backward takes the part of each rank once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch._loss_tap import cut_batch
from hyper_parallel.backends.torch.collectives import purpose
from hyper_parallel.backends.torch.in_flight import sum_forward
from hyper_parallel.backends.torch.parallel_handle import Handle, handle
from hyper_parallel.backends.torch.token_rows import TOKEN_MASK
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import cross_entropy, shifted
from hyper_parallel.errors import BadObjective, BadValue, NoLoss, UnsupportedSharding
from hyper_parallel.ir import Purpose

Objective = Callable[[Any, Mapping[str, Any]], Tensor]
Over = Literal["logprobs", "logits", "output"]
OVER: Final = ("logprobs", "logits", "output")
_IGNORED: Final = -100


def token_logprobs(model: nn.Module, **batch: Any) -> Tensor:
    """Log-probabilities of the next tokens, from one forward pass.

    The logits stay as the layout has them: split over the vocabulary, sequences cut. Differentiable: call `backward` on
    what is computed from the result, as on one device. Every rank of the model calls this.

    Args:
        model: A causal language model that passed through `parallelize`.
        batch: What the model's forward takes. Targets are `shift_labels` [B, S], else `labels` moved by one token, else
            the `input_ids` themselves, where a 2-D `attention_mask` is not 0.

    Returns:
        [B, S], float64 for float64 logits, else float32: at a position the log-probability of its target, the next
        token; 0 where there is none (the last position, targets of -100). Whole sequences in order, equal on the ranks
        that share them.

    Raises:
        NoLoss: HP514 when the model gives no logits, or the batch no targets.
        UnsupportedSharding: HP205 with gradients under pipeline stages, where `forward_backward` runs the schedule.
    """
    attached = handle(model)
    pipeline = attached.pipeline
    if pipeline is None:
        return _logprobs(model, attached, batch)
    if torch.is_grad_enabled():
        raise UnsupportedSharding(
            "log-probabilities with gradients under pipeline stages are those of an objective",
            where=type(model).__name__,
            allowed="with torch.no_grad(): token_logprobs(...)",
            hint="forward_backward(model, microbatches, objective=...)",
        )
    whole: list[Tensor] = []

    def keep(_: int) -> Tensor:
        whole.append(_logprobs(model, attached, batch))
        return torch.zeros((), device=attached.device)

    part = _for_model(model, batch)
    pipeline.run(model, [part], keep, lambda name, kind: nullcontext(), train=False)
    compute = getattr(torch, attached.plan.workload.compute_dtype)
    dtype = torch.promote_types(compute, torch.float32)
    like = part["input_ids"]
    out = whole[0] if whole else torch.empty(like.shape, dtype=dtype, device=attached.device)
    with purpose(Purpose.LOSS_STATISTICS):
        last = pipeline.stages.rank_of[pipeline.last]
        dist.broadcast(out, group=pipeline.group, group_src=last)
    return out


def objective_loss(
    model: nn.Module,
    attached: Handle,
    batch: Mapping[str, Any],
    objective: Objective,
    over: Over | None,
    share: float,
) -> Tensor:
    """Root of the backward of one microbatch; the values add up over cp and data ranks to that of the objective.

    `share` is what the microbatch of this rank weighs in the router loss of the step.
    """
    scores = over is None and scores_tokens(model)
    over = over or ("logprobs" if scores or _gives_loss(model, attached) else "output")
    value: Tensor
    if over == "output":
        if attached.pipeline is not None:
            raise UnsupportedSharding(
                "no rank has the output of a model that is cut into pipeline stages",
                where=type(model).__name__,
                allowed=OVER[:2],
                hint='over="logprobs"',
            )
        value = _value(objective, model(**_for_model(model, batch)), batch)
    elif over == "logprobs":
        first = _scores(model, attached, batch) if scores else _logprobs(model, attached, batch)
        value = _value(objective, first, batch)
    elif over == "logits":
        first, own = _own_logits(model, attached, batch)
        value = _value(objective, first, own)
        if attached.tp is not None:
            value = sum_forward(value, attached.tp.group, Purpose.LOSS)
    else:
        raise BadValue("there is no such first argument of an objective", got=over, allowed=OVER)
    # Of the ranks that hold parts of the same sequences, which all compute the value, one reports it.
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
            "an objective returns one number that depends on its first argument",
            where=getattr(objective, "__qualname__", type(objective).__name__),
            got=got,
            allowed="a scalar tensor with a gradient",
        )
    return value.reshape(())


def _logprobs(model: nn.Module, attached: Handle, batch: Mapping[str, Any]) -> Tensor:
    targets, tap = targets_of(model, batch), attached.loss
    if tap is not None and _gives_loss(model, attached):
        return _tapped(model, attached, batch, targets, tap.logprobs)
    out = None if _translates(model) else model(**_for_model(model, batch))
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if logits is None or logits.shape[:-1] != targets.shape:
        raise NoLoss(
            "the model gives no logits of the next token at every position",
            where=type(model).__name__,
            got=type(out).__name__ if logits is None else f"logits {tuple(logits.shape)}",
            allowed="logits [B, S, V], or an output that has them, without an encoder",
            hint='over="output"',
        )
    flat = targets.to(logits.device).reshape(-1)
    return -cross_entropy(None, logits, flat, summed=False).view(targets.shape)


def _scores(model: nn.Module, attached: Handle, batch: Mapping[str, Any]) -> Tensor:
    """[B, S] scores of every token."""
    assert attached.loss is not None
    return _tapped(model, attached, batch, targets_of(model, batch), attached.loss.scores)


def _own_logits(
    model: nn.Module, attached: Handle, batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """[N, V] logits of this rank's own tokens, and the batch with [N, ...] of whatever it has for every token."""
    targets, tap = targets_of(model, batch), attached.loss
    if tap is None or not _gives_loss(model, attached):
        raise NoLoss(
            "only a causal language model gives the logits of a rank's own tokens",
            where=type(model).__name__,
            hint='over="output"',
        )
    index = targets.new_empty(0)

    def take(logits: Tensor, _: Tensor) -> Tensor:
        nonlocal index
        index = tap.own_tokens(targets.to(logits.device))
        return tap.own_logits(logits, index)

    logits = _tapped(model, attached, batch, targets, take)
    return logits, cut_batch({**batch, "shift_labels": targets}, targets, index)


def _tapped(
    model: nn.Module,
    attached: Handle,
    batch: Mapping[str, Any],
    targets: Tensor,
    take: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    tap = attached.loss
    assert tap is not None
    given = {**_for_model(model, batch), "labels": targets, "shift_labels": targets}
    with tap.taking(take):
        out = model(**given, use_cache=False)
    if not tap.taken:
        raise NoLoss(
            "the model computes its loss without the loss function that it was given",
            where=type(model).__name__,
            hint='over="output"',
        )
    loss: Tensor = out.loss
    return loss


def check_loss(model: nn.Module, attached: Handle) -> None:
    """Refuse the cross entropy of a model that does not predict the next token."""
    own = "num_items_in_batch" in _named(
        model
    )  # its forward divides by the tokens of the step itself
    if not (own or _gives_loss(model, attached)):
        raise NoLoss(
            "only a causal language model has a cross entropy that adds up over microbatches and ranks",
            where=type(model).__name__,
            hint='forward_backward(model, microbatches, objective=..., over="output")',
        )


def for_stages(
    model: nn.Module, batch: Mapping[str, Any], objective: Objective | None
) -> Mapping[str, Any]:
    """What stages before the last give the model: of a batch with an objective, what its forward has a name for."""
    return batch if objective is None else _for_model(model, batch)


def targets_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """[B, S] target of every position of a batch."""
    targets: Tensor | None = batch.get("shift_labels")
    if targets is not None:
        return targets
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if labels is None and ids is not None:
        mask = batch.get("attention_mask")
        two_dims = isinstance(mask, Tensor) and mask.dim() == 2
        labels = ids.masked_fill(mask == 0, _IGNORED) if two_dims else ids
    if labels is None:
        raise NoLoss(
            "a microbatch has no targets",
            where=type(model).__name__,
            got=sorted(batch),
            allowed="shift_labels, labels or input_ids",
        )
    return shifted(labels, _IGNORED)


def _named(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _gives_loss(model: nn.Module, attached: Handle) -> bool:
    """Whether a model gives the loss of next tokens; labels of an encoder and decoder are not moved."""
    takes = "labels" in _named(model) or _free(model)
    classifies = _translates(model) or scores_tokens(model)
    return attached.loss is not None and takes and not classifies


def _translates(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _free(model: nn.Module) -> bool:
    """Whether the model's forward names nothing and takes everything."""
    kinds = {p.kind for p in _named(model).values()}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _for_model(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a batch that the model's forward has a name for, targets left out; all, where it names none."""
    named, free = _named(model), _free(model)
    targets = ("labels", "shift_labels")
    return {
        k: v
        for k, v in batch.items()
        if k not in targets and (free or k in named or k == TOKEN_MASK)
    }
