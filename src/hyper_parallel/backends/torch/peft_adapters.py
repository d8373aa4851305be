"""LoRA adapters created by peft and kept as parameters of the adapted modules; a reader of `adapter_config.json`.

peft selects the modules with an adapter, their ranks and scalings. The wrapper modules of peft are then removed, so
that names and classes are those of the model without adapters. This also works for a model that user code passed to
peft. The reader limits sizes, checks types, and refuses all kinds of adapters except plain LoRA.
"""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, with_config
from torch import nn
from typing_extensions import TypedDict

from hyper_parallel.backends.torch._target_names import (
    adaptable_modules,
    all_linear,
    check_names,
    last_names,
    target_hint,
    with_plain_patterns,
)
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.weights.linear_map import IN_OUT, weight_order
from hyper_parallel.backends.torch.weights.lora import CONFIGURATION, Adapter, adapt
from hyper_parallel.errors import (
    BadValue,
    MissingDependency,
    UnsupportedSharding,
    WeightsUnreadable,
)
from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import DecodeError, read
from hyper_parallel.units import MiB

ADAPTER_CONFIG = "adapter_config.json"
"""File that identifies the directory of an adapter, named by peft."""
ADAPTER_LIMITS = Limits(16 * MiB, num_elements=200_000, depth=10, finite=True)
"""Limits for reading an adapter configuration."""
_KEYS = "lora.target_modules"
_NAME: Final = "default"
"""Name that peft gives an adapter."""
_SAVED_KEYS: Final = {_KEYS: "lora.modules_to_save", "lora_target": "additional_target"}
"""Key of the modules trained in full, by the key of the adapted modules: in recipes, and in files of LlamaFactory."""


def import_peft() -> Any:
    """Import peft and return the module; raise HP501 if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise MissingDependency(
            "adapters need peft, which is not installed",
            where="lora",
            got=str(error),
            hint='pip install "hyper-parallel[lora]"',
        ) from error
    return peft


def base_of(directory: Path) -> str:
    """Return the directory or hub id of the base model that an adapter names; raise HP703 if it names none."""
    file, base = directory / ADAPTER_CONFIG, None
    try:
        base = read_json(file, ADAPTER_LIMITS)["base_model_name_or_path"]
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    except (KeyError, TypeError):
        pass
    if not isinstance(base, str):
        raise WeightsUnreadable(
            "the adapter does not name its base model",
            where=str(file),
            got=None if base is None else type(base).__name__,
            hint="write the directory or hub id of the base model into the key `base_model_name_or_path` of the file",
        )
    return base


def _unreadable(file: Path, error: Exception) -> WeightsUnreadable:
    denied = isinstance(error, PermissionError)
    return WeightsUnreadable(
        "the configuration of the adapter cannot be read",
        where=str(file),
        got=f"{error!s:.200}",
        hint=f"chmod u+r {shlex.quote(str(file))}"
        if denied
        else "fetch adapter_config.json again from where the adapter was published",
    )


def add_adapters(model: nn.Module, config: Any, where: str = _KEYS) -> None:
    """Add adapters to the modules that peft selects; freeze all other parameters except those of `modules_to_save`.

    Args:
        model: A Hugging Face model, on the meta device or not; changed in place.
        config: A `peft.LoraConfig`.
        where: Recipe key or file that selects the modules, for errors.

    Raises:
        BadValue: HP102 for a name that matches no module, an invalid or slow pattern, or a rank above every dim of the
            linear modules, and when peft rejects the configuration.
        UnsupportedSharding: HP205 for a module that does not support an adapter; see also `absorb_adapters`.
        MissingDependency: HP501 if peft is not installed.
    """
    peft, adaptable = import_peft(), adaptable_modules(model)
    chosen = check_names(model, config, adaptable, where)
    if config.target_modules == "all-linear":
        config.target_modules = all_linear(model, adaptable, where)
    if adaptable and all(weight_order(m) == IN_OUT for m in adaptable.values()):
        config.fan_in_fan_out = True
    _check_ranks(config, adaptable, where)
    bounded = with_plain_patterns(config, chosen, where)
    unmaterialized = all(p.is_meta for p in model.parameters())
    try:
        peft.inject_adapter_in_model(bounded, model, low_cpu_mem_usage=unmaterialized)
    except ValueError as error:
        raise BadValue(
            "peft cannot add adapters to this model",
            where=where,
            got=str(error).partition("\n")[0][:200],
            allowed=last_names(adaptable),
            hint=target_hint(last_names(adaptable), where),
        ) from error
    if unmaterialized:
        _cast_factors(model)
    absorb_adapters(model, config, where=where)


def _cast_factors(model: nn.Module) -> None:
    """Cast the A and B matrices of adapters on the meta device to the dtype of the adapted weight, as peft does."""
    for layer in model.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if weight is not None and weight.is_floating_point():
            for part in ("lora_A", "lora_B"):
                getattr(layer, part, nn.Module()).to(weight.dtype)


def _check_ranks(config: Any, adaptable: dict[str, nn.Module], where: str) -> None:
    """Raise HP102 for an adapter rank that exceeds every dim of the modules, before peft allocates the matrices."""
    widest = max((max(m.weight.shape) for m in adaptable.values()), default=1)
    for key, rank in {"r": config.r, **(config.rank_pattern or {})}.items():
        if rank > widest:
            recipe = where == _KEYS
            name = "r" if key == "r" else f"rank_pattern.{key}"
            hint = f"set {name:.120} to {widest} in {where}"
            if recipe:  # the dots of a pattern would be read as a nested key in an override
                hint = f"lora.r={widest}" if key == "r" else f"set `{key:.120}: {widest}` in `lora.rank_pattern`"
            raise BadValue(
                f"an adapter rank of {rank} exceeds {widest}, the largest dim of the model's linear modules",
                where=f"lora.{name:.120}" if recipe else f"{where}: {name:.120}",
                got=rank,
                allowed=f"1 to {widest}",
                hint=hint,
            )


def absorb_adapters(model: nn.Module, config: Any, where: str = _KEYS) -> None:
    """Remove peft's wrapper modules and move their adapters to the wrapped modules; values do not change.

    `model` is the model inside of a `PeftModel`. `config` is stored on it, for exports of the adapter. `where` is the
    key or file that selects the modules, for errors.

    Raises:
        UnsupportedSharding: HP205 for adapters of modules that are not linear, adapters other than plain LoRA, and
            modules of `modules_to_save` that share a weight with another module.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    refused = {n: why for n, m in layers.items() if (why := _why_refused(model, m))}
    if refused:
        path, why = next(iter(refused.items()))
        supported = {*last_names(layers.keys() - refused.keys())} - {*last_names(refused)}
        raise UnsupportedSharding(
            "training supports only one plain LoRA adapter of linear modules inside the model",
            where=f"{where}: {path}",
            got=why,
            allowed="one active and unmerged LoRA adapter, without bias, of nn.Linear or Conv1D other than the head",
            hint=target_hint(sorted(supported), where),
        )
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, ModulesToSaveWrapper):
            whole, trained = layer.original_module, layer.modules_to_save[_NAME]
            if any(uses[id(p)] > 1 for p in whole.parameters()):
                raise UnsupportedSharding(
                    "a weight shared by two modules cannot be trained in full with adapters",
                    where=f"{_SAVED_KEYS.get(where, where)}: {path}",
                    got=type(whole).__name__,
                    allowed="modules that own their weights, such as norms",
                    hint=_hint_without(path, config, where),
                )
            for parameter, copy in zip(whole.parameters(), trained.parameters(), strict=True):
                parameter.requires_grad_(True)
                if not parameter.is_meta:
                    parameter.data.copy_(copy.data)
            model.set_submodule(path, whole)
        elif path in layers:
            base = layer.get_base_layer()
            a, b = (part[_NAME].weight for part in (layer.lora_A, layer.lora_B))
            drop = getattr(layer.lora_dropout[_NAME], "p", 0.0)
            adapt(base, a, b, Adapter(float(layer.scaling[_NAME]), drop))
            model.set_submodule(path, base)
    model.__dict__.pop("peft_config", None)
    model.__dict__[CONFIGURATION] = config


def _hint_without(path: str, config: Any, where: str) -> str:
    """Return a hint that removes the module `path` from `modules_to_save` of the recipe or of the file `where`."""
    names = [name for name in config.modules_to_save or () if not f".{path}".endswith(f".{name}")]
    if where == _KEYS:
        return f"'lora.modules_to_save=[{', '.join(names)}]'" if names else "lora.modules_to_save=[]"
    return f"leave `{path}` out of {_SAVED_KEYS.get(where, f'modules_to_save in {where}')}"


def _why_refused(model: nn.Module, layer: Any) -> str | None:
    from peft.tuners.lora import Linear

    base = layer.get_base_layer()
    classes = f"{type(layer).__name__} around {type(base).__name__}"
    linear = isinstance(layer, Linear) and weight_order(base) is not None
    if not linear or layer is head_of(model):
        return classes
    if layer.merged:
        return f"{classes}, merged into the weight"
    if list(layer.active_adapters) != [_NAME]:
        return f"{classes} with the adapters {', '.join(layer.active_adapters)}"
    if _NAME in layer.lora_variant or layer.lora_bias.get(_NAME):
        return f"{classes} with a variant of LoRA or a bias"
    return None


_LORA: Final = "LORA"
_UNREAD: Final = (
    "task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "runtime_config",
)  # fmt: skip
"""Keys of a `LoraConfig` that affect neither the selected modules nor the adapter matrices A and B."""
_OTHER_INITIAL: Final = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, up to the first `_`, that do not change the base weights."""

_Rank = Annotated[int, Field(ge=1)]
_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Names = str | list[str] | None


@with_config(ConfigDict(strict=True, extra="allow"))
class _AdapterConfig(TypedDict):
    """Keys of a `peft.LoraConfig` that select modules and define their adapter matrices A and B."""

    peft_type: str
    r: NotRequired[_Rank]
    lora_alpha: NotRequired[_Scale]
    lora_dropout: NotRequired[Annotated[float, Field(ge=0, lt=1)]]
    use_rslora: NotRequired[bool]
    rank_pattern: NotRequired[dict[str, _Rank] | None]
    alpha_pattern: NotRequired[dict[str, _Scale] | None]
    target_modules: NotRequired[_Names]
    exclude_modules: NotRequired[_Names]
    modules_to_save: NotRequired[list[str] | None]
    layers_to_transform: NotRequired[int | list[int] | None]
    layers_pattern: NotRequired[_Names]
    fan_in_fan_out: NotRequired[bool]
    init_lora_weights: NotRequired[bool | str]
    task_type: NotRequired[str | None]
    base_model_name_or_path: NotRequired[str | None]
    revision: NotRequired[str | None]


def read_adapter_config(directory: Path) -> Any:
    """Return the `peft.LoraConfig` of a directory.

    Raises:
        WeightsUnreadable: HP703 for an invalid adapter configuration.
        UnsupportedSharding: HP205 for adapters other than plain LoRA, such as DoRA.
        MissingDependency: HP501 if peft is not installed.
    """
    peft, file = import_peft(), directory / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = read(_AdapterConfig, file, ADAPTER_LIMITS, extra="allow")  # type: ignore[assignment]
    except (OSError, DecodeError) as error:
        raise _unreadable(file, error) from error
    plain = vars(peft.LoraConfig())
    read_keys = _AdapterConfig.__annotations__.keys() - {*_UNREAD}
    unsupported = [
        f"{key:.80}={value!r:.80}"
        for key, value in config.items()
        if key not in read_keys and key not in _UNREAD and value and value != plain.get(key)
    ]
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.partition("_")[0] not in _OTHER_INITIAL:
        unsupported.append(f"init_lora_weights={initial:.80}")
    if config["peft_type"] != _LORA or unsupported:
        kind = f"{config['peft_type']:.80}"
        raise UnsupportedSharding(
            "only plain LoRA adapters of linear modules are supported",
            where=str(file),
            got=", ".join(unsupported[:3]) if kind == _LORA else f"peft_type={kind}",
            allowed="peft_type=LORA with the keys of the section `lora`",
            hint="merge the adapter with peft (`merge_and_unload`) if peft can, else use the model without it",
        )
    values = {key: config[key] for key in read_keys if key in config}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.LoraConfig(
                **values | {"init_lora_weights": True, "inference_mode": False},
                task_type=config.get("task_type"),
                base_model_name_or_path=config.get("base_model_name_or_path"),
                revision=config.get("revision"),
            )
    except (ValueError, TypeError) as error:  # contradictory keys
        raise WeightsUnreadable(
            "peft rejects the configuration of the adapter",
            where=str(file),
            got=f"{error!s:.200}",
            hint="correct the named value in adapter_config.json",
        ) from error
