"""Causal language-model loss in chunks of tokens, without materializing all logits.

The logits [T, V] and the float copies that a cross entropy makes of them are the largest working set of a training
step. Here the logits of a chunk live only while the chunk is computed. Forward computes the loss and the gradients of
hidden states and head; backward scales them. No product is computed twice. The head's gradient is summed over the
chunks, so results equal those of the ordinary loss up to the order of that sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.errors import BadValue


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, ignore_index: int
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        valid = targets != ignore_index
        scale = valid.to(wide) / valid.sum()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head)
        step = -(-hidden.shape[0] // chunks)
        for begin in range(0, hidden.shape[0], step):
            rows = slice(begin, begin + step)
            logits = (hidden[rows] @ head.t()).to(wide)
            labels = targets[rows].masked_fill(~valid[rows], 0).unsqueeze(1)
            lse = torch.logsumexp(logits, dim=1)
            total += ((lse - logits.gather(1, labels).squeeze(1)) * scale[rows]).sum()
            logits.sub_(lse.unsqueeze(1)).exp_()
            logits.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=wide))
            d_logits = logits.mul_(scale[rows].unsqueeze(1)).to(hidden.dtype)
            d_hidden[rows] = d_logits @ head
            d_head.addmm_(d_logits.t(), hidden[rows])
        ctx.save_for_backward(d_hidden, d_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_head * grad.to(d_head.dtype), None, None, None


def chunked_loss(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    chunks: int,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross entropy of the next token of a Hugging Face causal language model.

    Args:
        model: Has `get_decoder()` and an output embedding without bias.
        batch: Keyword arguments of the model with `labels` [B, S].
        chunks: Number of chunks of tokens.
        ignore_index: Label of tokens that do not count.

    Raises:
        BadValue: HP102 when the model changes its logits after the head; this loss would skip that change.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    config = model.config
    scaling = {
        key: getattr(config, key)
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if getattr(config, key, None) not in (None, 1, 1.0)
    }
    if head is None or head.bias is not None or scaling:
        raise BadValue(
            "a chunked loss needs a head that is one matrix product",
            got=f"head {head}, {scaling}",
            hint="use the model's own loss: leave `loss_chunks` out",
        )
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # type: ignore[operator]
    targets = F.pad(batch["labels"], (0, 1), value=ignore_index)[..., 1:]
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _HeadLoss.apply(flat, head.weight, targets.reshape(-1), chunks, ignore_index)
    return loss
