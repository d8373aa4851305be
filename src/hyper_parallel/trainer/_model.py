"""Build the Hugging Face model of a recipe without touching its code: on the meta device, in one dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch import Routing
from hyper_parallel.config import Recipe
from hyper_parallel.errors import ModelUnreadable, WeightsUnreadable
from hyper_parallel.model import find_preset, read_preset

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
"""Format of the parameters by compute format: bfloat16 computation keeps float32 parameters."""


def build_model(recipe: Recipe) -> nn.Module:
    """The recipe's causal language model on the meta device, in training mode.

    Raises:
        ModelUnreadable: HP305 when transformers has no causal language model for the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    where, data = _config_values(recipe.model.path)
    family = data.get("model_type")
    if family not in CONFIG_MAPPING:
        raise ModelUnreadable(
            "transformers has no model of this type", where=f"{where}: model_type", got=family
        )
    config = AutoConfig.for_model(**data)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=_DTYPES[recipe.training.dtype],
            attn_implementation=recipe.model.attn_implementation,
        )
    return model.train()


def routing_of(recipe: Recipe) -> Routing:
    """The recipe's choices about the routing of experts."""
    choice = recipe.moe
    return Routing(choice.aux_loss_coef, choice.bias_update_rate, choice.capacity_factor)


def _config_values(name: str) -> tuple[str, dict[str, Any]]:
    """Where the config of a model directory, config file or preset is, and its values."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    preset = None if path.is_file() else find_preset(name)
    if preset is not None:
        return f"preset {preset}", dict(read_preset(preset))
    return str(path), json.loads(path.read_text(encoding="utf-8"))


def weights_directory(recipe: Recipe) -> Path | None:
    """Directory to read pretrained weights from, or None for random ones.

    Raises:
        WeightsUnreadable: HP703 when the recipe insists on weights that are not there.
    """
    directory = Path(recipe.model.path).expanduser()
    present = directory.is_dir() and any(directory.glob("*.safetensors"))
    if recipe.model.init == "pretrained" and not present:
        raise WeightsUnreadable(
            "the recipe wants pretrained weights, but the model has no safetensors files",
            where=f"model.path={recipe.model.path}",
            hint="set `model.init=random`, or give a directory with weights",
        )
    return directory if present and recipe.model.init != "random" else None


def compile_layers(model: nn.Module) -> None:
    """Compile every decoder layer in place, so that names, classes and hooks stay as they are."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile()
