"""Rewards of completions: functions of texts, those below by name, a user's own by its dotted path.

A function is called with keywords, each a list with one item for every completion, and returns as many numbers: the
form of TRL's reward functions (`GRPOTrainer`, `reward_funcs`). The keywords are `prompts`, `completions` and
`completion_ids`, and the columns of the data; a function gets those that it names, or all where it has `**kwargs`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue, Contradiction, HyperParallelError
from hyper_parallel.trainer.stages.model_reward import ModelReward
from hyper_parallel.trainer.user_code import load_function

Reward = Callable[..., Sequence[float]]


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a completion that is the answer, white space around both aside; else 0."""
    return [float(c.strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


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

    return [share(c.strip(), str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def of_environment(environment_rewards: Sequence[float], **_: Any) -> list[float]:
    """What the environment of a completion gave."""
    return [*environment_rewards]


_GIVEN: Final = ("prompts", "completions", "completion_ids")
"""Keywords of every rollout."""
_OWN: Final = ("rows", "stopped", "environment_rewards", "microbatch", "device")
"""Keywords of functions of this project beside those."""
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


def check_columns(name: str, function: Reward, columns: Sequence[str], where: str) -> None:
    """Refuse a function with a parameter that nothing gives.

    Args:
        name: Of the function.
        function: One of `reward_functions`.
        columns: Names of the columns of the data.
        where: Origin of the name, for errors.

    Raises:
        Contradiction: HP104.
    """
    known = {*_GIVEN, *columns, *(_OWN if _is_own(function) else ())}
    missing = [p.name for p in _parameters(function) if _required(p) and p.name not in known]
    if missing:
        raise Contradiction(
            f"the reward function `{name}` wants a column that the data does not have",
            where=where,
            got=", ".join(missing),
            allowed=[*_GIVEN, *columns],
            hint="give the records such a key, or the parameter a default",
        )


def score(name: str, function: Reward, given: dict[str, Any], own: dict[str, Any]) -> list[float]:
    """Return the rewards of one function, checked.

    Args:
        name: Of the function.
        function: One of `reward_functions`.
        given: Keywords that any function may get: those of rollouts, and the columns of the data.
        own: Keywords of functions of this project beside these.

    Raises:
        BadValue: HP102 when it fails, or returns something else than a finite number for every completion.
    """
    parameters = _parameters(function)
    keywords = {**given, **(own if _is_own(function) else {})}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
    where, wanted = f"grpo.reward_funcs: {name}", len(given["completions"])
    if not wanted:  # a rank without held-out prompts
        return []
    try:
        rewards = list(function(**keywords))
    except HyperParallelError:
        raise
    except Exception as error:  # a function of the user's does anything
        raise BadValue(
            "a reward function failed",
            where=where,
            got=f"{type(error).__name__}: {error}",
            allowed="one number for every completion; completions are texts",
        ) from error
    if len(rewards) != wanted or not all(isinstance(r, Real) and math.isfinite(r) for r in rewards):
        raise BadValue(
            "a reward function returns one finite number for every completion",
            where=where,
            got=f"{len(rewards)} values, {rewards[:3]}",
            allowed=f"{wanted} numbers",
        )
    return [float(r) for r in rewards]


def _is_own(function: Reward) -> bool:
    """Whether a reward is one of this project's, which get more keywords."""
    return isinstance(function, ModelReward) or function in REWARDS.values()


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _parameters(function: Reward) -> list[inspect.Parameter]:
    """Return the parameters of a function; those of `**kwargs` where it does not tell them."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # written in C
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
