"""Sub-models of a recipe: layouts of the language part and of the encoder, and checks before ranks start."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hyper_parallel.config import LoadedRecipe, Recipe
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.runtime import submodel_strategies
from hyper_parallel.trainer.engine.optimizer import check_optimizer


def submodel_layouts(recipe: Recipe, plan: Plan) -> dict[str, Strategy]:
    """Return the strategy of each sub-model of a recipe, the language part first.

    Args:
        recipe: Recipe with `parallel.submodels`.
        plan: Plan of the run, with the strategy of the language part.
    """
    assert recipe.parallel.submodels is not None
    towers = {
        name: Strategy(
            dp_replicate=degrees.dp_replicate,
            dp_shard=degrees.dp_shard,
            recompute=plan.strategy.recompute,
        )
        for name, degrees in recipe.parallel.submodels.towers.items()
    }
    return {"language": plan.strategy, **towers}


def check_submodels(loaded: LoadedRecipe, plan: Plan, model: nn.Module) -> None:
    """Raise for a model that has no such sub-models, and for an optimizer that does not support their layouts.

    Raises:
        BadValue: HP102, UnsupportedSharding: HP205, Contradiction: HP104.
    """
    layouts = submodel_layouts(loaded.recipe, plan)
    submodel_strategies(model, layouts, sum(s.world_size for s in layouts.values()))
    for strategy in layouts.values():
        check_optimizer(loaded.recipe, replace(plan, strategy=strategy), loaded.where, model)
