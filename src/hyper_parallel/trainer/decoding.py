"""Continuous batching: many sequences decode at once, and when a sequence ends, a queued sequence gets its batch slot.

  add        queue sequences until a slot is free
  step       run a forward pass: prefill chunks of prompts or, if all prompts are in the cache, feed the last token of
             every sequence. Choose a token for each sequence whose tokens are all in the key-value cache.
  end        on a stop token, a stop text or the token limit, free the slot for the next sequence

A slot is a row of the key-value cache. Each sequence has its own random numbers, one per generated token, which do not
depend on other sequences of the batch. An interrupted sequence can continue later from its tokens so far.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.backends.torch.decode_slots import Passes, passes_of
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import PromptMedia

SLOTS: Final = 32
"""Default number of concurrent sequences."""

_REFILL: Final = 4
"""New sequences are admitted when at least 1 / _REFILL of the slots are free, to prefill several prompts per pass."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of text generation.

    Attributes:
        max_new_tokens: Maximum number of generated tokens.
        temperature: Divisor of the logits; 0: greedy decoding.
        top_p: Nucleus sampling, after `top_k`: sample from the smallest set of most likely tokens whose probability
            reaches this value (Holtzman et al. 2020).
        seed: Random seed.
        top_k: Number of most likely tokens to sample from; 0: all tokens.
        stop: Texts that end the generation and are removed from the result.

    Raises:
        BadValue: HP102 for a value of the wrong type or out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        number = (int, float)
        for name, types, is_valid, allowed in (
            ("max_new_tokens", int, lambda v: v >= 1, "a whole number, 1 or more"),
            ("temperature", number, lambda v: 0 <= v < math.inf, "a number, 0 or more"),
            ("top_p", number, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
            ("seed", int, lambda _: True, "a whole number"),
            ("top_k", int, lambda v: v >= 0, "a whole number, 0 or more"),
            ("stop", tuple, all, "texts of at least one character"),
        ):
            value = getattr(self, name)
            of_type = isinstance(value, types) and not isinstance(value, bool)
            if not of_type or not is_valid(value):
                problem = "is out of range" if of_type else "has the wrong type"
                raise BadValue(f"{name} {problem}", got=repr(value)[:80], allowed=allowed)


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """Sequence that is being decoded.

    Attributes:
        number: Number that identifies the sequence; it need not be the index of a slot.
        text: Tokens of the prompt, then the generated tokens, including the stop token.
        start: Number of prompt tokens.
        limit: Maximum number of generated tokens.
        draws: [limit] random numbers in [0, 1), one per generated token; None: only for greedy decoding.
        logprobs: Log-probabilities of the generated tokens, with temperature 1 and without `top_k` and `top_p`; 0 for
            tokens inserted by `continue_after`.
        finish: `stop` or `length` once the sequence has ended; None: in progress.
        read: Number of tokens of `text` that are in the key-value cache.
        seconds: Seconds from the creation of the decoder to the end of the sequence.
        media: Images and audio of the prompt; None: the prompt is text only.
    """

    number: int
    text: list[int]
    start: int
    limit: int
    draws: NDArray[np.float64] | None = None
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    read: int = 0
    seconds: float = 0.0
    media: PromptMedia | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens after the prompt."""
        return self.text[self.start :]


class Decoder:
    """Decoder of many sequences with continuous batching.

    Args:
        passes: Forward passes of the model with a key-value cache.
        sampling: Sampling parameters, of which only `temperature`, `top_k` and `top_p` are read.
        stops: Token ids that end a sequence.
        ended: Function that returns whether a sequence ends after its newest token; None: only `stops` and `limit` end
            a sequence.
        interrupt: Function, called before each pass, that returns whether to stop decoding; None: never.
    """

    def __init__(
        self,
        passes: Passes,
        sampling: Sampling,
        stops: Collection[int] = (),
        *,
        ended: Callable[[DecodingSequence], bool] | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> None:
        self.passes, self.sampling, self.stops = passes, sampling, frozenset(stops)
        self._ended, self._interrupt = ended, interrupt
        self._start_s = time.perf_counter()
        self._waiting: deque[DecodingSequence] = deque()
        self._slots: dict[int, DecodingSequence] = {}

    @property
    def busy(self) -> bool:
        """True if any sequence is queued or in a slot."""
        return bool(self._waiting or self._slots)

    def add(self, sequences: Iterable[DecodingSequence]) -> None:
        """Queue sequences for free slots, first in first out."""
        self._waiting.extend(sequences)

    def continue_after(self, sequence: DecodingSequence, tokens: Sequence[int]) -> None:
        """Append `tokens` to an ended sequence and queue the sequence again; `tokens` count towards its limit."""
        sequence.text.extend(tokens)
        sequence.logprobs.extend([0.0] * len(tokens))
        sequence.finish = None
        self.add([sequence])

    def invalidate_cache(self) -> None:
        """Discard the key-value cache after a change of weights; all sequences are prefilled again."""
        for sequence in self._slots.values():
            sequence.read = 0

    def run(self) -> Iterator[DecodingSequence]:
        """Decode until all sequences have ended or decoding is interrupted; yield a sequence after each new token.

        Ranks that share a model's parameters continue until all have ended or any is interrupted.
        """
        while True:
            halted = self._interrupt is not None and self._interrupt()
            busy, halted = self.passes.combine_flags(self.busy, halted)
            if halted or not busy:
                return
            yield from self.step()

    def step(self) -> list[DecodingSequence]:
        """Run a forward pass and return the sequences that got a new token, possibly none."""
        self._admit()
        if not self._slots:
            self.passes.run_idle()
            return []
        unread = {row: len(s.text) - s.read for row, s in self._slots.items()}
        prompts = {row: min(remaining, self.passes.chunk) for row, remaining in unread.items() if remaining > 1}
        longest = max(prompts.values(), default=0)
        # Prompts less than half as long as the longest would be mostly padding, so they run in a later pass.
        rows = sorted([row for row, size in prompts.items() if 2 * size > longest] or unread)
        fed = [self._slots[row] for row in rows]
        parts = [s.text[s.read : s.read + self.passes.chunk] for s in fed]
        logits = self.passes.read_tokens(rows, parts, [s.read for s in fed])
        for sequence, part in zip(fed, parts, strict=True):
            sequence.read += len(part)
        done = [i for i, s in enumerate(fed) if s.read == len(s.text)]
        if not done:
            return []
        finished_reading = [fed[i] for i in done]
        if logits is not None and len(done) < len(rows):
            logits = logits[done]
        chosen = None if logits is None else self._choose(logits, finished_reading)
        tokens, logprobs = self.passes.broadcast_choices(chosen, len(done)).tolist()
        for sequence, token, logprob in zip(finished_reading, tokens, logprobs, strict=True):
            self._take(sequence, int(token), logprob)
        return finished_reading

    def _choose(self, logits: Tensor, sequences: Sequence[DecodingSequence]) -> Tensor:
        draws = [0.0 if s.draws is None else s.draws[len(s.text) - s.start] for s in sequences]
        drawn = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        return torch.stack(choose(logits, drawn, self.sampling))

    def _take(self, sequence: DecodingSequence, token: int, logprob: float) -> None:
        sequence.text.append(token)
        sequence.logprobs.append(logprob)
        if token in self.stops or (self._ended is not None and self._ended(sequence)):
            sequence.finish = "stop"
        elif len(sequence.text) - sequence.start >= sequence.limit:
            sequence.finish = "length"
        if sequence.finish is not None:
            sequence.seconds = time.perf_counter() - self._start_s
            self._drop(sequence)

    def _drop(self, sequence: DecodingSequence) -> None:
        """Free the slot of a sequence; if no sequence is queued, move the sequence of the last slot into this slot."""
        sequence.read = 0  # its cache entries may be overwritten
        row = next((row for row, s in self._slots.items() if s is sequence), None)
        if row is None:
            self._waiting.remove(sequence)
            return
        del self._slots[row]
        last = max(self._slots, default=0)
        if last > row and not self._waiting:
            # If the used rows are adjacent, the cache is read in place.
            self.passes.move_sequence(last, row)
            self._slots[row] = self._slots.pop(last)

    def _admit(self) -> None:
        free = [row for row in range(self.passes.slots) if row not in self._slots]
        if self._slots and len(free) * _REFILL < self.passes.slots:
            return
        for row, _ in zip(free, range(len(self._waiting)), strict=False):
            self._slots[row] = self._waiting.popleft()


def make_decoder(
    model: Any,
    sequences: Sequence[DecodingSequence],
    sampling: Sampling,
    stops: Collection[int],
    slots: int,
    *,
    ended: Callable[[DecodingSequence], bool] | None = None,
    interrupt: Callable[[], bool] | None = None,
) -> Decoder:
    """Return a `Decoder` with `sequences` queued, and with a cache for at most `slots` concurrent sequences.

    The model is a causal language model in evaluation mode, before or after `parallelize`. The `Decoder` explains the
    other arguments.
    """
    passes = passes_of(model, max(1, min(slots, len(sequences))), cache_length(sequences))
    decoder = Decoder(passes, sampling, stops, ended=ended, interrupt=interrupt)
    decoder.add(sequences)
    return decoder


def cache_length(sequences: Sequence[DecodingSequence]) -> int:
    """Return the number of tokens that the cache must hold for the longest sequence; 1 without sequences."""
    # The last token is not fed to the model, so the cache needs no entry for it.
    return max((s.start + s.limit - 1 for s in sequences), default=1)


def choose(logits: Tensor, drawn: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample a token per row of logits [B, V]; return token ids [B] as float64, and log-probabilities [B].

    The random numbers `drawn` [B] in [0, 1) select tokens by inverse transform sampling in float64. With temperature 0,
    the most likely token is selected. Log-probabilities are those of temperature 1 without `top_k` and `top_p`.
    """
    logp = logits.double().log_softmax(-1)
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        probabilities = _filtered_probabilities(logp / sampling.temperature, sampling)
        total = probabilities.cumsum(-1)
        # After rounding, a number may equal the total, and the search would return an index past the end.
        token = torch.searchsorted(total, drawn[:, None] * total[:, -1:], right=True)
        token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0].double(), logp.gather(-1, token)[:, 0]


def _filtered_probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return unnormalised probabilities [B, V] after `top_k` and then `top_p`.

    Tokens with the same logit as the last of the `top_k` tokens are kept, as in transformers.
    """
    top_k, top_p = min(sampling.top_k, scores.shape[-1]), sampling.top_p
    if top_k:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    probabilities = scores.softmax(-1)
    if top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # Keep a token if the more likely tokens have a total probability below top_p. The first token is always kept.
        ranked = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ranked)
    return probabilities


def numbers(*key: int, length: int) -> NDArray[np.float64]:
    """Return [length] pseudorandom numbers in [0, 1); each depends only on `key` and its index."""
    return np.random.Generator(np.random.PCG64([part % 2**64 for part in key])).random(length)
