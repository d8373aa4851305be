"""Accuracy on held-out data: the fractions of targets and of answers that the model predicts correctly.

Each target is predicted from the true tokens before it (teacher forcing), and is correct if it is the most likely next
token. An answer is a run of consecutive targets in one row of the batch, such as the reply of an assistant. An answer
is correct if all its targets are correct, which holds if and only if greedy decoding from the tokens before the answer
returns the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.collectives import gather_rows
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.ir import Purpose

_counted: ContextVar[HeldOutPredictions | None] = ContextVar("held_out_predictions", default=None)


@dataclass
class HeldOutPredictions:
    """Counters of targets, answers and correct predictions on this rank.

    Attributes:
        whole_rows: False if rows are sharded over ranks: then the accuracy of answers is unknown.
    """

    whole_rows: bool = True
    _sums: list[Tensor] = field(default_factory=list)

    def add(
        self,
        tp: TpState | None,
        logits: Tensor,
        targets: Tensor,
        row_length: int,
        ignore_index: int,
    ) -> None:
        """Count the targets of a microbatch, and those that are predicted correctly.

        Args:
            tp: State of tensor parallelism; None without it.
            logits: Output [..., V] of this rank's head. Tensor parallelism may shard tokens or V over ranks.
            targets: Target ids [T] of all tokens, including those whose logits are on other tensor-parallel ranks.
            row_length: Number of tokens in a row of the batch.
            ignore_index: Value in `targets` that marks positions without a target.
        """
        predicted = _most_likely_tokens(tp, logits)[: targets.shape[0]]
        if tp is not None and tp.rank > 0:
            return  # all ranks of the group have the same predictions
        counts = targets != ignore_index
        wrong = counts & (predicted != targets)
        begins = counts.clone().view(-1, row_length)
        begins[:, 1:] &= ~counts.view(-1, row_length)[:, :-1]
        begins = begins.view(-1)
        answer = begins.cumsum(0) - 1
        errors = torch.zeros_like(counts, dtype=torch.int64)  # index: number of the answer
        errors.index_add_(0, answer.clamp(min=0), wrong.long())
        exists = torch.arange(len(errors), device=errors.device) < begins.sum()
        right_answers = (exists & (errors == 0)).sum()
        tokens = counts.sum()
        self._sums.append(torch.stack((tokens - wrong.sum(), tokens, right_answers, begins.sum())))

    def accuracies(self, num_tokens: int, device: torch.device) -> dict[str, float]:
        """Return `token_accuracy` and `answer_accuracy` over all ranks, by name.

        The dict is empty without targets, or if fewer than all `num_tokens` targets were counted. It has no
        `answer_accuracy` if `whole_rows` is False.
        """
        zeros = torch.zeros(4, dtype=torch.int64, device=device)
        sums = torch.stack([zeros, *self._sums]).sum(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        right, tokens, right_answers, answers = sums.tolist()
        if tokens != num_tokens or not tokens:
            return {}
        accuracies = {"token_accuracy": right / tokens}
        if self.whole_rows:
            accuracies["answer_accuracy"] = right_answers / answers
        return accuracies


def _most_likely_tokens(tp: TpState | None, logits: Tensor) -> Tensor:
    """Return the smallest id of the most likely tokens at each position, [T] or longer if sharded tokens are padded."""
    columns = logits.shape[-1]
    likelihood, token = logits.reshape(-1, columns).max(1)
    if tp is None or tp.head == "whole":
        return token
    if tp.head == "tokens":
        return gather_rows(token, tp.group, Purpose.LOSS_STATISTICS).flatten()
    pairs = torch.stack((likelihood.double(), (token + tp.rank * columns).double()))
    likelihoods, tokens = gather_rows(pairs, tp.group, Purpose.LOSS_STATISTICS).unbind(1)
    best = likelihoods == likelihoods.amax(0)
    return tokens.masked_fill(~best, torch.inf).amin(0).long()


@contextmanager
def count_predictions(whole_rows: bool) -> Iterator[HeldOutPredictions]:
    """Yield counters that next-token losses in this context update, except in code under `torch.compile`."""
    counted = HeldOutPredictions(whole_rows)
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def counted_predictions() -> HeldOutPredictions | None:
    """Return the counters of the surrounding `count_predictions`; None outside of one or in compiled code."""
    return None if torch.compiler.is_compiling() else _counted.get()
