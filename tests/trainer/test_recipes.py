from pathlib import Path

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.trainer import LrSchedule
from hyper_parallel.trainer.engine.recipe_model import build_model

pytestmark = pytest.mark.torch

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_load(path):
    recipe = load_recipe(path).recipe
    assert LrSchedule(recipe.training).lr(recipe.training.steps) > 0


def test_a_preset_is_built_on_the_meta_device():
    recipe = load_recipe(RECIPES / "pretrain_llama_8b.yaml").recipe
    model = build_model(recipe)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert all(p.is_meta for p in model.parameters())
