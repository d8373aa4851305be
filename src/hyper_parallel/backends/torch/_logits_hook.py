"""Replacement of a model's loss function that can return values computed from the logits instead of the loss.

Logits stay sharded where possible: by tokens (context parallelism), and by vocabulary columns or by tokens (tensor
parallelism). The hook computes three kinds of values for a user's objective:

    logprobs   [B, S]  log-probability of every target, for full sequences, equal on all tp and cp ranks; backward
                       counts each gradient once, although these ranks have equal values
    logits     [N, V]  logits of the N tokens that this rank owns. cp ranks own different tokens. tp ranks own
                       different tokens too, unless each of them computes the full logits
    scores     [B, S]  scores of a reward model, which has one logit per token, in place of log-probabilities
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.context.apply import join_sequences
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.tensor.collectives import join, reshard
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import (
    cross_entropy,
    has_causal_loss,
    loss_function,
    use_loss_function,
)
from hyper_parallel.ir import Purpose

LogitsTransform = Callable[[Tensor, Tensor], Tensor]
"""Function of this rank's shard of the logits and of the target ids [B, S / cp] of its cp rank."""


@dataclass(slots=True)
class LogitsHook:
    """Replacement of the `loss_function` of a model.

    Attributes:
        default_loss: Function that computes the loss if `transform` is None.
        tp: State of tensor parallelism; None without it.
        context: State of context parallelism; None without it.
        transform: Function whose result the model returns in place of its loss; None: return the loss.
        called: True after the current forward pass has called the transform.
    """

    default_loss: Callable[..., Tensor]
    tp: TpState | None
    context: ContextState | None
    transform: LogitsTransform | None = None
    called: bool = False

    def __call__(self, logits: Tensor, labels: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.transform is None:
            return self.default_loss(logits, labels, *args, **kwargs)
        self.called = True
        targets = kwargs["shift_labels"]
        return self.transform(logits, targets.to(logits.device))

    @contextmanager
    def intercept(self, transform: LogitsTransform) -> Iterator[None]:
        """Make forward passes in this context return `transform(logits, shift_labels)` as their loss.

        The forward must be called with `shift_labels`.
        """
        self.transform, self.called = transform, False
        try:
            yield
        finally:
            self.transform = None

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities [B, S] of all targets from this rank's logits and targets; 0 for the target -100."""
        own = cross_entropy(self.tp, logits, targets.reshape(-1), summed=False)
        # The model must not return a view: FSDP registers its hooks on the outputs.
        return -self._gather_tokens(own, targets)

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return scores [B, S] of all tokens, in float32 or wider, from the logits of this rank's tokens."""
        if self.tp is not None:
            self.tp.running.update(loss_consumed=True)
        wide = logits.reshape(-1).to(torch.promote_types(logits.dtype, torch.float32))
        return self._gather_tokens(wide, targets).clone()

    def _gather_tokens(self, own: Tensor, targets: Tensor) -> Tensor:
        """Return one number per token, [B, S], gathered over ranks; `own` has the numbers of this rank's tokens."""
        tp = self.tp
        if tp is not None and tp.head == "tokens":
            own = join(own, 0, tp.group)[: targets.numel()]
        own = own.view(targets.shape)
        return own if self.context is None else join_sequences(self.context, own)

    def own_logits(self, logits: Tensor, index: Tensor) -> Tensor:
        """Return the logits [N, V] of the tokens that this rank owns; `index` is the result of `own_tokens`."""
        tp, rows = self.tp, logits.reshape(-1, logits.shape[-1])
        if tp is not None:
            tp.running.update(loss_consumed=True)
            if tp.head == "vocabulary":
                missing = index.numel() * tp.degree - rows.shape[0]
                rows = F.pad(rows, (0, 0, 0, missing))
                (rows,) = reshard((rows,), 0, 1, tp.group, Purpose.LOGITS)
        return rows[index >= 0]

    def own_tokens(self, like: Tensor) -> Tensor:
        """Return the indices of this rank's tokens in the flattened full batch `like` [B, S]; -1 marks padding."""
        index = torch.arange(like.numel(), device=like.device).view(like.shape)
        if self.context is not None:
            index = self.context.local_tokens(index, -1)
        index = index.reshape(-1)
        if self.tp is None or self.tp.head == "whole":
            return index
        piece = self.tp.list_of((1, index.numel())).rows
        index = F.pad(index, (0, piece * self.tp.degree - index.numel()), value=-1)
        return index[self.tp.rank * piece : (self.tp.rank + 1) * piece]


def replace_loss(
    model: nn.Module, tp: TpState | None, context: ContextState | None, balance: BalanceLoss | None
) -> LogitsHook | None:
    """Replace the loss function of a causal language model or reward model; return the new one, None for others."""
    is_causal = has_causal_loss(model)
    if not is_causal and not scores_tokens(model):
        return None
    add_router_loss = balance.loss_hook if is_causal and balance is not None else None
    model.loss_function = hook = LogitsHook(loss_function(tp, add_router_loss), tp, context)
    if is_causal:
        use_loss_function(model)
    return hook


def cut_batch(batch: Mapping[str, Any], like: Tensor, index: Tensor) -> dict[str, Any]:
    """Return a batch with only the tokens at `index` in the flattened batch; entries of -1 are skipped.

    Tensors whose first two dims are those of `like` [B, S] become [N, ...]. Other items are unchanged.
    """
    own = index[index >= 0]

    def cut(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[:2] == like.shape
        return value.flatten(0, 1)[own.to(value.device)] if per_token else value

    return {name: cut(value) for name, value in batch.items()}
