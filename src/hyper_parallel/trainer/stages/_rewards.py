"""Rewards of completions: functions of texts, those below by name, a user's own by its dotted path.

A function is called as `function(prompts=..., completions=..., answer=...)` with three lists of texts of one length and
returns as many numbers: the form of TRL's reward functions (`GRPOTrainer`, `reward_funcs`), so that one serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer._user_code import load_function
from hyper_parallel.trainer.stages._model_reward import ModelReward

Reward = Callable[..., Sequence[float]]


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a completion that is the answer, white space around both aside; else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def prefix_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of characters up to the first wrong one, of the longer of completion and answer: 1 for the answer itself.

    Graded, so that a model that has no right completion yet is told which are nearer.
    """

    def share(completion: str, right: str) -> float:
        longest = max(len(completion), len(right))
        pairs = zip(completion, right, strict=False)
        equal = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(completion), len(right))
        )
        return equal / longest if longest else 1.0

    return [share(c.strip(), a.strip()) for c, a in zip(completions, answer, strict=True)]


def of_environment(environment_rewards: Sequence[float], **_: Any) -> list[float]:
    """What the environment of a completion gave."""
    return [*environment_rewards]


REWARDS: Final[dict[str, Reward]] = {
    "exact_match": exact_match,
    "prefix_match": prefix_match,
    "environment": of_environment,
}


def reward_functions(names: Sequence[str], where: str) -> list[Reward]:
    """The functions of a recipe.

    Args:
        names: Names of this file, dotted paths, or directories of reward models.
        where: Origin of the names, for errors.

    Raises:
        NotImportable: HP109 when there is no such function.
    """
    return [
        ModelReward(Path(name).expanduser())
        if Path(name).expanduser().is_dir()
        else REWARDS.get(name) or load_function(name, where, tuple(REWARDS))
        for name in names
    ]


def short_name(name: str) -> str:
    """Last part of the name of a reward, for records."""
    return name.rstrip("/").rpartition("/")[2].rpartition(".")[2]


def score(name: str, function: Reward, texts: dict[str, Any], more: dict[str, Any]) -> list[float]:
    """Rewards of one function, checked.

    Args:
        name: Of the function.
        function: One of `reward_functions`.
        texts: What every function gets.
        more: What those of this project get beside.

    Raises:
        BadValue: HP102 when it returns something else than a finite number for every completion.
    """
    own = isinstance(function, ModelReward) or function in REWARDS.values()
    given = list(function(**texts, **(more if own else {})))
    wanted = len(texts["completions"])
    if len(given) != wanted or not all(
        isinstance(r, int | float) and math.isfinite(r) for r in given
    ):
        raise BadValue(
            "a reward function returns one finite number for every completion",
            where=f"grpo.reward_funcs: {name}",
            got=f"{len(given)} values, {given[:3]}",
            allowed=f"{wanted} numbers",
        )
    return [float(r) for r in given]
