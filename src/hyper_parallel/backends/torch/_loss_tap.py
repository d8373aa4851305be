"""The loss function of a causal language model, in whose place an objective may take the logits.

Logits are never whole where it can be helped: a rank has those of its tokens (context parallelism) and of its columns
of the vocabulary, or of its piece of the tokens (tensor parallelism). Two things are made of them:

    logprobs   [B, S]  log-probability of every target, whole sequences in order, the same on every rank of tp x cp;
                       backward takes each rank's own part once
    logits     [N, V]  all columns for this rank's own tokens; every token is on one rank of tp x cp

Of a model that scores tokens, which has one logit for each, `scores` [B, S] are what log-probabilities are of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.backends.torch.context.apply import join_sequences
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.tensor.collectives import join, piece_size, reshard
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.vocab_parallel_loss import cross_entropy
from hyper_parallel.ir import Purpose

Take = Callable[[Tensor, Tensor], Tensor]
"""From logits as they lie on this rank and this rank's targets [B, S / cp]."""


@dataclass(slots=True)
class LossTap:
    """What a model calls as its `loss_function`; `usual` is the cross entropy.

    Attributes:
        take: What the running pass gives instead of the loss; None: the loss.
        taken: The running pass has called it.
    """

    usual: Callable[..., Tensor]
    tp: TpState | None
    context: ContextState | None
    take: Take | None = None
    taken: bool = False

    def __call__(self, logits: Tensor, labels: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.take is None:
            return self.usual(logits, labels, *args, **kwargs)
        self.taken = True
        targets = kwargs["shift_labels"]
        return self.take(logits, targets.to(logits.device))

    @contextmanager
    def taking(self, take: Take) -> Iterator[None]:
        """Inside, a pass of the model, which is given `shift_labels`, returns `take` of its logits as its loss."""
        self.take, self.taken = take, False
        try:
            yield
        finally:
            self.take = None

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[B, S] from this rank's logits and targets; 0 where the target is -100."""
        own = cross_entropy(self.tp, logits, targets.reshape(-1), summed=False)
        # No view leaves the model: FSDP hangs its hooks on what it returns.
        return -self._whole(own, targets)

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[B, S], in float32 at least, of [B, S / cp, 1] or of this rank's piece of the tokens."""
        if self.tp is not None:
            self.tp.loss_taken = True
        wide = logits.reshape(-1).to(torch.promote_types(logits.dtype, torch.float32))
        return self._whole(wide, targets).clone()

    def _whole(self, own: Tensor, targets: Tensor) -> Tensor:
        """[B, S] of one number for each token that this rank's head has seen."""
        tp = self.tp
        if tp is not None and tp.head == "tokens":
            own = join(own, 0, tp.group)[: targets.numel()]
        own = own.view(targets.shape)
        return own if self.context is None else join_sequences(self.context, own)

    def own_logits(self, logits: Tensor, index: Tensor) -> Tensor:
        """[N, V] of the tokens of `own_tokens`."""
        tp, rows = self.tp, logits.reshape(-1, logits.shape[-1])
        if tp is not None:
            tp.loss_taken = True
            if tp.head == "vocabulary":
                missing = index.numel() * tp.degree - rows.shape[0]
                rows = F.pad(rows, (0, 0, 0, missing))
                (rows,) = reshard((rows,), 0, 1, tp.group, Purpose.LOGITS)
        return rows[index >= 0]

    def own_tokens(self, like: Tensor) -> Tensor:
        """Positions in [B, S], laid end to end, of this rank's own tokens of the running pass; -1 is padding."""
        index = torch.arange(like.numel(), device=like.device).view(like.shape)
        if self.context is not None:
            index = self.context.local_tokens(index, -1)
        index = index.reshape(-1)
        if self.tp is None or self.tp.head == "whole":
            return index
        piece = piece_size(index.numel(), self.tp.degree)
        index = F.pad(index, (0, piece * self.tp.degree - index.numel()), value=-1)
        return index[self.tp.rank * piece : (self.tp.rank + 1) * piece]


def cut_batch(batch: Mapping[str, Any], like: Tensor, index: Tensor) -> dict[str, Any]:
    """The tokens `index` of whatever a batch has for every token: [N, ...] of [B, S, ...]."""
    kept = index[index >= 0]

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.shape[:2] == like.shape
        return value.flatten(0, 1)[kept.to(value.device)] if whole else value

    return {name: cut(value) for name, value in batch.items()}
