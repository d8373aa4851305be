"""Completions of many prompts at once, from the model as it is laid out for training.

Every rank of a data-parallel group samples its own rows, all take as many forward passes, and nothing is copied: the
weights are those of the next step. There is no cache of keys and values; a completion of T tokens takes T passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Completions:
    """What was sampled for N prompts.

    Attributes:
        tokens: [N, S + 1] prompt, completion with the token that stopped it, and padding.
        ends: [N] where the completion ends.
        logprobs: [N, S + 1] log-probability of every sampled token under the model that sampled it; 0 elsewhere.
        stopped: [N] whether a stop token ended it, not the limit.
    """

    tokens: Tensor
    ends: Tensor
    logprobs: Tensor
    stopped: Tensor


@torch.no_grad()
def sample(
    model: nn.Module,
    tokens: Tensor,
    starts: Tensor,
    *,
    stops: Collection[int],
    max_completion_length: int,
    draws: Tensor,
    microbatch: int,
) -> Completions:
    """Continue every row by tokens drawn from the model's distribution.

    Args:
        model: A causal language model that passed through `parallelize`, without pipeline stages or cut sequences.
        tokens: [N, S + 1] prompts, padded behind; attention is causal, so that padding is never seen.
        starts: [N] tokens of the prompts.
        stops: Tokens that end a completion.
        max_completion_length: Most tokens of one.
        draws: [N, max_completion_length] numbers in [0, 1), one for every token: a sequence depends on no other.
        microbatch: Rows of a forward pass; all ranks have as many rows and the same number here.
    """
    tokens, ends = tokens.clone(), starts.clone()
    logprobs = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    stopping = torch.tensor(sorted(stops), device=tokens.device)
    limit = (starts + max_completion_length).clamp_(max=tokens.shape[1])
    stopped = torch.zeros_like(starts, dtype=torch.bool)
    training = model.training
    model.eval()
    for drawn in draws.unbind(1):
        # All ranks take part in the collectives of a pass, so they end together.
        width = int(largest(torch.where(stopped | (ends >= limit), 0, ends).max()))
        if width == 0:
            break
        for rows in torch.arange(len(tokens), device=tokens.device).split(microbatch):
            logits = model(input_ids=tokens[rows, :width], use_cache=False).logits
            last = (ends[rows] - 1).clamp_(max=width - 1)
            logp = logits[torch.arange(len(rows)), last].double().log_softmax(-1)  # [B, V]
            total = logp.exp().cumsum(-1)
            # The inverse of the distribution function; rounding may leave its last value a little below 1.
            token = torch.searchsorted(total, drawn[rows, None] * total[:, -1:], right=True)
            token = token.clamp_(max=logp.shape[-1] - 1)
            going = ~stopped[rows] & (ends[rows] < limit[rows])
            at, where = rows[going], ends[rows[going]]
            tokens[at, where] = token[going, 0]
            logprobs[at, where] = logp.gather(1, token)[going, 0]
            ends[at] += 1
            stopped[at] = torch.isin(token[going, 0], stopping)
    model.train(training)
    return Completions(tokens, ends, logprobs, stopped)


def largest(value: Tensor) -> float:
    """The largest of all ranks' values."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def added(values: Tensor) -> list[float]:
    """Sums over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    found: list[float] = values.tolist()
    return found


def uniform(seed: int, step: int, first: int, rows: int, length: int) -> Iterator[np.ndarray]:
    """[length] numbers in [0, 1) for each of `rows` sequences of a step, from the sequence's number `first` on.

    A function of seed, step and number alone, so that a sequence is drawn alike on every layout.
    """
    for row in range(first, first + rows):
        raw = np.random.PCG64([seed % 2**64, 5, step, row]).random_raw(length)
        yield (raw >> 11) / 2.0**53
