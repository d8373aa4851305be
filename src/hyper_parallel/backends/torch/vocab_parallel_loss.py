"""Causal language-model loss over a vocabulary that may be sharded over ranks.

One autograd function computes the cross entropy of T tokens from local logits [T, V / tp]. Ranks exchange two numbers
per token (log-sum-exp and the logit of the target) in one all-gather. Backward recomputes the softmax from the saved
logits. Arithmetic is float64 for float64 logits, else float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch.collectives import gather_rows
from hyper_parallel.backends.torch.held_out_predictions import counted_predictions
from hyper_parallel.backends.torch.in_flight import sum_forward
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import NoLoss
from hyper_parallel.ir import Purpose

IGNORED: Final = -100
"""Label without loss: `ignore_index` of `torch.nn.functional.cross_entropy` and of Hugging Face labels."""
_BLOCK_ELEMENTS = 1 << 24
"""Maximum elements of logits converted at a time, to bound temporaries."""


def _blocks(logits: Tensor) -> range:
    return range(0, logits.shape[0], max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1])))


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy; `first` is the token id of the first column. The columns are sharded over the ranks of `group`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        first: int,
        group: dist.ProcessGroup | None,
        summed: bool,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = _blocks(logits)
        lse = torch.cat([torch.logsumexp(logits[i : i + rows.step].to(wide), dim=1) for i in rows])
        valid = targets != ignore_index
        here = targets - first
        inside = valid & (here >= 0) & (here < logits.shape[1])
        here = here.masked_fill_(~inside, 0)
        at_target = logits.gather(1, here.unsqueeze(1)).squeeze(1).to(wide).masked_fill_(~inside, 0)
        if group is not None:
            stats = gather_rows(torch.stack((lse, at_target)), group, Purpose.LOSS_STATISTICS)
            lse = torch.logsumexp(stats[:, 0], dim=0)
            at_target = stats[:, 1].sum(dim=0)
        ctx.save_for_backward(logits, lse, here, inside, valid)
        losses = (lse - at_target).masked_fill_(~valid, 0)
        return losses.sum() if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, here, inside, valid = ctx.saved_tensors
        out = torch.empty_like(logits)
        scale = valid.to(lse.dtype) * grad
        hit = inside.to(lse.dtype)
        rows = _blocks(logits)
        for i in rows:
            cut = slice(i, i + rows.step)
            if out.dtype == lse.dtype:
                block = torch.sub(logits[cut], lse[cut].unsqueeze(1), out=out[cut])
            else:
                block = logits[cut].to(lse.dtype).sub_(lse[cut].unsqueeze(1))
            block.exp_()
            block.scatter_add_(1, here[cut].unsqueeze(1), -hit[cut].unsqueeze(1))
            block.mul_(scale[cut].unsqueeze(1))
            if out.dtype != lse.dtype:
                out[cut] = block
        return out, None, None, None, None, None


def shifted(labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Return `labels` shifted left by one token, with `ignore_index` at the end: the target is the next token."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def cross_entropy(
    tp: TpState | None,
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORED,
    summed: bool = True,
) -> Tensor:
    """Return the cross entropy, summed over the tokens whose target is not `ignore_index`.

    If the head shards tokens over tensor-parallel ranks, the result covers only this rank's ceil(T / tp) tokens. The
    last ranks may have padding.

    Args:
        tp: State of tensor parallelism; None without it.
        logits: Output [..., V] of this rank's head, which may be sharded by tokens or by columns.
        targets: Target ids [T] of all tokens in the full vocabulary.
        ignore_index: Value in `targets` that marks tokens without a target.
        summed: If False, return one cross entropy per token instead: 0 where the target is `ignore_index`.
    """
    split = None if tp is None or tp.head == "whole" else tp.head
    if tp is not None:
        tp.running.update(loss_consumed=True)
    columns = logits.shape[-1]
    if split == "tokens":
        own = logits.shape[-2]
        missing = own * tp.degree - targets.shape[0]
        targets = F.pad(targets, (0, missing), value=ignore_index)
        targets = targets[tp.rank * own : (tp.rank + 1) * own]
    first, group = 0, None
    if tp is not None and split == "vocabulary":
        first, group = tp.rank * columns, tp.group
    rows = logits.reshape(-1, columns)
    return _CrossEntropy.apply(rows, targets, ignore_index, first, group, summed)


def loss_function(tp: TpState | None, add: Callable[[Tensor, Tensor], Tensor] | None) -> Callable[..., Tensor]:
    """Return a function that replaces the `loss_function` of a Hugging Face model and accepts sharded logits.

    `add(loss, share)` returns the loss plus the router loss, weighted by `share`: the microbatch's share of the targets
    over which the loss is averaged. If `add` is None, there is no router loss.
    """

    def causal_lm_loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        row_length = targets.shape[-1]
        targets = targets.to(logits.device).reshape(-1)
        rows = logits.numel() // logits.shape[-1]
        if rows != targets.numel() and (tp is None or tp.head != "tokens"):
            raise NoLoss(
                "the model's logits do not match its tokens: one position per token is needed",
                got=f"logits {tuple(logits.shape)} for {targets.numel()} targets",
                allowed="logits [B, S, V] for token ids [B, S]",
            )
        count = num_items_in_batch
        if count is None:
            count = (targets != ignore_index).sum().clamp(min=1)
        if (counted := counted_predictions()) is not None:
            counted.add(tp, logits, targets, row_length, ignore_index)
        total = cross_entropy(tp, logits, targets, ignore_index)
        if tp is not None and tp.head == "tokens":
            total = sum_forward(total, tp.group, Purpose.LOSS)
        if isinstance(count, Tensor):
            count = count.to(total.device)
        loss = total / count
        if add is None:
            return loss
        return add(loss, (targets != ignore_index).sum().double() / count)

    return causal_lm_loss


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether the loss of a transformers model is the next-token cross entropy; False for other modules."""
    if not hasattr(type(model), "loss_function"):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    return loss is ForCausalLMLoss


def use_loss_function(model: nn.Module) -> None:
    """Wrap a forward that computes its loss inline, so that calls with `shift_labels` use `model.loss_function`.

    Inline losses are means over a microbatch, and not all of them shift the labels. A forward that calls
    `loss_function`, or has no argument `labels`, is not wrapped.
    """
    own = inspect.unwrap(type(model).forward)
    calls_function = "loss_function" in own.__code__.co_names
    if calls_function or "labels" not in inspect.signature(own).parameters:
        return

    def forward(inner: Callable[..., Any], *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None:
            return inner(*args, **kwargs)
        labels, count = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        output = inner(*args, **kwargs)
        output.loss = model.loss_function(  # type: ignore[operator]
            output.logits,
            labels,
            output.logits.shape[-1],
            num_items_in_batch=count,
            shift_labels=shift_labels,
        )
        return output

    wrap(model, forward)
