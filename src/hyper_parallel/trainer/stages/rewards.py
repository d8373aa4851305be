"""Reward functions of completions: built-in functions by name, user functions by dotted path.

The interface is that of TRL's reward functions (`GRPOTrainer`, `reward_funcs`). A function gets keyword arguments, each
a list with one item per completion, and returns one number per completion. The keywords are `prompts`, `completions`,
`completion_ids` and the columns of the data. A function gets only the keywords in its signature, or all with
`**kwargs`.
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
    """Return, per completion, 1 if it equals the answer up to surrounding white space, else 0."""
    return [float(c.strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def prefix_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return, per completion, the length of its common prefix with the answer, divided by the longer of the two texts.

    An exact match gives 1. Unlike `exact_match`, wrong completions differ in reward, so GRPO can learn from groups
    without a correct completion.
    """

    def share(completion: str, right: str) -> float:
        longest = max(len(completion), len(right))
        pairs = zip(completion, right, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(completion), len(right)))
        return equal / longest if longest else 1.0

    return [share(c.strip(), str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def environment_reward(environment_rewards: Sequence[float], **_: Any) -> list[float]:
    """Return, per completion, the sum of the rewards that its environment returned."""
    return [*environment_rewards]


_ROLLOUT_KEYWORDS: Final = ("prompts", "completions", "completion_ids")
"""Keywords that every function may have, in addition to the columns of the data."""
_INTERNAL_KEYWORDS: Final = ("rows", "stopped", "environment_rewards", "microbatch", "device")
"""Additional keywords that built-in functions may have."""
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
REWARDS: Final[dict[str, Reward]] = {
    "exact_match": exact_match,
    "prefix_match": prefix_match,
    "environment": environment_reward,
}


def reward_functions(names: Sequence[str], where: str) -> list[Reward]:
    """Load the reward functions that `grpo.reward_funcs` names.

    Args:
        names: Names of built-in functions, dotted paths, or directories of reward models.
        where: Recipe key of the names, for error messages.

    Raises:
        NotImportable: HP109 for a name that is neither a built-in function, a directory, nor an importable function.
    """
    return [
        ModelReward(Path(name).expanduser())
        if Path(name).expanduser().is_dir()
        else REWARDS.get(name) or load_function(name, where, tuple(REWARDS))
        for name in names
    ]


def check_columns(name: str, function: Reward, columns: Sequence[str], where: str) -> None:
    """Check that every required parameter of a reward function is a rollout keyword or a column of the data.

    Raises:
        Contradiction: HP104 naming the parameters.
    """
    known = {*_ROLLOUT_KEYWORDS, *columns, *(_INTERNAL_KEYWORDS if _is_built_in(function) else ())}
    missing = [
        p.name
        for p in _parameters(function)
        if p.default is p.empty and p.kind not in _VARIADIC and p.name not in known
    ]
    if missing:
        raise Contradiction(
            f"the reward function `{name}` needs a column that the data does not have",
            where=where,
            got=", ".join(missing),
            allowed=[*_ROLLOUT_KEYWORDS, *columns],
            hint=f"add the key `{missing[0]}` to every record"
            + ("" if _is_built_in(function) else ", or a default value to the parameter"),
        )


def score(name: str, function: Reward, public: dict[str, Any], internal: dict[str, Any]) -> list[float]:
    """Call a reward function; return one finite reward per completion, [] without completions.

    `public` are the rollout keywords and columns of the data; `internal` are further keywords for built-in functions.

    Raises:
        BadValue: HP102 when the function raises, or does not return one finite number per completion.
    """
    parameters = _parameters(function)
    keywords = {**public, **(internal if _is_built_in(function) else {})}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
    where, num_completions = f"grpo.reward_funcs: {name}", len(public["completions"])
    if not num_completions:  # a rank without held-out prompts
        return []
    try:
        rewards = list(function(**keywords))
    except HyperParallelError:
        raise
    except Exception as error:  # a user function may raise any exception
        raise BadValue(
            "a reward function raised an exception",
            where=where,
            got=f"{type(error).__name__}: {error}",
            allowed="one number for every completion; completions are texts",
        ) from error
    if len(rewards) != num_completions or not all(isinstance(r, Real) and math.isfinite(r) for r in rewards):
        raise BadValue(
            "a reward function must return one finite number for every completion",
            where=where,
            got=f"{len(rewards)} values, {rewards[:3]}",
            allowed=f"{num_completions} numbers",
            hint="return [float(len(text)) for text in completions]",
        )
    return [float(r) for r in rewards]


def _is_built_in(function: Reward) -> bool:
    return isinstance(function, ModelReward) or function in REWARDS.values()


def _parameters(function: Reward) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # implemented in C
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
