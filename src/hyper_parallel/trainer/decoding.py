"""Decoding: many sequences at once, each token chosen from logits, slots filled again as sequences end.

    add        sequences wait until a slot is free
    step       one pass of the model: prompts are read first, in chunks; else every sequence in a slot reads its last
               token. Sequences that have read all of their text choose a token.
    ended      by a stop token, a text that stops, or the limit; the slot is free for the next

What a sequence draws is a function of its own key and the number of its token, so that it depends on no other one; one
that is taken out may go on later, from its tokens so far.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.backends.torch.decode_slots import Passes, passes_of
from hyper_parallel.errors import BadValue

SLOTS: Final = 32
"""Sequences at a time, where nobody says how many."""

_REFILL: Final = 4
"""Prompts are read when at least one slot in so many is free: a pass costs as much for one row as for a few."""


_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "max_new_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": int,
    "top_k": int,
    "stop": tuple,
}
"""Types of the choices of `Sampling`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Limit of the continuation.
        temperature: 0: the most likely token; else logits are divided by it and a token is drawn.
        top_p: Draw from the smallest set of tokens whose probability, among those that `top_k` leaves, reaches this
            (Holtzman et al. 2020).
        seed: Of the draws; the same seed gives the same text.
        top_k: Draw from so many tokens, the most likely ones; 0: from all.
        stop: Texts that end the continuation, which ends before them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                allowed = "a whole number" if kinds is int else "a number"
                allowed = "texts" if kinds is tuple else allowed
                raise BadValue(f"{name} is of another type", got=repr(value)[:80], allowed=allowed)
        for name, good, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("stop", all(self.stop), "texts of at least one character"),
        ):
            if not good:
                got = getattr(self, name)
                raise BadValue(f"{name} is out of range", got=got, allowed=allowed)


@dataclass(slots=True, eq=False)
class Running:
    """One sequence.

    Attributes:
        number: Its own, in the batch.
        text: Tokens of the prompt, then those that were chosen, with the one that stopped it.
        start: Tokens of the prompt.
        limit: Most tokens that are chosen.
        draws: [limit] numbers in [0, 1), one for every token; None: the most likely token is taken.
        logprobs: Of the chosen tokens, under the model's own distribution: temperature 1, all tokens; 0 for words that
            it did not choose.
        finish: What ended it; None: nothing has.
        read: Tokens of the text that the model has read.
        seconds: From the decoder's start to its end.
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

    @property
    def tokens(self) -> list[int]:
        """Those that were chosen."""
        return self.text[self.start :]


class Decoder:
    """Continues sequences by the passes of a model.

    Args:
        passes: Of the model.
        sampling: How tokens are chosen; the limit is each sequence's own.
        stops: Tokens that end a sequence.
        ended: Whether a sequence that has just got a token ends with it.
        interrupt: Asked before each pass whether to leave the sequences as they are.
    """

    def __init__(
        self,
        passes: Passes,
        sampling: Sampling,
        stops: Collection[int] = (),
        *,
        ended: Callable[[Running], bool] | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> None:
        self.passes, self.sampling, self.stops = passes, sampling, frozenset(stops)
        self._ended, self._interrupt = ended, interrupt
        self._start_s = time.perf_counter()
        self._waiting: deque[Running] = deque()
        self._slots: dict[int, Running] = {}

    @property
    def busy(self) -> bool:
        """Whether a sequence is not finished."""
        return bool(self._waiting or self._slots)

    def add(self, sequences: Iterable[Running]) -> None:
        """Continue these, in this order, as slots become free."""
        self._waiting.extend(sequences)

    def cancel(self, number: int) -> Running | None:
        """Take a sequence out as it is; `add` lets it go on, here or elsewhere. None: it has ended."""
        for kept in (self._slots.values(), self._waiting):
            for sequence in kept:
                if sequence.number == number:
                    self._drop(sequence)
                    return sequence
        return None

    def go_on(self, sequence: Running, words: Sequence[int]) -> None:
        """Let a sequence that has ended go on behind words that it did not choose; they count to its limit."""
        sequence.text.extend(words)
        sequence.logprobs.extend([0.0] * len(words))
        sequence.finish = None
        self.add([sequence])

    def read_again(self) -> None:
        """The model has other weights: what it has read of sequences in slots is read once more."""
        for sequence in self._slots.values():
            sequence.read = 0

    def run(self) -> Iterator[Running]:
        """Decode until no rank has work or any is interrupted; gives every sequence when it has got a token."""
        while True:
            halted = self._interrupt is not None and self._interrupt()
            busy, halted = self.passes.anywhere(self.busy, halted)
            if halted or not busy:
                return
            yield from self.step()

    def step(self) -> list[Running]:
        """One pass; the sequences that got a token by it."""
        self._admit()
        if not self._slots:
            self.passes.idle()
            return []
        unread = {row: len(s.text) - s.read for row, s in self._slots.items()}
        prompts = {row: min(left, self.passes.chunk) for row, left in unread.items() if left > 1}
        longest = max(prompts.values(), default=0)
        # Much shorter ones, which would be mostly padding, follow by themselves.
        rows = sorted([row for row, size in prompts.items() if 2 * size > longest] or unread)
        fed = [self._slots[row] for row in rows]
        parts = [s.text[s.read : s.read + self.passes.chunk] for s in fed]
        logits = self.passes.feed(rows, parts, [s.read for s in fed])
        for sequence, part in zip(fed, parts, strict=True):
            sequence.read += len(part)
        done = [i for i, s in enumerate(fed) if s.read == len(s.text)]
        if not done:
            return []
        going = [fed[i] for i in done]
        if logits is not None and len(done) < len(rows):
            logits = logits[done]
        chosen = None if logits is None else self._choose(logits, going)
        tokens, logprobs = self.passes.share(chosen, len(done)).tolist()
        for sequence, token, logprob in zip(going, tokens, logprobs, strict=True):
            self._take(sequence, int(token), logprob)
        return going

    def _choose(self, logits: Tensor, sequences: Sequence[Running]) -> Tensor:
        draws = [0.0 if s.draws is None else s.draws[len(s.text) - s.start] for s in sequences]
        drawn = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        return torch.stack(choose(logits, drawn, self.sampling))

    def _take(self, sequence: Running, token: int, logprob: float) -> None:
        sequence.text.append(token)
        sequence.logprobs.append(logprob)
        if token in self.stops or (self._ended is not None and self._ended(sequence)):
            sequence.finish = "stop"
        elif len(sequence.text) - sequence.start >= sequence.limit:
            sequence.finish = "length"
        if sequence.finish is not None:
            sequence.seconds = time.perf_counter() - self._start_s
            self._drop(sequence)

    def _drop(self, sequence: Running) -> None:
        """Free the slot of a sequence; without one that waits, the last of the others goes there."""
        sequence.read = 0  # what it left behind may be overwritten
        row = next((row for row, s in self._slots.items() if s is sequence), None)
        if row is None:
            self._waiting.remove(sequence)
            return
        del self._slots[row]
        last = max(self._slots, default=0)
        if last > row and not self._waiting:
            # Rows that follow each other are read where they are.
            self.passes.move(last, row)
            self._slots[row] = self._slots.pop(last)

    def _admit(self) -> None:
        free = [row for row in range(self.passes.slots) if row not in self._slots]
        if self._slots and len(free) * _REFILL < self.passes.slots:
            return
        for row, _ in zip(free, range(len(self._waiting)), strict=False):
            self._slots[row] = self._waiting.popleft()


def decoder_of(
    model: Any,
    sequences: Sequence[Running],
    sampling: Sampling,
    stops: Collection[int],
    slots: int,
    *,
    ended: Callable[[Running], bool] | None = None,
    interrupt: Callable[[], bool] | None = None,
) -> Decoder:
    """A decoder of a model with a cache that is as large as these sequences need, which are added.

    Args:
        model: A causal language model, plain or laid out by `parallelize`; in evaluation mode.
        sequences: What is continued.
        sampling: As in `Decoder`.
        stops: As in `Decoder`.
        slots: Most sequences at a time.
        ended: As in `Decoder`.
        interrupt: As in `Decoder`.
    """
    # The last token is not fed back, so the cache needs no slot for it.
    length = max((s.start + s.limit - 1 for s in sequences), default=1)
    passes = passes_of(model, max(1, min(slots, len(sequences))), length)
    decoder = Decoder(passes, sampling, stops, ended=ended, interrupt=interrupt)
    decoder.add(sequences)
    return decoder


def choose(logits: Tensor, drawn: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [B], as float64, for logits [B, V] and numbers [B] in [0, 1), and their log-probabilities [B].

    In float64, so that a number means the same on every device: the inverse of the distribution function.
    """
    logp = logits.double().log_softmax(-1)
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        kept = _cut(logp / sampling.temperature, sampling)
        total = kept.cumsum(-1)
        # Rounding may leave a number at the last value, which the search passes by.
        token = torch.searchsorted(total, drawn[:, None] * total[:, -1:], right=True)
        token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0].double(), logp.gather(-1, token)[:, 0]


def _cut(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities [B, V] that tokens are drawn by, up to a factor: top_k first, and top_p of what is left.

    Tokens that are as likely as the last of the `top_k` stay, as in transformers.
    """
    top_k, top_p = min(sampling.top_k, scores.shape[-1]), sampling.top_p
    if top_k:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    kept = scores.softmax(-1)
    if top_p < 1:
        ranked, order = kept.sort(dim=-1, descending=True, stable=True)
        # A token stays when the more likely ones have not reached top_p yet; the first always stays.
        ranked = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)
        kept = torch.zeros_like(kept).scatter_(-1, order, ranked)
    return kept


def numbers(*key: int, length: int) -> NDArray[np.float64]:
    """[length] numbers in [0, 1) that are a function of a key; a longer list begins as a shorter one."""
    raw = np.random.PCG64([part % 2**64 for part in key]).random_raw(length)
    drawn: NDArray[np.float64] = (raw >> 11) / 2.0**53
    return drawn
