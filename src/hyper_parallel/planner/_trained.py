"""How much of a model a recipe trains, by the names of its parameters: what `freeze` and `lora` leave."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator

from hyper_parallel.config import NAMES_OF_EXPERTS, Lora, Recipe
from hyper_parallel.model import ModelSpec, ParamSpec


def trained_share(model: ModelSpec, recipe: Recipe) -> float:
    """Elements that have a gradient, adapters among them, over all parameters of the model.

    Args:
        model: The recipe's model.
        recipe: Its `lora` and `training.freeze` count. Of modules that peft takes by name the linear ones do.
    """
    lora, patterns = recipe.lora, recipe.training.freeze
    if lora is None and not patterns:
        return 1.0
    whole = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
    trained, has_experts = 0, any(p.is_expert for b in model.blocks for p in b.params)
    for name, param, inside in _parameters(model):
        module = name.removesuffix(".weight")
        if lora is None or _is_one_of(module, lora.modules_to_save):
            trained += 0 if whole.fullmatch(name) else param.num_elements
        if lora is None or not param.is_matrix or param.is_expert:
            continue
        inside = inside and not (has_experts and module.endswith(NAMES_OF_EXPERTS))
        if _has_adapter(module, inside, lora):
            sizes = zip("AB", param.shape[::-1], strict=True)
            trained += sum(
                lora.r * n for k, n in sizes if not whole.fullmatch(f"{module}.lora_{k}")
            )
    return trained / model.num_params


def _parameters(model: ModelSpec) -> Iterator[tuple[str, ParamSpec, bool]]:
    """Every parameter under its own name, and whether it is in a layer."""
    for block in model.blocks:
        for param in block.params:
            for layer in block.layers or (None,):
                index = "" if layer is None else str(layer)
                yield param.name.replace("*", index, 1), param, layer is not None


def _has_adapter(module: str, inside: bool, lora: Lora) -> bool:
    if lora.target_modules == "all-linear":
        return inside
    if isinstance(lora.target_modules, str):
        return re.fullmatch(lora.target_modules, module) is not None
    return _is_one_of(module, lora.target_modules)


def _is_one_of(module: str, ends: tuple[str, ...]) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)
