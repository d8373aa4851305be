"""Model and optimizer of a recipe: any Hugging Face model, its code untouched, on the meta device; AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch import Routing, read_model, resolve_layouts
from hyper_parallel.config import Recipe, Training
from hyper_parallel.errors import ModelUnreadable, PlanMismatch, WeightsUnreadable
from hyper_parallel.ir import Plan
from hyper_parallel.model import (
    FAMILIES_READ,
    ConfigFile,
    ModelSpec,
    is_read,
    load_model,
    read_config,
)

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
"""Format of the parameters by compute format: bfloat16 computation keeps float32 parameters."""


def build_model(recipe: Recipe) -> nn.Module:
    """The recipe's language model, of text or of images and text, on the meta device, in training mode.

    Raises:
        ModelUnreadable: HP305 when transformers makes no such model of the config.
    """
    return _on_meta(
        read_config(recipe.model.path),
        _DTYPES[recipe.training.dtype],
        recipe.model.attn_implementation,
    ).train()


def _on_meta(file: ConfigFile, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = file.values.get("model_type")
    if family not in CONFIG_MAPPING:
        raise ModelUnreadable(
            "transformers has no model of this type", where=f"{file.where}: model_type", got=family
        )
    auto = _auto_class(family, file.where)
    try:
        config = AutoConfig.for_model(**file.values)
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        # transformers raises many classes here: for keys, for attention it does not have, for no such model.
        of_attention = attention not in (None, "eager") and "attn_implementation" in str(error)
        raise ModelUnreadable(
            f"transformers makes no language model of this `{family}` config",
            where=file.where,
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            hint="set `model.attn_implementation=eager`" if of_attention else None,
        ) from error
    return model


def _auto_class(family: str, where: str) -> Any:
    """The class of transformers that makes a language model of this type: of text, else of images and text."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if family in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    paired = family in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    raise ModelUnreadable(
        f"`{family}` is {'an encoder-decoder' if paired else 'no language'} model",
        where=f"{where}: model_type",
        got=family,
        allowed="causal language models, and models of images and text",
    )


def read_spec(path: str, where: str | None = None) -> ModelSpec:
    """A model for planning: read from its files where its family is known, else from the module transformers makes.

    Args:
        path: As for `load_model`.
        where: Where the value came from, for errors.

    Raises:
        ModelUnreadable: HP305 when transformers makes no language model of the config either.
        HyperParallelError: What `load_model` raises.
    """
    file = read_config(path, where=where)
    if is_read(file.values) or "model_type" not in file.values:
        return load_model(path, where=where)
    return read_model(_on_meta(file, torch.float32), file.name)


def check_parameters(model: nn.Module, plan: Plan, where: str) -> None:
    """Refuse a model that is another one than its config was read as; a family that is not known looks like Llama.

    Args:
        model: As `build_model` gives it.
        plan: The plan of the run.
        where: Origin of the recipe's model.

    Raises:
        ModelUnreadable: HP305 naming family and parameter.
        NotDivisible: HP203, RuleError: HP204, UnsupportedSharding: HP205 for what cannot be split.
    """
    try:
        resolve_layouts(model, plan)
    except PlanMismatch as error:
        family = plan.model.family
        known = family in FAMILIES_READ
        raise ModelUnreadable(
            f"the family `{family}` cannot be trained: {error.what}",
            where=where,
            got=f"{type(model).__name__}, {error.got}, {error.allowed}",
            allowed=None if known else FAMILIES_READ,
            hint=None if known else "use a model of a family that is read",
        ) from error


def routing_of(recipe: Recipe) -> Routing:
    """The recipe's choices about the routing of experts."""
    choice = recipe.moe
    return Routing(choice.aux_loss_coef, choice.bias_update_rate, choice.capacity_factor)


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


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups by number of dims: matrices are decayed; vectors (norm weights, biases) are not.

    The number of dims is the logical one, so the groups are the same on every layout.
    """
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW with decoupled decay (Loshchilov and Hutter, arXiv:1711.05101)."""
    return torch.optim.AdamW(
        parameter_groups(model, training.weight_decay),
        lr=training.lr,
        betas=training.betas,
        eps=training.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Give every group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """Update the parameters; where `skip` is true nothing changes, decided on the device without a host read.

    Fused optimizers of torch read the attribute `found_inf` (as `torch.amp.GradScaler` sets it) in their kernels.

    Args:
        optimizer: A fused optimizer.
        skip: Scalar on the parameters' device; None: always update.
    """
    if skip is None:
        optimizer.step()
        return
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
