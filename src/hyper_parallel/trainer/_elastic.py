"""A recipe on other ranks: planned anew with the same tokens of a step, or as the planner splits them in roles."""

from __future__ import annotations

import math
from dataclasses import replace

from hyper_parallel.config import DEGREES, LoadedRecipe, Parallel
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.model import ModelSpec
from hyper_parallel.planner import plan_recipe


def on_ranks(loaded: LoadedRecipe, ranks: int) -> LoadedRecipe:
    """The recipe with `parallel: auto` for so many ranks; of its choices of layout only the rules are left.

    Args:
        loaded: A recipe with `training.tokens_per_step`, which stays; microbatches are derived.
        ranks: Their number.
    """
    recipe, derived = loaded.recipe, f"derived: planned anew for {ranks} ranks"
    given = {"rules": recipe.parallel.rules} if recipe.parallel.rules else {}
    numbers = {"microbatch": None, "accumulation_steps": None, "recompute_layers": None}
    update = {
        "parallel": Parallel(auto=True, world_size=ranks, **given),
        "training": recipe.training.model_copy(update=numbers),
    }
    origins = {
        **{
            key: origin for key, origin in loaded.origins.items() if not key.startswith("parallel.")
        },
        **dict.fromkeys(("parallel.auto", "parallel.world_size"), derived),
    }
    return replace(loaded, recipe=recipe.model_copy(update=update), origins=origins)


def on_started(loaded: LoadedRecipe, started: int | None) -> LoadedRecipe:
    """The recipe for the ranks that another launcher has started, where it is elastic and for another number."""
    parallel = loaded.recipe.parallel
    wanted = parallel.world_size
    if not parallel.auto:
        wanted = math.prod(getattr(parallel, axis) for axis in DEGREES if axis != "ep")
    if not loaded.recipe.training.elastic or None in (started, wanted) or started == wanted:
        return loaded
    return on_ranks(loaded, started or 1)


def with_roles(loaded: LoadedRecipe, plan: Plan) -> LoadedRecipe:
    """The recipe with the numbers that a plan has for `grpo.rollout_ranks: auto` and `grpo.rollout_tp: auto`.

    Its ranks are then those that train; where none only samples, nothing runs ahead.
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


def on_at_most(loaded: LoadedRecipe, most: int, spec: ModelSpec | None = None) -> LoadedRecipe:
    """The recipe on the largest number of ranks, `most` or fewer, that it can be planned for.

    Args:
        loaded: The recipe.
        most: Ranks that there are.
        spec: Its model, where it has been read already.

    Raises:
        HyperParallelError: What planning for one rank raises.
    """
    for ranks in range(most, 0, -1):
        found = on_ranks(loaded, ranks)
        try:
            plan_recipe(found.recipe, ranks, found.where, spec)
        except HyperParallelError:
            if ranks == 1:
                raise
            continue
        break
    return found
