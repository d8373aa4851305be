"""User-defined environments that reply to completions, for example in multi-turn conversations, tool use and games.

The user's class has one instance per completion:

  class Guess:
    def __init__(self, prompt: str, answer: str, seed: int): ...
    def step(self, completion: str) -> tuple[str | None, float]: ...

`step` receives the text of one model turn. It returns the reply and a reward. The reply becomes the next user turn;
None ends the conversation. The reward function `environment` returns the sum of the rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import BadValue, HyperParallelError
from hyper_parallel.trainer.data.answer_spans import render
from hyper_parallel.trainer.data.document import Message
from hyper_parallel.trainer.data.span_tokens import ids_behind
from hyper_parallel.trainer.decoding import DecodingSequence

WHERE = "grpo.environment"
_WORDS, _REPLY = "XYZ", "UVW"
"""Placeholder texts of turns in a conversation that is rendered to find the template's text between turns."""


class Environments:
    """Environments of a list of completions, one instance per completion.

    Args:
        kind: User's environment class.
        tokenizer: Tokenizer of the run.
        prompts: Text of each prompt.
        answers: Text of each reference answer.
        seeds: Seed of each environment.

    Raises:
        BadValue: HP102 when the class raises.

    Attributes:
        rewards: For each environment, the sum of the rewards that it has returned.
    """

    def __init__(
        self,
        kind: Any,
        tokenizer: Any,
        prompts: Sequence[str],
        answers: Sequence[str],
        seeds: Sequence[int],
    ) -> None:
        self._environments = [
            _call(kind, prompt=prompt, answer=answer, seed=seed)
            for prompt, answer, seed in zip(prompts, answers, seeds, strict=True)
        ]
        self._tokenizer, self._between = tokenizer, _between_turns(tokenizer)
        # Length of the completion before its last turn, in tokens.
        self._turn_starts = [0] * len(self._environments)
        self.rewards = [0.0] * len(self._environments)

    def answer(self, sequence: DecodingSequence) -> list[int]:
        """Pass a finished model turn to its environment; return the tokens of the user turn with the reply.

        The list ends where the model's next turn begins. It is empty if the environment ends the conversation.

        Raises:
            BadValue: HP102 when `step` raises, or does not return (text or None, finite number).
        """
        row, turn = sequence.number, sequence.tokens[self._turn_starts[sequence.number] :]
        outcome = _call(self._environments[row].step, self._tokenizer.decode(turn, skip_special_tokens=True))
        match outcome:
            case (str() | None as reply, int() | float() as reward) if math.isfinite(reward):
                self.rewards[row] += float(reward)
            case _:
                raise BadValue(
                    "an environment's `step` must return a reply (None at the end) and a finite reward",
                    where=WHERE,
                    got=repr(outcome),
                    allowed="(text or None, number)",
                    hint="return None, 1.0",
                )
        if reply is None:
            return []
        # The sequence already has the token that ended the turn.
        end = self._tokenizer.decode(turn[-1:])
        text = self._between.removeprefix(end).replace(_REPLY, reply)
        tokens = ids_behind(self._tokenizer, turn[-1], text, WHERE)
        self._turn_starts[row] = len(sequence.tokens) + len(tokens)
        return tokens


def _call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return function(*args, **keywords)
    except HyperParallelError:
        raise
    except Exception as error:  # user code may raise any exception
        got = f"{type(error).__name__}: {error}"
        raise BadValue("an environment raised an exception", where=WHERE, got=got) from error


def _between_turns(tokenizer: Any) -> str:
    """Return the chat template's text between two assistant turns, with the placeholder `_REPLY` as user turn.

    Chat templates may render the last assistant turn differently, so the rendered conversation ends with a user turn.
    """
    conversation: list[Message] = [
        {"role": "user", "content": _WORDS},
        {"role": "assistant", "content": _WORDS},
        {"role": "user", "content": _REPLY},
    ]
    return render(tokenizer, conversation, prompt=True, where=WHERE).rpartition(_WORDS)[2]
