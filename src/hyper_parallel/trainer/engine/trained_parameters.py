"""Trained parameters of a recipe's model: adapters, frozen parameters, and their counts."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.backends.torch.peft_adapters import import_peft
from hyper_parallel.backends.torch.token_scores import SCORE
from hyper_parallel.backends.torch.weights.initialization import base_parameters
from hyper_parallel.backends.torch.weights.lora import adapted_modules
from hyper_parallel.config import Recipe
from hyper_parallel.errors import BadValue


def lora_config(recipe: Recipe) -> Any:
    """Return the recipe's `lora` section as a `peft.LoraConfig`."""
    assert recipe.lora is not None
    values, path = recipe.lora.model_dump(mode="json"), Path(recipe.model.path).expanduser()
    scores = recipe.stage == "rm"
    whole = [*values["modules_to_save"], *([SCORE] if scores else [])]
    return import_peft().LoraConfig(
        **values | {"modules_to_save": whole or None},
        base_model_name_or_path=str(path.resolve()) if path.exists() else recipe.model.path,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )


def trained_of(model: nn.Module) -> tuple[float, str]:
    """Return the trained share of the parameters without adapters, and a description of adapters and elements."""
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    base = sum(p.numel() for _, p in base_parameters(model))
    adapters, elements = sum(1 for _ in adapted_modules(model)), sum(sizes.values())
    if elements == base and not adapters:
        return 1.0, ""
    text = f"{elements:,} of {base:,} parameters ({elements / base:.3%})"
    return elements / base, f"{adapters} adapters, {text}" if adapters else text


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match globs.

    Raises:
        BadValue: HP102 for a pattern without a match, and when no parameter is left to train.
    """
    where = "training.freeze"
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise BadValue(
                "no parameter has a name like this",
                where=where,
                got=pattern,
                allowed="globs such as model.embed_tokens.* over the names of parameters",
                hint=f"'training.freeze=[{near[0]}]'",
            )
        for name in matches:
            model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadValue(
            "all parameters are frozen, and nothing is left to train",
            where=where,
            got=list(patterns),
            hint="training.freeze=[]",
        )
