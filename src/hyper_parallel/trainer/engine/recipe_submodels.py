"""Checks of the sub-models of a recipe before ranks start."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hyper_parallel.config import LoadedRecipe
from hyper_parallel.ir import Plan
from hyper_parallel.runtime import submodel_strategies
from hyper_parallel.trainer.engine.optimizer import check_optimizer
from hyper_parallel.trainer.engine.recipe_model import submodel_layouts


def check_submodels(loaded: LoadedRecipe, plan: Plan, model: nn.Module) -> None:
    """Raise for a model that has no such sub-models, and for an optimizer that does not support their layouts.

    Raises:
        BadValue: HP102, UnsupportedSharding: HP205, Contradiction: HP104.
    """
    layouts = submodel_layouts(loaded.recipe, plan)
    assert loaded.recipe.parallel.submodels is not None
    members = loaded.recipe.parallel.submodels.members
    size = len({rank for ranks in members.values() for rank in ranks})
    submodel_strategies(model, layouts, size, members)
    for strategy in layouts.values():
        check_optimizer(loaded.recipe, replace(plan, strategy=strategy), loaded.where, model)
