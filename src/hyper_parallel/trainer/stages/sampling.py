"""Completions of many prompts at once, from the model as it is laid out for training.

Every rank of a data-parallel group samples its own rows, all take as many forward passes, and nothing is copied: the
weights are those of the next step. Keys and values are kept while a step samples, for one microbatch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch.decode_slots import WholePasses
from hyper_parallel.backends.torch.user_objective import token_logprobs
from hyper_parallel.trainer.data.batches import IGNORE_INDEX
from hyper_parallel.trainer.decoding import Decoder, Running, Sampling, decoder_of, numbers
from hyper_parallel.trainer.stages.environments import Environments

NOT_SAMPLED: Final = -1
"""Version of what no weights have sampled: versions count steps, from 0."""


@dataclass(frozen=True, slots=True)
class Completions:
    """What was sampled for N prompts.

    Attributes:
        tokens: [N, S + 1] prompt, completion with the token that stopped it, and padding.
        ends: [N] where the completion ends.
        logprobs: [N, S + 1] log-probability of every sampled token under the weights that sampled it; 0 elsewhere.
        versions: [N, S + 1] version of these weights; `NOT_SAMPLED` for prompts, words of an environment and padding.
        rewards: [N] what an environment gave; 0 without one.
        stopped: [N] whether a stop token ended it, not the limit.
        reference_logprobs: [N, S] log-probability of what comes next by the model before the first step, where ranks
            that sample give it; else [N, 0].
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
        """[N, S + 1] whether the model chose the token."""
        return self.versions != NOT_SAMPLED

    @property
    def real(self) -> Tensor:
        """[N, S] whether a token comes before the last one of its row, so that a next one follows."""
        places = torch.arange(self.tokens.shape[1] - 1, device=self.ends.device)
        return places < self.ends[:, None] - 1

    @property
    def labels(self) -> Tensor:
        """[N, S] the sampled token that comes after each; `IGNORE_INDEX` where none does."""
        return torch.where(self.sampled, self.tokens, IGNORE_INDEX)[:, 1:]


@dataclass
class Weights:
    """The weights that sample.

    Attributes:
        version: Of those that are loaded.
        due: Asked before every pass: whether newer ones may be taken. None: these sample all.
        renew: Loads newer ones, on every rank that shares a copy, and gives their version.
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
    """Continue every row by tokens drawn from the model's distribution.

    Args:
        model: A causal language model that passed through `parallelize`, without pipeline stages or cut sequences.
        tokens: [N, S + 1] prompts, padded behind; attention is causal, so that padding is never seen.
        starts: [N] tokens of the prompts.
        stops: Tokens that end a completion.
        max_completion_length: Most tokens of one, the words of an environment among them.
        draws: [N, max_completion_length] numbers in [0, 1), one for every token: a sequence depends on no other.
        microbatch: Rows of a forward pass.
        weights: Which weights sample; completions that newer ones find half done are read again and go on by these.
        environments: Who answers when a completion ends, so that it goes on.
        exact: By the forward pass of training over whole microbatches, and log-probabilities from one more of these.
    """
    weights = weights or Weights()
    tokens, ends = tokens.clone(), starts.clone()
    logprobs = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    versions = torch.full_like(tokens, NOT_SAMPLED, dtype=torch.int32)
    stopped = torch.zeros_like(starts, dtype=torch.bool)
    limits = (tokens.shape[1] - starts).clamp_(max=max_completion_length).tolist()
    drawn = draws.double().cpu().numpy()
    sequences = [
        Running(row, tokens[row, :start].tolist(), start, limit, drawn[row])
        for row, (start, limit) in enumerate(zip(starts.tolist(), limits, strict=True))
        if limit
    ]
    whole = Sampling(max_completion_length, temperature=1.0, top_p=1.0)
    training = model.training
    model.eval()
    for first in range(0, len(tokens), microbatch) if exact else ():
        mine = [s for s in sequences if first <= s.number < first + microbatch]
        ids = tokens[first : first + microbatch, :-1]
        passes = WholePasses(model, ids, [s.number - first for s in mine])
        decoder = Decoder(passes, whole, stops)
        decoder.add(mine)
        for sequence in decoder.run():
            versions[sequence.number, len(sequence.text) - 1] = weights.version
    going = [] if exact else sequences
    decoder = decoder_of(model, going, whole, stops, microbatch, interrupt=weights.due)
    while not exact:
        for sequence in decoder.run():
            versions[sequence.number, len(sequence.text) - 1] = weights.version
            if sequence.finish is not None and environments is not None:
                said = environments.answer(sequence)
                if len(sequence.tokens) + len(said) < sequence.limit and said:
                    decoder.go_on(sequence, said)
        if weights.renew is None or not decoder.busy:
            break
        weights.version = weights.renew()
        decoder.read_again()
    for sequence in sequences:
        row, end = sequence.number, len(sequence.text)
        tokens[row, :end] = torch.tensor(sequence.text)
        logprobs[row, sequence.start : end] = torch.tensor(sequence.logprobs, dtype=torch.float64)
        ends[row], stopped[row] = end, sequence.finish == "stop"
    model.train(training)
    rewards = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    if environments is not None:
        rewards += torch.tensor(environments.rewards, dtype=torch.float64, device=tokens.device)
    made = Completions(tokens, ends, logprobs, versions, rewards, stopped, logprobs[:, :0])
    if exact:
        logprobs[:, 1:] = logprobs_of(model, tokens[:, :-1], made.labels, microbatch)
    return made


@torch.no_grad()
def logprobs_of(model: nn.Module, input_ids: Tensor, labels: Tensor, microbatch: int) -> Tensor:
    """[N, S] log-probabilities of labels by the weights as they are, in passes over so many rows."""
    training = model.training
    model.eval()
    parts = zip(input_ids.split(microbatch), labels.split(microbatch), strict=True)
    found = [token_logprobs(model, input_ids=a, shift_labels=b) for a, b in parts]
    model.train(training)
    return torch.cat(found)


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
        yield numbers(seed, 5, step, row, length=length)


def environment_seed(seed: int, step: int, number: int) -> int:
    """Of the environment of a sequence of a step: a function of the same three, and of no other sequence."""
    return int(numbers(seed, 6, step, number, length=1)[0] * 2**53)
