"""Derivation of recipe values from other values. Functions enter the origins of derived values into `origins`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hyper_parallel.config._preference_sections import PAIRED_STAGES, PREFERENCE_STAGES
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.errors import Contradiction


def with_values(recipe: Recipe, section: str, values: Mapping[str, object]) -> Recipe:
    """Return a copy of a recipe with `values` in one section (empty: at the top level), without validation."""
    if not section:
        return recipe.model_copy(update=dict(values))
    changed = getattr(recipe, section).model_copy(update=dict(values))
    return recipe.model_copy(update={section: changed})


def derive_warmup(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Return the recipe with `warmup_steps` computed from `warmup_ratio`, if the ratio is set.

    Without a ratio, a default warm-up that is longer than the run becomes a tenth of the run, rounded down.

    Raises:
        Contradiction: HP104 if the recipe sets `warmup_ratio`, and `warmup_steps` to a number other than 0.
    """
    training = recipe.training
    if training.warmup_ratio is not None:
        origin = origins.get("training.warmup_steps", "default")
        if training.warmup_steps and not origin.startswith(("default", "derived")):
            raise Contradiction(
                "warmup_steps and warmup_ratio both set the length of the warm-up",
                where=f"training.warmup_ratio (training.warmup_steps: set by {origin})",
                got=f"warmup_steps={training.warmup_steps}, warmup_ratio={training.warmup_ratio:g}",
                hint="set `training.warmup_ratio=null`, or leave out `training.warmup_steps`",
            )
        origins["training.warmup_steps"] = "derived: training.warmup_ratio of training.steps"
        warmup = {"warmup_steps": math.ceil(training.warmup_ratio * training.steps)}
        return with_values(recipe, "training", warmup)
    if "warmup_steps" in training.model_fields_set or training.warmup_steps <= training.steps:
        return recipe
    origins["training.warmup_steps"] = (
        f"derived: a tenth of training.steps, because the default is {training.warmup_steps}"
    )
    return with_values(recipe, "training", {"warmup_steps": training.steps // 10})


def _launched_ranks(recipe: Recipe) -> int | None:
    launch = recipe.launch
    if not recipe.parallel.is_planned or launch.nproc_per_node is None:
        return None
    return launch.nnodes * launch.nproc_per_node


def _rows_of_pairs(recipe: Recipe) -> int | None:
    training = recipe.training
    is_derived = training.tokens_per_step is not None and training.accumulation_steps is not None
    return 2 if recipe.stage in PAIRED_STAGES and not is_derived else None


_UNSET_KEYS: Final[Sequence[tuple[str, Callable[[Recipe], object], str]]] = (
    (
        "training.min_lr_ratio",
        lambda r: 0.0 if r.training.lr_schedule == "warmup_stable_decay" else None,
        "training.lr_schedule=warmup_stable_decay",
    ),
    (
        "data.holdout",
        lambda r: 0.0 if r.data.validation or r.data.streaming else None,
        "data.validation or data.streaming",
    ),
    ("parallel.world_size", _launched_ranks, "launch.nnodes x launch.nproc_per_node"),
    ("data.packing", lambda r: False if r.stage in PREFERENCE_STAGES else None, "stage={stage}"),
    ("training.microbatch", _rows_of_pairs, "stage={stage}, both rows of a pair"),
)
"""Keys that are derived if a recipe does not set them: value (None: not derived), and reason for the origins."""


def derive_unset(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Return the recipe with derived values for the keys of `_UNSET_KEYS` that are missing or null."""
    for key, derive, reason in _UNSET_KEYS:
        section, _, name = key.partition(".")
        values = getattr(recipe, section)
        is_set = name in values.model_fields_set and getattr(values, name) is not None
        if not is_set and (value := derive(recipe)) is not None:
            origins[key] = f"derived: {reason.format(stage=recipe.stage)}"
            recipe = with_values(recipe, section, {name: value})
    return recipe


def derive_submodels(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Return the recipe with the degrees of `parallel.submodels.language` copied to the unset degrees of `parallel`.

    The recipe is unchanged without submodels, or if the planner chooses them.
    """
    parallel = recipe.parallel
    if parallel.submodels is None or parallel.submodels.auto:
        return recipe
    degrees = parallel.submodels.language.model_dump(exclude={"ranks"})
    update = {name: d for name, d in degrees.items() if name not in parallel.model_fields_set}
    origins |= dict.fromkeys((f"parallel.{name}" for name in update), "derived: parallel.submodels.language")
    return with_values(recipe, "parallel", update)
