"""ModelSpec: description of a model from a config.json, a Hugging Face directory or a preset, without a framework."""

from hyper_parallel.model._model_spec import (
    AttentionSpec,
    Block,
    KeptActivations,
    MlpSpec,
    ModelSpec,
    ParamSpec,
)
from hyper_parallel.model._weight_listing import INDEX, SINGLE, list_weight_files
from hyper_parallel.model.families import FAMILIES_READ
from hyper_parallel.model.generation_config import GENERATION, read_generation_config
from hyper_parallel.model.loading import (
    UNMEASURED_ACTIVATIONS,
    ConfigFile,
    find_preset,
    is_read,
    load_model,
    preset_names,
    read_config,
    read_config_values,
    read_preset,
    spec_from_config,
)
from hyper_parallel.model.properties import QUESTIONS, ModelProperties, Property
from hyper_parallel.model.towers import (
    Tower,
    fixed_image_size,
    language_of,
    tower_kind,
    tower_kinds,
    towers_of,
)

__all__ = [
    "FAMILIES_READ",
    "GENERATION",
    "INDEX",
    "QUESTIONS",
    "SINGLE",
    "UNMEASURED_ACTIVATIONS",
    "AttentionSpec",
    "Block",
    "ConfigFile",
    "KeptActivations",
    "MlpSpec",
    "ModelProperties",
    "ModelSpec",
    "ParamSpec",
    "Property",
    "Tower",
    "find_preset",
    "fixed_image_size",
    "is_read",
    "language_of",
    "list_weight_files",
    "load_model",
    "preset_names",
    "read_config",
    "read_config_values",
    "read_generation_config",
    "read_preset",
    "spec_from_config",
    "tower_kind",
    "tower_kinds",
    "towers_of",
]
