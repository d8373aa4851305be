"""ModelSpec: read from a config.json, a Hugging Face directory or a preset, without any framework."""

from hyper_parallel.model._types import AttentionSpec, Block, MlpSpec, ModelSpec, ParamSpec

__all__ = ["AttentionSpec", "Block", "MlpSpec", "ModelSpec", "ParamSpec"]
