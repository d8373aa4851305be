"""Between texts and tokens: prompts with their template, what ends a text, and text of tokens as it gets certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.backends.torch.memory.generation import MemoryUse
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import render, stop_ids, tokenizing
from hyper_parallel.trainer.decoding import Running, Sampling, numbers

_REPLACEMENT = "\ufffd"
Prompt = str | list[dict[str, str]]
"""A text, or the turns of a conversation as `role` and `content`, which end with a user's."""
_STREAM = 6
"""Of random numbers: that of generation, beside those of training."""


@dataclass(frozen=True)
class Generation:
    """A continuation, finished or as far as it came.

    Attributes:
        prompt: The prompt as given.
        text: The continuation.
        token_ids: Its tokens, without the one that stopped it.
        num_prompt_tokens: Tokens of the prompt.
        stopped: Whether a stop token or a stop text ended it, not the limit.
        seconds: Wall time from the start to its end.
        memory: What was predicted and measured under a device budget; None without one.
        logprobs: Of the tokens, under the model's own distribution: temperature 1, all tokens.
        number: Of the sequence: with the seed it decides what is drawn.
        finish: `stop` or `length`; None: it was interrupted, and may be continued.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    stopped: bool
    seconds: float
    memory: MemoryUse | None = None
    logprobs: tuple[float, ...] = ()
    number: int = 0
    finish: str | None = None


class Texts:
    """Texts of one model.

    Args:
        tokenizer: Of the model.
        config: Of the model.
        stops: Tokens that end a text by the model's generation config.
    """

    def __init__(self, tokenizer: Any, config: Any, stops: int | list[int] | None) -> None:
        self.tokenizer = tokenizer
        context = getattr(config, "max_position_embeddings", None)
        self._context = context if context and context > 0 else None  # XLNet: -1, no limit
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        self._eos = stops

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """Tokens of a prompt; with `chat`, wrapped as a user's turn. An empty prompt is a document's beginning.

        Turns of a conversation are rendered by the chat template, up to the header of the answer.

        Raises:
            BadValue: HP102 when the tokenizer has no chat template.
        """
        if chat or not isinstance(prompt, str):
            if not self.tokenizer.chat_template:
                raise BadValue(
                    "the tokenizer has no chat template",
                    where=self.tokenizer.name_or_path,
                    got="--chat",
                    hint="leave out --chat",
                )
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = render(self.tokenizer, turns, prompt=True)
            with tokenizing("prompt"):
                return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        with tokenizing("prompt"):
            ids = list(self.tokenizer(prompt)["input_ids"])
        return ids or [self.tokenizer.eos_token_id]

    def begin(
        self, given: Prompt | Generation, number: int, sampling: Sampling, *, chat: bool = False
    ) -> Running:
        """The sequence of a prompt, or of a continuation as far as it came.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model.
        """
        before = given if isinstance(given, Generation) else None
        prompt: Any = given if before is None else before.prompt
        ids, limit = self.encode(prompt, chat=chat), sampling.max_new_tokens
        room = math.inf if self._context is None else self._context - len(ids)
        if limit > room:
            raise BadValue(
                "prompt and continuation are longer than the context of the model",
                where=f"prompt {number}" if number else None,
                got=f"{len(ids)} + {limit} tokens",
                allowed=f"{self._context} tokens in all",
                hint=f"--max-new-tokens {room}" if room > 0 else "a shorter prompt",
            )
        number = number if before is None else before.number
        running = Running(number, ids, len(ids), limit, draws_of(sampling, number))
        if before is not None and (top := max(before.token_ids, default=0)) >= self._vocabulary:
            raise BadValue("a continuation has a token that the model has not", got=top)
        if before is not None:
            running.text += before.token_ids
            running.logprobs += before.logprobs
        return running

    def stops(self, *, chat: bool) -> set[int]:
        """Tokens that end a text: the tokenizer's, the model's own list, in a chat the template's."""
        return stop_ids(self.tokenizer, self._eos, chat=chat)

    def ended(self, sampling: Sampling) -> Callable[[Running], bool] | None:
        """Whether a stop text has just appeared; None where there are none."""
        if not sampling.stop:
            return None
        # A token has at least one byte, and a few have none.
        tail = 4 * max(len(text) for text in sampling.stop) + 8

        def found(sequence: Running) -> bool:
            text = self.tokenizer.decode(sequence.tokens[-tail:])
            return any(stop in text for stop in sampling.stop)

        return found

    def made(
        self, sequence: Running, prompt: str, sampling: Sampling, stops: set[int]
    ) -> Generation:
        """A sequence as text, as far as it is."""
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if sequence.finish == "stop" and tokens[-1] in stops:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return Generation(
            prompt=prompt,
            text="".join(until(stream_text(self.tokenizer, tokens), sampling.stop)),
            token_ids=tuple(tokens),
            num_prompt_tokens=sequence.start,
            stopped=sequence.finish == "stop",
            seconds=sequence.seconds,
            logprobs=tuple(logprobs),
            number=sequence.number,
            finish=sequence.finish,
        )


class PromptBatch:
    """The sequences of many prompts.

    Args:
        texts: Of the model.
        prompts: Texts, numbered from 0, or generations that were interrupted.
        sampling: How tokens are chosen.
        chat: Prompts are users' turns.

    Raises:
        BadValue: HP102 when a prompt and its continuation exceed the context of the model.
    """

    def __init__(
        self,
        texts: Texts,
        prompts: Sequence[str | Generation],
        sampling: Sampling,
        *,
        chat: bool = False,
    ) -> None:
        self.sampling, self.stops = sampling, texts.stops(chat=chat)
        self.ended = texts.ended(sampling)
        self._texts, self._prompts = texts, prompts
        self.sequences = {
            place: texts.begin(given, place, sampling, chat=chat)
            for place, given in enumerate(prompts)
            if not (isinstance(given, Generation) and _has_ended(given, sampling))
        }
        """By place among the prompts, those that go on."""

    def generations(self) -> list[Generation]:
        """What there is of every prompt, in their order."""
        return [self._made(place, given) for place, given in enumerate(self._prompts)]

    def _made(self, place: int, given: str | Generation) -> Generation:
        sequence = self.sequences.get(place)
        if sequence is None:
            assert isinstance(given, Generation)
            return given
        prompt = given.prompt if isinstance(given, Generation) else given
        return self._texts.made(sequence, prompt, self.sampling, self.stops)


def draws_of(sampling: Sampling, number: int) -> NDArray[np.float64]:
    """What a sequence draws, one number in [0, 1) for every token."""
    return numbers(sampling.seed, _STREAM, number, length=sampling.max_new_tokens)


def _has_ended(given: Generation, sampling: Sampling) -> bool:
    """Whether a continuation would not go on."""
    return given.finish == "stop" or len(given.token_ids) >= sampling.max_new_tokens


def stream_text(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Text of tokens as it becomes certain: the bytes of one character may span several tokens."""
    pending: list[int] = []
    context: list[int] = []
    for token in tokens:
        pending.append(token)
        # Decoding with the tokens before keeps the spaces that a tokenizer drops at the beginning of a text.
        before = tokenizer.decode(context)
        text = tokenizer.decode(context + pending)[len(before) :]
        if text and not text.endswith(_REPLACEMENT):
            yield text
            context, pending = pending, []
    if pending:
        yield tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]


def until(pieces: Iterable[str], stops: tuple[str, ...]) -> Iterator[str]:
    """Pieces of a text up to the first of the stop texts, which may begin in one piece and end in another."""
    held, longest = "", max(map(len, stops), default=1) - 1
    for piece in pieces:
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            yield held[: min(found)]
            return
        ready = len(held) - longest
        if ready > 0:
            yield held[:ready]
            held = held[ready:]
    yield held
