"""Conversion between text and tokens: prompts with chat template, stop conditions, and incremental detokenization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.backends.torch.memory.generation import MemoryUse
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import (
    PromptMedia,
    encode_parts,
    has_parts,
    render,
    stop_ids,
    tokenizing,
)
from hyper_parallel.trainer.decoding import DecodingSequence, Sampling, numbers

_REPLACEMENT = "\ufffd"
Prompt = str | list[dict[str, Any]]
"""Text, or turns of a conversation with keys `role` and `content`, the last by the user. Content is a text, or a list
of parts as in `encode_parts`."""
_STREAM = 6
"""Key of the random numbers for generation, distinct from the keys used in training."""


@dataclass(frozen=True)
class Generation:
    """Generated continuation of a prompt, finished or interrupted.

    Attributes:
        prompt: Text of the prompt, or turns of a conversation.
        text: Text of the continuation.
        token_ids: Tokens of the continuation, without the stop token.
        num_prompt_tokens: Number of tokens of the prompt.
        stopped: Whether a stop token or stop text ended the continuation, rather than the token limit.
        seconds: Seconds of decoding up to the end of the continuation; 0 if interrupted.
        memory: Predicted and measured memory under a budget of device memory; None without a budget.
        logprobs: Log-probabilities of the tokens, with temperature 1 and without `top_k` and `top_p`.
        number: Index of the sequence in its batch. The random numbers depend on this index and the seed.
        finish: `stop` or `length`; None: interrupted, can be resumed.
    """

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    stopped: bool
    seconds: float
    memory: MemoryUse | None = None
    logprobs: tuple[float, ...] = ()
    number: int = 0
    finish: str | None = None

    def has_ended(self, sampling: Sampling) -> bool:
        """Return whether the continuation has ended by a stop, or has `sampling.max_new_tokens` tokens."""
        return self.finish == "stop" or len(self.token_ids) >= sampling.max_new_tokens


class TextCodec:
    """Conversion of prompts to tokens and of tokens to text for one model.

    `stops` are the stop token ids of the model's generation config.
    """

    def __init__(self, tokenizer: Any, config: Any, stops: int | list[int] | None) -> None:
        self.tokenizer = tokenizer
        context = getattr(config, "max_position_embeddings", None)
        self._context = context if context and context > 0 else None  # XLNet: -1, no limit
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        self._eos = stops

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        With `chat` a text is a user turn. The chat template renders turns, followed by its generation prompt. Without
        `chat`, a text without tokens becomes the end-of-sequence token.

        Raises:
            BadValue: HP102 when turns need a chat template that the tokenizer lacks, or template or tokenizer fail.
        """
        if chat or not isinstance(prompt, str):
            if not self.tokenizer.chat_template:
                raise BadValue(
                    "the tokenizer has no chat template",
                    where=self.tokenizer.name_or_path,
                    got="--chat" if chat else "turns of a conversation",
                    hint={"--chat": None} if chat else "pass the prompt as a text",
                )
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = render(self.tokenizer, turns, prompt=True)
            with tokenizing("prompt"):
                return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        with tokenizing("prompt"):
            ids = list(self.tokenizer(prompt)["input_ids"])
        return ids or [self.tokenizer.eos_token_id]

    def begin(
        self, source: Prompt | Generation, number: int, sampling: Sampling, *, chat: bool = False
    ) -> DecodingSequence:
        """Create a sequence for decoding from prompt `number` of a batch, or from an interrupted continuation.

        Raises:
            BadValue: HP102 for errors of `encode`, when prompt and continuation exceed the model's context, or when the
                interrupted continuation has a token outside the vocabulary.
            HyperParallelError: Errors of `encode_parts`, for prompts with content parts.
        """
        previous = source if isinstance(source, Generation) else None
        prompt: Any = source if previous is None else previous.prompt
        media: PromptMedia | None = None
        if not isinstance(prompt, str) and has_parts(prompt):
            ids, media = encode_parts(self.tokenizer, prompt)
        else:
            ids = self.encode(prompt, chat=chat)
        limit = sampling.max_new_tokens
        available = math.inf if self._context is None else self._context - len(ids)
        if limit > available:
            raise BadValue(
                "prompt and continuation are longer than the context of the model",
                where=f"prompt {number}" if number else None,
                got=f"{len(ids)} + {limit} tokens",
                allowed=f"{self._context} tokens in all",
                hint={"--max-new-tokens": available} if available > 0 else "a shorter prompt",
            )
        number = number if previous is None else previous.number
        sequence = DecodingSequence(number, ids, len(ids), limit, draws_of(sampling, number), media=media)
        if previous is not None:
            if (top := max(previous.token_ids, default=0)) >= self._vocabulary:
                raise BadValue(
                    "a continuation has a token outside the vocabulary of the model",
                    where=f"continuation {number}",
                    got=top,
                    allowed=f"0 to {self._vocabulary - 1}",
                    hint="remove `token_ids` from this line of the input, or use the model that wrote it",
                )
            sequence.text += previous.token_ids
            sequence.logprobs += previous.logprobs
        return sequence

    def stop_token_ids(self, *, chat: bool) -> set[int]:
        """Return the stop token ids of tokenizer and generation config and, with `chat`, of the chat template."""
        return stop_ids(self.tokenizer, self._eos, chat=chat)

    def ended(self, sampling: Sampling) -> Callable[[DecodingSequence], bool] | None:
        """Return a function that detects a stop text at the end of a sequence; None without stop texts."""
        if not sampling.stop:
            return None
        # Tokens have at least one byte, with rare exceptions, so this many tokens contain a new stop text.
        tail = 4 * max(len(text) for text in sampling.stop) + 8

        def has_stop_text(sequence: DecodingSequence) -> bool:
            text = self.tokenizer.decode(sequence.tokens[-tail:])
            return any(stop in text for stop in sampling.stop)

        return has_stop_text

    def to_generation(
        self, sequence: DecodingSequence, prompt: Prompt, sampling: Sampling, stops: set[int]
    ) -> Generation:
        """Convert a finished or interrupted sequence to a `Generation`, without a final token of `stops`."""
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if sequence.finish == "stop" and tokens[-1] in stops:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return Generation(
            prompt=prompt,
            text="".join(text_before_stop(stream_text(self.tokenizer, tokens), sampling.stop)),
            token_ids=tuple(tokens),
            num_prompt_tokens=sequence.start,
            stopped=sequence.finish == "stop",
            seconds=sequence.seconds,
            logprobs=tuple(logprobs),
            number=sequence.number,
            finish=sequence.finish,
        )


class PromptBatch:
    """Sequences to decode for many prompts.

    Prompts are texts, or generations of an earlier call, which are continued unless `Generation.has_ended`. With
    `chat`, each prompt is a user message to be answered.

    Raises:
        BadValue: HP102 for prompts with images or audio.
        HyperParallelError: Errors of `TextCodec.begin`.
    """

    def __init__(
        self,
        texts: TextCodec,
        prompts: Sequence[str | Generation],
        sampling: Sampling,
        *,
        chat: bool = False,
    ) -> None:
        self.sampling, self.stops = sampling, texts.stop_token_ids(chat=chat)
        self.ended = texts.ended(sampling)
        self._texts, self._prompts = texts, prompts
        self.sequences = {
            place: texts.begin(source, place, sampling, chat=chat)
            for place, source in enumerate(prompts)
            if not (isinstance(source, Generation) and source.has_ended(sampling))
        }
        """Unfinished sequences by index of their prompt."""
        if any(sequence.media for sequence in self.sequences.values()):
            raise BadValue(
                "prompts with images or audio cannot be batched",
                allowed="one prompt at a time",
                hint="call `Generator.generate(prompt)` for each prompt with images or audio",
            )

    def generations(self) -> list[Generation]:
        """Return the continuation of each prompt so far, in the order of the prompts."""
        generations: list[Generation] = []
        for place, source in enumerate(self._prompts):
            prompt = source.prompt if isinstance(source, Generation) else source
            if (sequence := self.sequences.get(place)) is not None:
                generations.append(self._texts.to_generation(sequence, prompt, self.sampling, self.stops))
            elif isinstance(source, Generation):
                generations.append(source)
        return generations


def draws_of(sampling: Sampling, number: int) -> NDArray[np.float64]:
    """Return [max_new_tokens] random numbers in [0, 1) for the tokens of sequence `number`."""
    return numbers(sampling.seed, _STREAM, number, length=sampling.max_new_tokens)


def stream_text(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of each token; text that ends inside a multi-byte character is delayed until it is complete."""
    pending: list[int] = []
    context: list[int] = []
    for token in tokens:
        pending.append(token)
        # Decoding with preceding tokens preserves spaces that a tokenizer drops at the start of a text.
        before = tokenizer.decode(context)
        text = tokenizer.decode(context + pending)[len(before) :]
        if text and not text.endswith(_REPLACEMENT):
            yield text
            context, pending = pending, []
    if pending:
        yield tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]


def text_before_stop(pieces: Iterable[str], stops: tuple[str, ...]) -> Iterator[str]:
    """Yield a text, given in pieces, up to the first stop text; a stop text may span several pieces."""
    pending, longest = "", max(map(len, stops), default=1) - 1
    for piece in pieces:
        pending += piece
        positions = [start for stop in stops if (start := pending.find(stop)) >= 0]
        if positions:
            yield pending[: min(positions)]
            return
        ready = len(pending) - longest
        if ready > 0:
            yield pending[:ready]
            pending = pending[ready:]
    yield pending
