"""Trained fraction of a model's parameters, from their names and the recipe's `training.freeze` and `lora`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator

from hyper_parallel.config import NAMES_OF_EXPERTS, Lora, Recipe
from hyper_parallel.model import ModelSpec, ParamSpec


def trained_share(model: ModelSpec, recipe: Recipe) -> float:
    """Return the number of parameters with a gradient, adapters included, divided by all parameters of the model.

    The result is an estimate, because a model spec has no module classes: every matrix named `*.weight` counts as a
    linear module. Routed experts never have adapters. With `all-linear`, neither have embedding and head, nor the
    modules in `NAMES_OF_EXPERTS` if the model has routed experts.
    """
    lora, patterns = recipe.lora, recipe.training.freeze
    if lora is None and not patterns:
        return 1.0
    frozen = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
    trained, has_experts = 0, any(p.is_expert for b in model.blocks for p in b.params)
    for name, param, inside in _parameters(model):
        module = name.removesuffix(".weight")
        saved = lora is None or module.endswith(lora.modules_to_save)
        if saved:
            trained += 0 if frozen.fullmatch(name) else param.num_elements
        if lora is None or saved or len(param.shape) != 2 or param.is_expert:
            continue
        inside = inside and not (has_experts and module.endswith(NAMES_OF_EXPERTS))
        if name.endswith(".weight") and _has_adapter(module, inside, lora):
            sizes = zip("AB", param.shape[::-1], strict=True)
            trained += sum(lora.r * n for k, n in sizes if not frozen.fullmatch(f"{module}.lora_{k}"))
    return trained / model.num_params


def _parameters(model: ModelSpec) -> Iterator[tuple[str, ParamSpec, bool]]:
    """Yield (name, parameter, whether the parameter is outside embedding and head) for every parameter of a model."""
    for block in model.blocks:
        for param in block.params:
            for layer in block.layers or (None,):
                index = "" if layer is None else str(layer)
                inside = block.name not in ("embedding", "head")
                yield param.name.replace("*", index, 1), param, inside


def _has_adapter(module: str, inside: bool, lora: Lora) -> bool:
    """Return whether a module has a LoRA adapter; `inside` is False for modules of embedding and head."""
    if lora.target_modules == "all-linear":
        return inside
    if isinstance(lora.target_modules, str):
        return re.fullmatch(lora.target_modules, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in lora.target_modules)
