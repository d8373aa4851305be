"""Recipe keys that name Python code: the list behind `--no-code` and docs/how-to/trust_a_downloaded_model.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hyper_parallel.config._load_recipe import LoadedRecipe
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.errors import CodeRefused, abbreviated

KNOWN_REWARDS = ("exact_match", "prefix_match", "environment")
"""Built-in rewards, named without a path."""


def named_code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield each recipe key that makes a run import named code, with its value."""
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "true"
    if "." in recipe.training.optimizer:
        yield "training.optimizer", recipe.training.optimizer
    for path in recipe.training.callbacks:
        yield "training.callbacks", path
    if recipe.grpo.environment is not None:
        yield "grpo.environment", recipe.grpo.environment
    for name in recipe.grpo.reward_funcs:
        if name not in KNOWN_REWARDS and not os.path.isdir(os.path.expanduser(name)):  # noqa: PTH111, PTH112
            yield "grpo.reward_funcs", name


def refuse_code(loaded: LoadedRecipe) -> None:
    """Raise an error if a recipe names code; nothing is imported first.

    Raises:
        CodeRefused: HP110 for the first key; the other keys are listed.
    """
    keys = list(named_code(loaded.recipe))
    if not keys:
        return
    key, value = keys[0]
    raise CodeRefused(
        "the recipe names Python code, which --no-code forbids",
        where=loaded.where(key),
        got=f"{key}: {value}",
        allowed="values that name no code",
        hint=f"remove `{key}`, or leave out --no-code once you have read that code",
        others=[f"{key}: {abbreviated(value)}" for key, value in keys[1:]],
    )
