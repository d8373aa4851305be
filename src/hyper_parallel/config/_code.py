"""Keys of a recipe that name Python code: the list behind `--no-code` and docs/how-to/trust_a_downloaded_model.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hyper_parallel.config._load_recipe import LoadedRecipe
from hyper_parallel.config._whole_recipe import Recipe
from hyper_parallel.errors import CodeRefused, abbreviated

KNOWN_REWARDS = ("exact_match", "prefix_match", "environment")
"""Rewards that need no path."""


def named_code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe that name code which a run imports, each with the value."""
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
    """Refuse a recipe that names code, before any of it is imported.

    Raises:
        CodeRefused: HP110 with the first key; the others are listed.
    """
    found = list(named_code(loaded.recipe))
    if not found:
        return
    key, value = found[0]
    raise CodeRefused(
        "the recipe names Python code, and --no-code refuses it",
        where=loaded.where(key),
        got=f"{key}: {value}",
        allowed="values that name no code",
        hint=f"remove `{key}`, or leave out --no-code once you have read that code",
        others=[f"{key}: {abbreviated(value)}" for key, value in found[1:]],
    )
