"""ModelSpec: read from a config.json, a Hugging Face directory or a preset, without any framework."""

from hyper_parallel.model._load import load_model, spec_from_config
from hyper_parallel.model._presets import preset_names
from hyper_parallel.model._types import AttentionSpec, Block, MlpSpec, ModelSpec, ParamSpec

__all__ = [
    "AttentionSpec",
    "Block",
    "MlpSpec",
    "ModelSpec",
    "ParamSpec",
    "load_model",
    "preset_names",
    "spec_from_config",
]
