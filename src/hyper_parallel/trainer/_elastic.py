"""Replanning of a recipe for other rank counts with the same tokens per step, or with the planner's roles."""

from __future__ import annotations

import math
from dataclasses import replace

from hyper_parallel.config import DEGREES, LoadedRecipe, Parallel
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe


def replan_for_ranks(loaded: LoadedRecipe, ranks: int) -> LoadedRecipe:
    """Return the recipe with `parallel: auto` for a number of ranks; of its layout only the rules are kept.

    Args:
        loaded: Recipe with `training.tokens_per_step`, which is kept; microbatches are derived.
        ranks: Number of ranks.
    """
    recipe, derived = loaded.recipe, f"derived: planned anew for {ranks} ranks"
    rules = {"rules": recipe.parallel.rules} if recipe.parallel.rules else {}
    numbers = {"microbatch": None, "accumulation_steps": None, "recompute_layers": None}
    update = {
        "parallel": Parallel(auto=True, world_size=ranks, **rules),
        "training": recipe.training.model_copy(update=numbers),
    }
    origins = {
        **{
            key: origin for key, origin in loaded.origins.items() if not key.startswith("parallel.")
        },
        **dict.fromkeys(("parallel.auto", "parallel.world_size"), derived),
    }
    return replace(loaded, recipe=recipe.model_copy(update=update), origins=origins)


def replan_for_launched(loaded: LoadedRecipe, launched: int | None) -> LoadedRecipe:
    """Return the recipe for the ranks started by another launcher, if it is elastic and planned for another number."""
    parallel = loaded.recipe.parallel
    planned = parallel.world_size
    if not parallel.auto:
        planned = math.prod(getattr(parallel, axis) for axis in DEGREES if axis != "ep")
    if not loaded.recipe.training.elastic or None in (launched, planned) or launched == planned:
        return loaded
    return replan_for_ranks(loaded, launched or 1)


def with_planned_roles(loaded: LoadedRecipe, plan: Plan) -> LoadedRecipe:
    """Return the recipe with the plan's numbers for `grpo.rollout_ranks: auto` and `grpo.rollout_tp: auto`.

    The recipe's ranks are then the training ranks; without sampling ranks, no rollout is stale.
    """
    grpo, roles = loaded.recipe.grpo, plan.roles
    if "auto" not in (grpo.rollout_ranks, grpo.rollout_tp):
        return loaded
    chosen = (0, 1) if roles is None else (roles.rollout_ranks, roles.rollout_tp)
    update: dict[str, object] = dict(zip(("rollout_ranks", "rollout_tp"), chosen, strict=True))
    if not chosen[0]:
        update |= {"max_staleness": 0, "partial_rollout": False, "reference_role": "learner"}
    world = {"world_size": plan.strategy.world_size}
    sections = {
        "grpo": grpo.model_copy(update=update),
        "parallel": loaded.recipe.parallel.model_copy(update=world),
    }
    keys = ("parallel.world_size", *(f"grpo.{key}" for key in update))
    derived = dict.fromkeys(keys, "derived: how the planner splits the ranks")
    origins = {**loaded.origins, **derived}
    return replace(loaded, recipe=loaded.recipe.model_copy(update=sections), origins=origins)


def replan_up_to(loaded: LoadedRecipe, most: int) -> LoadedRecipe:
    """Return the recipe for the largest number of ranks, up to `most`, that can be planned.

    Args:
        loaded: The recipe.
        most: Maximum number of ranks.

    Raises:
        HyperParallelError: Errors of planning for one rank.
    """
    for ranks in range(most, 0, -1):
        replanned = replan_for_ranks(loaded, ranks)
        try:
            plan_recipe(replanned.recipe, ranks, replanned.where)
        except HyperParallelError:
            if ranks == 1:
                raise
            continue
        break
    return replanned
