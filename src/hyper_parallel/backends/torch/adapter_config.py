"""Reader of peft's `adapter_config.json`: size limits, type checks, and refusal of all but plain LoRA."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, ADAPTER_LIMITS, import_peft
from hyper_parallel.errors import UnsupportedSharding, WeightsUnreadable
from hyper_parallel.serde import DecodeError, read

_LORA: Final = "LORA"
_UNREAD: Final = (
    "task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "runtime_config",
)  # fmt: skip
"""Keys without effect on modules and factors."""
_OTHER_INITIAL: Final = ("gaussian", "eva", "orthogonal")
"""Prefixes of the initialization methods that do not change the base weights."""

_Rank = Annotated[int, Field(ge=1)]
_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Names = str | list[str] | None


@with_config(ConfigDict(strict=True, extra="allow"))
class _AdapterConfig(TypedDict):
    """Keys of a `peft.LoraConfig` that select modules and define factors."""

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
        UnsupportedSharding: HP205 for other kinds of adapters, and for LoRA with more than plain factors.
    """
    peft, file = import_peft(), directory / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = read(_AdapterConfig, file, ADAPTER_LIMITS, extra="allow")  # type: ignore[assignment]
    except (OSError, DecodeError) as error:
        raise WeightsUnreadable(
            "the configuration of the adapter cannot be read",
            where=str(file),
            got=f"{error!s:.200}",
        ) from error
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
            hint="merge it with peft (`merge_and_unload`), and train the merged model",
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
            "peft rejects the configuration of the adapter", where=str(file), got=f"{error!s:.200}"
        ) from error
