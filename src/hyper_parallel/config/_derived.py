"""Values of a recipe that are derived from others; each notes what it came from."""

from __future__ import annotations

import math

from hyper_parallel.config._comparisons import COMPARED, PAIRED
from hyper_parallel.config._whole_recipe import Recipe


def derive_warmup(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Shorten the default warm-up of a very short run; a warm-up that was given is never changed."""
    training = recipe.training
    if training.warmup_ratio is not None:
        origins["training.warmup_steps"] = "derived: training.warmup_ratio of training.steps"
        warmup = {"warmup_steps": math.ceil(training.warmup_ratio * training.steps)}
        return recipe.model_copy(update={"training": training.model_copy(update=warmup)})
    if "warmup_steps" in training.model_fields_set or training.warmup_steps <= training.steps:
        return recipe
    origins["training.warmup_steps"] = (
        f"derived: a tenth of training.steps, because the default is {training.warmup_steps}"
    )
    shorter = training.model_copy(update={"warmup_steps": training.steps // 10})
    return recipe.model_copy(update={"training": shorter})


def derive_end(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Let `warmup_stable_decay` end at a rate of 0 by default, as in transformers."""
    training = recipe.training
    if training.lr_schedule != "warmup_stable_decay" or "min_lr_ratio" in training.model_fields_set:
        return recipe
    origins["training.min_lr_ratio"] = "derived: training.lr_schedule=warmup_stable_decay"
    at_zero = training.model_copy(update={"min_lr_ratio": 0.0})
    return recipe.model_copy(update={"training": at_zero})


def derive_compared(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Give stages that compare answers one conversation in a sequence, and both answers of a pair in a microbatch."""
    data, training = recipe.data, recipe.training
    if recipe.stage in COMPARED and "packing" not in data.model_fields_set and data.packing:
        origins["data.packing"] = f"derived: stage={recipe.stage}"
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"packing": False})})
    is_derived = training.tokens_per_step is not None and training.accumulation_steps is not None
    if recipe.stage in PAIRED and training.microbatch is None and not is_derived:
        origins["training.microbatch"] = f"derived: stage={recipe.stage}, both rows of a pair"
        pair = training.model_copy(update={"microbatch": 2})
        recipe = recipe.model_copy(update={"training": pair})
    return recipe


def derive_holdout(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Hold nothing out by default where validation data is given, or of a stream."""
    data = recipe.data
    if "holdout" in data.model_fields_set or not (data.validation or data.streaming):
        return recipe
    origins["data.holdout"] = "derived: data.validation or data.streaming"
    return recipe.model_copy(update={"data": data.model_copy(update={"holdout": 0.0})})


def derive_ranks(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Plan for all ranks of the machines, where the planner chooses the degrees."""
    parallel, launch = recipe.parallel, recipe.launch
    if not parallel.auto or parallel.world_size or launch.nproc_per_node is None:
        return recipe
    origins["parallel.world_size"] = "derived: launch.nnodes x launch.nproc_per_node"
    update = {"world_size": launch.nnodes * launch.nproc_per_node}
    return recipe.model_copy(update={"parallel": parallel.model_copy(update=update)})
