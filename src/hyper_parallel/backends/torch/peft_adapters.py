"""Adapters that peft makes, as parameters of the modules they belong to.

peft decides which modules get an adapter, and of which rank and scaling; what it puts around them is taken away again,
so that names and classes are those of the plain model. The same takes a model that another program gave to peft.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.backends.torch._name_patterns import with_plain_patterns
from hyper_parallel.backends.torch._target_names import (
    adaptable_modules,
    all_linear,
    check_names,
    last_names,
    target_hint,
)
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.weights.linear_map import IN_OUT, weight_order
from hyper_parallel.backends.torch.weights.lora import Adapter, adapt
from hyper_parallel.errors import (
    BadValue,
    MissingDependency,
    UnsupportedSharding,
    WeightsUnreadable,
)
from hyper_parallel.received import Limits, read_json
from hyper_parallel.units import MiB

ADAPTER_CONFIG = "adapter_config.json"
"""What makes a directory one of an adapter, by peft's name."""
ADAPTER_LIMITS = Limits(16 * MiB, num_elements=200_000, depth=10, finite=True)
"""Of that file, which names every adapted module at most once or twice."""
CONFIGURATION = "adapter_config"
"""Attribute of a model with adapters: the `peft.LoraConfig` that they were made by."""
_KEYS = "lora.target_modules"


def import_peft() -> Any:
    """The package.

    Raises:
        MissingDependency: HP501 when it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependency(
            "adapters are made and written by peft, which is not installed",
            where="lora",
            got=str(error),
            hint='pip install "hyper-parallel[lora]"',
        ) from error
    return peft


def base_of(directory: Path) -> str:
    """Directory or hub id of the weights that an adapter was trained on, by the directory of the adapter.

    Raises:
        WeightsUnreadable: HP703 when it does not say.
    """
    file, base = directory / ADAPTER_CONFIG, None
    with suppress(OSError, ValueError, KeyError, TypeError):
        base = read_json(file, ADAPTER_LIMITS)["base_model_name_or_path"]
    if not isinstance(base, str):
        raise WeightsUnreadable(
            "the adapter does not name the model it belongs to",
            where=str(file),
            got=None if base is None else type(base).__name__,
            hint="write `base_model_name_or_path` into the file",
        )
    return base


def add_adapters(model: nn.Module, config: Any, where: str = _KEYS) -> None:
    """Let peft choose modules, and give these adapters; everything else is frozen, but what is to be saved whole.

    Args:
        model: A Hugging Face model, on the meta device or not; changed in place.
        config: A `peft.LoraConfig`.
        where: Origin of the choice of modules, for errors.

    Raises:
        BadValue: HP102 when a name fits no module. UnsupportedSharding: HP205 for a module that takes no adapter.
    """
    peft, takes = import_peft(), adaptable_modules(model)
    chosen = check_names(model, config, takes, where)
    if config.target_modules == "all-linear":
        config.target_modules = all_linear(model, takes)
    if takes and all(weight_order(m) == IN_OUT for m in takes.values()):
        config.fan_in_fan_out = True
    bounded = with_plain_patterns(config, chosen, where)
    _check_ranks(bounded, takes, where)
    unmaterialized = all(p.is_meta for p in model.parameters())
    try:
        peft.inject_adapter_in_model(bounded, model, low_cpu_mem_usage=unmaterialized)
    except ValueError as error:
        raise BadValue(
            "peft puts no adapter on this model",
            where=where,
            got=str(error).partition("\n")[0][:200],
            allowed=last_names(takes),
            hint=target_hint(last_names(takes)),
        ) from error
    if unmaterialized:
        _cast_factors(model)
    absorb_adapters(model, config)


def _cast_factors(model: nn.Module) -> None:
    """Give the factors of a model without storage the dtype of their weights, as peft does where it allocates them."""
    for layer in model.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if weight is not None and weight.is_floating_point():
            for part in ("lora_A", "lora_B"):
                getattr(layer, part, nn.Module()).to(weight.dtype)


def _check_ranks(config: Any, takes: dict[str, nn.Module], where: str) -> None:
    """Refuse ranks that exceed every dim of the modules, before peft allocates factors of them.

    Raises:
        BadValue: HP102.
    """
    widest = max((max(m.weight.shape) for m in takes.values()), default=1)
    for key, rank in {"r": config.r, **(config.rank_pattern or {})}.items():
        if rank > widest:
            recipe = where == _KEYS
            name = "r" if key == "r" else f"rank_pattern.{key}"
            raise BadValue(
                "the rank of an adapter exceeds all dims of the model's linear modules",
                where=f"lora.{name:.120}" if recipe else f"{where}: {name:.120}",
                got=rank,
                allowed=f"1 to {widest}",
                hint=f"lora.{key}={widest}" if recipe and key == "r" else None,
            )


def absorb_adapters(model: nn.Module, config: Any, name: str = "default") -> None:
    """Take away what peft has put around the modules of a model, and give these its adapters; values are kept.

    Args:
        model: A model that passed through peft, not the `PeftModel` around it; changed in place.
        config: The `peft.LoraConfig` that an export of the adapters is to have.
        name: Of the adapter.

    Raises:
        UnsupportedSharding: HP205 for adapters of something else than a linear module, and for kinds other than LoRA.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    refused = {n: why for n, m in layers.items() if (why := _why_refused(model, m, name))}
    if refused:
        path, why = next(iter(refused.items()))
        raise UnsupportedSharding(
            "only one plain LoRA adapter of linear modules inside of the model is trained",
            where=f"{_KEYS}: {path}",
            got=why,
            allowed="nn.Linear and Conv1D, but not the head",
            hint=target_hint(last_names(layers.keys() - refused.keys()) or ["all-linear"]),
        )
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, ModulesToSaveWrapper):
            whole, trained = layer.original_module, layer.modules_to_save[name]
            if any(uses[id(p)] > 1 for p in whole.parameters()):
                raise UnsupportedSharding(
                    "a weight that two modules share is not trained beside adapters",
                    where=f"lora.modules_to_save: {path}",
                    got=type(whole).__name__,
                    allowed="modules that own their weights, such as norms",
                    hint="lora.modules_to_save=[]",
                )
            for mine, theirs in zip(whole.parameters(), trained.parameters(), strict=True):
                mine.requires_grad_(True)
                if not mine.is_meta:
                    mine.data.copy_(theirs.data)
            model.set_submodule(path, whole)
        elif path in layers:
            base = layer.get_base_layer()
            a, b = (part[name].weight for part in (layer.lora_A, layer.lora_B))
            drop = getattr(layer.lora_dropout[name], "p", 0.0)
            adapt(base, a, b, Adapter(float(layer.scaling[name]), drop))
            model.set_submodule(path, base)
    model.__dict__.pop("peft_config", None)
    model.__dict__[CONFIGURATION] = config


def _why_refused(model: nn.Module, layer: Any, name: str) -> str | None:
    """Return what peft has put around what, where an adapter of this kind is not trained; None: it is."""
    from peft.tuners.lora import Linear

    base = layer.get_base_layer()
    plain = isinstance(layer, Linear) and layer is not head_of(model)
    if plain and not layer.merged and list(layer.active_adapters) == [name]:
        variant = name in layer.lora_variant or layer.lora_bias.get(name)
        if not variant and weight_order(base) is not None:
            return None
    return f"{type(layer).__name__} around {type(base).__name__}"
