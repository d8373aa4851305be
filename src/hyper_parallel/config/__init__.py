"""Recipes: typed sections, YAML or JSON files, overrides as `a.b=c`, and the origin of every value."""

from hyper_parallel.config._load_recipe import (
    DEGREES,
    KNOWN_REWARDS,
    LoadedRecipe,
    load_recipe,
    missing_run,
    paths_read,
    recipe_to_yaml,
    refuse_code,
    refuse_data_file,
    with_absolute_paths,
    with_steps,
    with_submodels,
)
from hyper_parallel.config._preference_sections import PAIRED_STAGES, PREFERENCE_STAGES, Dpo, Grpo, Kto, Rm
from hyper_parallel.config._problems import describe, leaves, read_section, validated
from hyper_parallel.config._read import parse_yaml, read_mapping
from hyper_parallel.config._recipe import NAMES_OF_EXPERTS, Lora, Offload, Recipe, time_limit_s
from hyper_parallel.config._sections import Checkpoint, Data, Model, Overlap, Parallel, Section, Training
from hyper_parallel.config._values import LEAST_TRAINED_VOCABULARY, MOST_SEQ_LEN
from hyper_parallel.config.schedules import SCHEDULE_ARGS

__all__ = [
    "DEGREES",
    "KNOWN_REWARDS",
    "LEAST_TRAINED_VOCABULARY",
    "MOST_SEQ_LEN",
    "NAMES_OF_EXPERTS",
    "PAIRED_STAGES",
    "PREFERENCE_STAGES",
    "SCHEDULE_ARGS",
    "Checkpoint",
    "Data",
    "Dpo",
    "Grpo",
    "Kto",
    "LoadedRecipe",
    "Lora",
    "Model",
    "Offload",
    "Overlap",
    "Parallel",
    "Recipe",
    "Rm",
    "Section",
    "Training",
    "describe",
    "leaves",
    "load_recipe",
    "missing_run",
    "parse_yaml",
    "paths_read",
    "read_mapping",
    "read_section",
    "recipe_to_yaml",
    "refuse_code",
    "refuse_data_file",
    "time_limit_s",
    "validated",
    "with_absolute_paths",
    "with_steps",
    "with_submodels",
]
