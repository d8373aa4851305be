"""Environments that completions are said to, and which answer: several turns, tools, games.

A user's class, one object of it for every completion:

    class Guess:
        def __init__(self, prompt: str, answer: str, seed: int): ...
        def step(self, completion: str) -> tuple[str | None, float]: ...

`step` gets what the model has said in a turn, and returns what is said to it in return, as a turn of the user, or None
at the end; and a reward. The rewards of a completion are added; a recipe names them as the reward `environment`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data.chat import render
from hyper_parallel.trainer.data.conversation import Message
from hyper_parallel.trainer.data.span_tokens import ids_behind
from hyper_parallel.trainer.decoding import Running

WHERE = "grpo.environment"
_WORDS, _SAID = "XYZ", "UVW"  # in a conversation that shows what a template writes between turns


class Environments:
    """Those of some completions.

    Args:
        kind: The user's class.
        tokenizer: Of the run.
        prompts: Texts of the prompts, as rewards get them.
        answers: Texts of the answers.
        seeds: A number for each of them that is the same whenever and wherever it is sampled.
    """

    def __init__(
        self,
        kind: Any,
        tokenizer: Any,
        prompts: Sequence[str],
        answers: Sequence[str],
        seeds: Sequence[int],
    ) -> None:
        self._made = [
            kind(prompt=prompt, answer=answer, seed=seed)
            for prompt, answer, seed in zip(prompts, answers, seeds, strict=True)
        ]
        self._tokenizer, self._between = tokenizer, _between_turns(tokenizer)
        self._heard = [0] * len(self._made)  # tokens of the completion before its last turn
        self.rewards = [0.0] * len(self._made)

    def answer(self, sequence: Running) -> list[int]:
        """Tokens that follow a turn that has ended, up to where the model speaks again; none at the end.

        Raises:
            BadValue: HP102 when `step` returns something else.
        """
        row, turn = sequence.number, sequence.tokens[self._heard[sequence.number] :]
        given = self._made[row].step(self._tokenizer.decode(turn, skip_special_tokens=True))
        match given:
            case (str() | None as said, int() | float() as reward) if math.isfinite(reward):
                pass
            case _:
                raise BadValue(
                    "an environment's `step` returns what it says, or None at the end, and a finite reward",
                    where=WHERE,
                    got=repr(given),
                    allowed="(text or None, number)",
                )
        self.rewards[row] += float(reward)
        if said is None:
            return []
        # The token that ended the turn is there already.
        end = self._tokenizer.decode(turn[-1:])
        text = self._between.removeprefix(end).replace(_SAID, said)
        words = ids_behind(self._tokenizer, turn[-1], text, WHERE)
        self._heard[row] = len(sequence.tokens) + len(words)
        return words


def _between_turns(tokenizer: Any) -> str:
    """What the chat template writes from behind the words of the assistant to where it speaks again; `_SAID` within.

    The words of the assistant are the last but one: templates may add a reasoning block to its last turn only.
    """
    conversation: list[Message] = [
        {"role": "user", "content": _WORDS},
        {"role": "assistant", "content": _WORDS},
        {"role": "user", "content": _SAID},
    ]
    return render(tokenizer, conversation, prompt=True, where=WHERE).rpartition(_WORDS)[2]
