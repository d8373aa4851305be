"""Sampling of completions for many prompts from a model that is parallelized for training.

Every data-parallel rank samples the completions of its rows. Ranks that share the parameters of a replica run the same
number of forward passes. Sampling uses the trained weights in place, without a copy. A key-value cache exists only
during sampling, for one microbatch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import token_logprobs
from hyper_parallel.backends.torch.decode_slots import WholePasses
from hyper_parallel.ir import Strategy
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.decoding import (
    Decoder,
    DecodingSequence,
    Sampling,
    make_decoder,
    numbers,
)
from hyper_parallel.trainer.stages.environments import Environments

NOT_SAMPLED: Final = -1
"""Value of `Completions.versions` for tokens that the model did not sample; versions of weights start at 0."""


@dataclass(frozen=True, slots=True)
class Completions:
    """Sampled completions of N prompts.

    Attributes:
        tokens: [N, S + 1] token ids: prompt, completion with its stop token, padding.
        ends: [N] position after the last token of the completion.
        logprobs: [N, S + 1] log-probability of every sampled token under the weights that sampled it; 0 elsewhere.
        versions: [N, S + 1] version of the weights that sampled each token; `NOT_SAMPLED` for prompts, environment
            replies and padding.
        rewards: [N] sum of the rewards that the environment returned; 0 without an environment.
        stopped: [N] mask of completions that ended with a stop token, not at the length limit.
        reference_logprobs: [N, S] log-probability of each next token under the reference model; [N, 0] if the sampling
            ranks do not compute it.
    """

    tokens: Tensor
    ends: Tensor
    logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    stopped: Tensor
    reference_logprobs: Tensor

    @property
    def sampled(self) -> Tensor:
        """[N, S + 1] mask of tokens sampled by the model."""
        return self.versions != NOT_SAMPLED

    @property
    def real(self) -> Tensor:
        """[N, S] mask of positions whose next token is not padding."""
        positions = torch.arange(self.tokens.shape[1] - 1, device=self.ends.device)
        return positions < self.ends[:, None] - 1

    @property
    def labels(self) -> Tensor:
        """[N, S] training labels: the next token of each position if it was sampled, else `IGNORE_INDEX`."""
        return torch.where(self.sampled, self.tokens, IGNORE_INDEX)[:, 1:]


@dataclass
class Weights:
    """Version of the sampling weights, and functions that load newer weights.

    Attributes:
        version: Version of the loaded weights: the number of rollouts that they were trained on.
        due: Function that returns whether newer weights are available, called before every forward pass; None: never.
        renew: Function that loads newer weights on every rank of a model replica, and returns their version; None: the
            weights are fixed.
    """

    version: int = 0
    due: Callable[[], bool] | None = None
    renew: Callable[[], int] | None = None


def sample(
    model: nn.Module,
    tokens: Tensor,
    starts: Tensor,
    *,
    stops: Collection[int],
    max_completion_length: int,
    draws: Tensor,
    microbatch: int,
    weights: Weights | None = None,
    environments: Environments | None = None,
    exact: bool = False,
) -> Completions:
    """Sample a completion of every prompt, with temperature 1 and without truncation of the distribution.

    Args:
        model: Causal language model passed through `parallelize`, without pipeline stages or sharded sequences.
        tokens: [N, S + 1] right-padded prompts; padding is never attended to, as attention is causal.
        starts: [N] number of tokens of each prompt, at most S + 1.
        stops: Token ids that end a completion.
        max_completion_length: Maximum number of tokens of a completion, including environment replies.
        draws: [N, max_completion_length] random numbers in [0, 1), one per token.
        microbatch: Number of rows of a forward pass.
        weights: Version of the weights, and functions that load newer weights; None: fixed weights of version 0. After
            newer weights are loaded, unfinished completions are prefilled again and continue.
        environments: Environments that reply to finished turns; None: a completion is one turn.
        exact: Decode without a key-value cache, by forward passes over full rows as in training, and compute the
            log-probabilities in one more forward pass. `environments`, and newer weights, are then ignored.
    """
    weights = weights or Weights()
    tokens, ends = tokens.clone(), starts.clone()
    logprobs = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    versions = torch.full_like(tokens, NOT_SAMPLED, dtype=torch.int32)
    stopped = torch.zeros_like(starts, dtype=torch.bool)
    limits = (tokens.shape[1] - starts).clamp_(max=max_completion_length).tolist()
    sequences = _decoding_sequences(tokens, starts, limits, draws)
    settings = Sampling(max_completion_length, temperature=1.0, top_p=1.0)
    training = model.training
    model.eval()
    if exact:
        steps = _decode_exact(model, tokens, sequences, settings, stops, microbatch)
    else:
        decoder = make_decoder(model, sequences, settings, stops, microbatch, interrupt=weights.due)
        steps = _decode_in_slots(decoder, weights, environments)
    for sequence in steps:
        versions[sequence.number, len(sequence.text) - 1] = weights.version
    for sequence in sequences:
        row, end = sequence.number, len(sequence.text)
        tokens[row, :end] = torch.tensor(sequence.text)
        logprobs[row, sequence.start : end] = torch.tensor(sequence.logprobs, dtype=torch.float64)
        ends[row], stopped[row] = end, sequence.finish == "stop"
    model.train(training)
    rewards = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    if environments is not None:
        rewards += torch.tensor(environments.rewards, dtype=torch.float64, device=tokens.device)
    completions = Completions(tokens, ends, logprobs, versions, rewards, stopped, logprobs[:, :0])
    if exact:
        logprobs[:, 1:] = logprobs_of(model, tokens[:, :-1], completions.labels, microbatch)
    return completions


def _decoding_sequences(tokens: Tensor, starts: Tensor, limits: Sequence[int], draws: Tensor) -> list[DecodingSequence]:
    row_draws = draws.double().cpu().numpy()
    return [
        DecodingSequence(row, tokens[row, :start].tolist(), start, limit, row_draws[row])
        for row, (start, limit) in enumerate(zip(starts.tolist(), limits, strict=True))
        if limit
    ]


def _decode_exact(
    model: nn.Module,
    tokens: Tensor,
    sequences: Sequence[DecodingSequence],
    settings: Sampling,
    stops: Collection[int],
    microbatch: int,
) -> Iterator[DecodingSequence]:
    """Decode by forward passes over full rows of each microbatch; yield a sequence after each token sampled for it."""
    for first in range(0, len(tokens), microbatch):
        batch = [s for s in sequences if first <= s.number < first + microbatch]
        ids = tokens[first : first + microbatch, :-1]
        passes = WholePasses(model, ids, [s.number - first for s in batch])
        decoder = Decoder(passes, settings, stops)
        decoder.add(batch)
        yield from decoder.run()


def _decode_in_slots(
    decoder: Decoder, weights: Weights, environments: Environments | None
) -> Iterator[DecodingSequence]:
    """Yield a sequence after each token sampled for it; load newer weights when due, and append environment replies."""
    while True:
        for sequence in decoder.run():
            yield sequence
            if sequence.finish is not None and environments is not None:
                reply = environments.answer(sequence)
                if len(sequence.tokens) + len(reply) < sequence.limit and reply:
                    decoder.continue_after(sequence, reply)
        if weights.renew is None or not decoder.busy:
            return
        weights.version = weights.renew()
        decoder.invalidate_cache()


@torch.no_grad()
def logprobs_of(model: nn.Module, input_ids: Tensor, labels: Tensor, microbatch: int) -> Tensor:
    """Return [N, S] log-probabilities of `labels` under the current weights; a pass takes `microbatch` rows."""
    training = model.training
    model.eval()
    parts = zip(input_ids.split(microbatch), labels.split(microbatch), strict=True)
    logprobs = [token_logprobs(model, input_ids=a, shift_labels=b) for a, b in parts]
    model.train(training)
    return torch.cat(logprobs)


def all_reduce_max(value: Tensor) -> float:
    """Return the maximum over all ranks of a scalar tensor, which is overwritten."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def all_reduce_sum(values: Tensor) -> list[float]:
    """Return the sum over all ranks of each element of a tensor, which is overwritten."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    sums: list[float] = values.tolist()
    return sums


def sum_over_data_ranks(values: Tensor, strategy: Strategy) -> list[float]:
    """Return the sum of each element over data-parallel ranks; ranks that hold the same rows count once."""
    replicas = strategy.world_size // strategy.dp
    return [value / replicas for value in all_reduce_sum(values)]


def uniform(seed: int, step: int, first: int, rows: int, length: int) -> np.ndarray:
    """Return [rows, length] random numbers in [0, 1) for `rows` sequences of a step, from index `first` on.

    The numbers depend only on seed, step, sequence index and token index, not on the layout.
    """
    each = [numbers(seed, 5, step, row, length=length) for row in range(first, first + rows)]
    return np.array(each).reshape(rows, length)


def environment_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of the environment of sequence `number` of a step."""
    return int(numbers(seed, 6, step, number, length=1)[0] * 2**53)
