"""Recipes: typed sections, YAML or JSON files, overrides as `a.b=c`, and the origin of every value."""

from hyper_parallel.config._problems import describe, leaves, problems, raise_all
from hyper_parallel.config._read import read_mapping
from hyper_parallel.config._sections import (
    Checkpoint,
    Data,
    Model,
    Parallel,
    Recipe,
    Section,
    Training,
)

__all__ = [
    "Checkpoint",
    "Data",
    "Model",
    "Parallel",
    "Recipe",
    "Section",
    "Training",
    "describe",
    "leaves",
    "problems",
    "raise_all",
    "read_mapping",
]
