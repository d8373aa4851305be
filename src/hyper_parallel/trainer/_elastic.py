"""Changes of a recipe's ranks: to another number, or to the planner's split into training and sampling ranks."""

from __future__ import annotations

import math
from dataclasses import replace

from hyper_parallel.config import DEGREES, LoadedRecipe, Parallel
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe


def replan_for_ranks(loaded: LoadedRecipe, ranks: int) -> LoadedRecipe:
    """Return the recipe with `parallel: auto` for `ranks` ranks, to be planned again.

    Section `parallel` keeps only its sharding rules. `training.tokens_per_step` is kept. The size and the number of
    microbatches, and `recompute_layers`, are derived again.
    """
    recipe, derived = loaded.recipe, f"derived: planned anew for {ranks} ranks"
    rules = {"rules": recipe.parallel.rules} if recipe.parallel.rules else {}
    numbers = {"microbatch": None, "accumulation_steps": None, "recompute_layers": None}
    update = {
        "parallel": Parallel(auto=True, world_size=ranks, **rules),
        "training": recipe.training.model_copy(update=numbers),
    }
    origins = {
        **{k: v for k, v in loaded.origins.items() if not k.startswith("parallel.")},
        **dict.fromkeys(("parallel.auto", "parallel.world_size"), derived),
    }
    return replace(loaded, recipe=recipe.model_copy(update=update), origins=origins)


def num_ranks(parallel: Parallel) -> int:
    """Return the number of ranks of the language model that the degrees of section `parallel` imply."""
    return math.prod(getattr(parallel, axis) for axis in DEGREES if axis != "ep")


def replan_for_launched(loaded: LoadedRecipe, launched: int | None) -> LoadedRecipe:
    """Return the recipe with `parallel: auto` for the number of ranks that torchrun has launched.

    Return the recipe unchanged without `training.elastic`, if `launched` is None, or if the recipe's own number of
    ranks is `launched` or not set.
    """
    parallel = loaded.recipe.parallel
    planned = parallel.world_size if parallel.auto else num_ranks(parallel)
    if not loaded.recipe.training.elastic or launched is None or planned in (None, launched):
        return loaded
    return replan_for_ranks(loaded, launched)


def with_planned_roles(loaded: LoadedRecipe, plan: Plan) -> LoadedRecipe:
    """Return the recipe with the plan's `grpo.rollout_ranks` and `grpo.rollout_tp` if either is `auto`.

    `parallel.world_size` becomes the number of training ranks. If the plan has no sampling ranks, the options that
    require sampling ranks (staleness, partial rollouts, reference role, effective samples) are reset.
    """
    grpo, roles = loaded.recipe.grpo, plan.roles
    if "auto" not in (grpo.rollout_ranks, grpo.rollout_tp):
        return loaded
    chosen = (0, 1) if roles is None else (roles.rollout_ranks, roles.rollout_tp)
    update: dict[str, object] = dict(zip(("rollout_ranks", "rollout_tp"), chosen, strict=True))
    if not chosen[0]:
        update |= {"max_staleness": 0, "partial_rollout": False, "reference_role": "learner"}
        update |= {"min_effective_samples": None}
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
    """Return the recipe with `parallel: auto` for the largest number of ranks, at most `most`, that has a plan.

    Raises:
        HyperParallelError: Error of planning for one rank, if planning fails for every number of ranks.
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
