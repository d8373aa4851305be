"""Derivation of recipe values from other values; each derivation is recorded in the origins."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hyper_parallel.config._preference_sections import PAIRED_STAGES, PREFERENCE_STAGES
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.errors import Contradiction


def with_values(recipe: Recipe, section: str, values: Mapping[str, object]) -> Recipe:
    """Return a copy of a recipe with values of one section replaced, without validation."""
    changed = getattr(recipe, section).model_copy(update=dict(values))
    return recipe.model_copy(update={section: changed})


def derive_warmup(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Derive warm-up steps from `warmup_ratio`, or drop the default warm-up of a very short run.

    Raises:
        Contradiction: HP104 if the recipe also gives a number of steps.
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


def derive_end(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Set the final learning rate of `warmup_stable_decay` to 0 by default, as in transformers."""
    training = recipe.training
    if training.lr_schedule != "warmup_stable_decay" or "min_lr_ratio" in training.model_fields_set:
        return recipe
    origins["training.min_lr_ratio"] = "derived: training.lr_schedule=warmup_stable_decay"
    return with_values(recipe, "training", {"min_lr_ratio": 0.0})


def derive_preference_stages(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Set defaults of preference stages: `packing: false`, and a microbatch of 2 for the two answers of a pair."""
    data, training = recipe.data, recipe.training
    if (
        recipe.stage in PREFERENCE_STAGES
        and "packing" not in data.model_fields_set
        and data.packing
    ):
        origins["data.packing"] = f"derived: stage={recipe.stage}"
        recipe = with_values(recipe, "data", {"packing": False})
    is_derived = training.tokens_per_step is not None and training.accumulation_steps is not None
    if recipe.stage in PAIRED_STAGES and training.microbatch is None and not is_derived:
        origins["training.microbatch"] = f"derived: stage={recipe.stage}, both rows of a pair"
        recipe = with_values(recipe, "training", {"microbatch": 2})
    return recipe


def derive_holdout(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Set the holdout to 0 by default when `data.validation` or `data.streaming` is given."""
    data = recipe.data
    if "holdout" in data.model_fields_set or not (data.validation or data.streaming):
        return recipe
    origins["data.holdout"] = "derived: data.validation or data.streaming"
    return with_values(recipe, "data", {"holdout": 0.0})


def derive_submodels(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Copy the degrees of `parallel.submodels.language` to the keys of `parallel` that the recipe does not set."""
    parallel = recipe.parallel
    if parallel.submodels is None or parallel.submodels.auto:
        return recipe
    degrees = parallel.submodels.language.model_dump(exclude={"ranks"})
    update = {name: d for name, d in degrees.items() if name not in parallel.model_fields_set}
    origins |= dict.fromkeys(
        (f"parallel.{name}" for name in update), "derived: parallel.submodels.language"
    )
    return with_values(recipe, "parallel", update)


def derive_ranks(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Set `parallel.world_size` to the number of ranks that `launch` starts, if the planner chooses the degrees."""
    parallel, launch = recipe.parallel, recipe.launch
    if not parallel.is_planned or parallel.world_size or launch.nproc_per_node is None:
        return recipe
    origins["parallel.world_size"] = "derived: launch.nnodes x launch.nproc_per_node"
    update = {"world_size": launch.nnodes * launch.nproc_per_node}
    return with_values(recipe, "parallel", update)
