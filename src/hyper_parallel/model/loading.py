"""Readers of a ModelSpec from a directory, a config.json, a preset name or a Hub name."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import ModelUnreadable, UnknownModel, abbreviated
from hyper_parallel.hub import fetch, name_of_snapshot, parse_name
from hyper_parallel.model import _gpt2, _llama_like
from hyper_parallel.model._config_json import STANDARD_KEYS, ConfigView
from hyper_parallel.model._model_spec import ModelSpec
from hyper_parallel.model._weight_listing import with_files_ties
from hyper_parallel.model._weights import check_weights, read_headers
from hyper_parallel.model.config_limits import CONFIG_LIMITS, check_config
from hyper_parallel.model.families import (
    FAMILIES,
    FAMILIES_READ,
    KEEPS_MORE,
    LLAMA,
    TEXT_PARTS,
    Family,
)
from hyper_parallel.near_paths import (
    export_hint,
    is_data_file,
    is_recipe_file,
    nearest_path,
    some_recipe,
)
from hyper_parallel.received import LimitExceeded, check_value, read_text
from hyper_parallel.units import FLOAT_DTYPES

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.json")))


def read_preset(name: str) -> dict[str, Any]:
    """Return the config of the preset `name`, with the keys `_source` and `_aliases` that this package adds."""
    values: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return values


def find_preset(text: str) -> str | None:
    """Return the name of the preset with the name or Hub id `text`; None if there is none.

    Case is ignored, and all punctuation counts as equal. The organisation of a Hub id may be omitted, but not differ.
    """
    normalized = _normal(text)
    if "/" not in text and normalized in preset_names():
        return normalized
    for name in preset_names():
        aliases = read_preset(name).get("_aliases", [])
        known = aliases if "/" in text else [a.rpartition("/")[2] for a in aliases]
        if normalized in map(_normal, known):
            return name
    return None


def _normal(text: str) -> str:
    return "/".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in text.split("/"))


_NOT_GENERIC = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "kv_lora_rank", "is_encoder_decoder", "state_size", "ssm_state_size", "mamba_d_state", "linear_num_key_heads",
)  # fmt: skip
"""Keys that show that a model of an unknown family is not a plain Llama-like decoder."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of a model's config.json, with its origin.

    Attributes:
        values: Content of config.json, with the ties of `with_files_ties` for a directory.
        name: Display name of the model.
        where: Path of the file, or name of the preset.
        directory: Directory of the config, which may contain weights; None for a preset and a path of a config file.
    """

    values: Mapping[str, Any]
    name: str
    where: str
    directory: Path | None = None


def read_config(path_or_name: str | os.PathLike[str], *, where: str | None = None) -> ConfigFile:
    """Find and read the config of a model; arguments and errors (except WeightsUnreadable) as in `load_model`."""
    text = os.fspath(path_or_name)
    # os.path, because pathlib raises for a text that cannot be a path: too long, home of an unknown user.
    path = Path(os.path.expanduser(text))  # noqa: PTH111
    if os.path.isfile(path / "config.json"):  # noqa: PTH113
        file = path / "config.json"
        values = with_files_ties(read_config_values(file), path)
        published = name_of_snapshot(path)
        name = path.resolve().name if published is None else str(published)
        return ConfigFile(values, name, str(file), path)
    if os.path.isfile(path):  # noqa: PTH113
        _refuse_no_config(path)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return ConfigFile(read_config_values(path), name, str(path))
    if (preset := find_preset(text)) is not None:
        return ConfigFile(read_preset(preset), preset, f"preset {preset}")
    if (hub_name := parse_name(text)) is not None and not os.path.lexists(path):
        return read_config(fetch(hub_name, "config", where=where), where=where)
    problem = f"`{text}` is neither a path that exists nor a preset"
    if os.path.isdir(path):  # noqa: PTH112
        problem = f"the directory `{text}` has no config.json"
    raise UnknownModel(
        problem,
        where=where,
        got=text,
        allowed=f"a Hugging Face directory, a config.json, a name on the hub as org/name, or a preset: "
        f"{', '.join(preset_names())}",
        hint=_unknown_hint(text),
    )


UNMEASURED_ACTIVATIONS: Final = (
    "activations of {family} were not measured: formulas estimate them, and its layers may keep more; "
    "`hyper-parallel train RECIPE.yaml --dry-run` measures them"
)
"""Template of a note of a model spec, for a family in `KEEPS_MORE` that was read from its config only."""


def _refuse_no_config(path: Path) -> None:
    """Raise ModelUnreadable (HP305) if a file is a recipe or data instead of a config; the hint is a `plan` command."""
    content, recipe = "a recipe", str(path)
    if is_data_file(path):
        content, recipe = "data", some_recipe() or ""
    elif not is_recipe_file(path):
        return
    command = ["hyper-parallel", "plan", "--recipe", recipe]
    planned = shlex.join(command) if recipe else "hyper-parallel plan llama-3-8b -t dgx-h100"
    raise ModelUnreadable(
        f"the file contains {content}, but a model is expected",
        where=str(path),
        got=path.suffix,
        allowed="a Hugging Face directory, a config.json, a name on the hub as org/name, or a preset",
        hint=f"{planned}; in other commands, give a model in place of the file",
    )


def load_model(path_or_name: str | os.PathLike[str], *, where: str | None = None) -> ModelSpec:
    """Return the ModelSpec of a model from its config and the headers of its weight files, without a framework.

    Args:
        path_or_name: A Hugging Face directory, a config.json, a preset name such as `llama-3-8b`, or a name on the Hub
            (`org/name` or `org/name@revision`). The config of a Hub name is downloaded unless a preset matches. An
            existing file, or a directory with a config.json, takes precedence over a preset.
        where: Origin of the value, for errors: `recipe.yaml: model.path`.

    Raises:
        UnknownModel: HP304 when the text is none of these, or the config cannot be downloaded from the Hub.
        ModelUnreadable: HP305 with the missing, invalid or unsupported keys, or when the file is no readable config.
        WeightsUnreadable: HP703 when a weight file or index is damaged or does not match the config, or some of several
            weight files are missing. A note says that pickled files are not read, or that all files are missing.
    """
    config = read_config(path_or_name, where=where)
    spec = spec_from_config(config.values, name=config.name, where=config.where)
    if spec.family in KEEPS_MORE:
        spec = replace(spec, notes=(*spec.notes, UNMEASURED_ACTIVATIONS.format(family=spec.family)))
    if config.directory is None:
        return spec
    tensors, notes = read_headers(config.directory)
    spec = replace(spec, notes=spec.notes + notes)
    if not tensors:
        return spec
    return check_weights(spec, tensors, config.directory)


def spec_from_config(values: Mapping[str, Any], *, name: str, where: str | None = None) -> ModelSpec:
    """Return the ModelSpec of a config in memory, for instance `model.config.to_dict()`.

    Args:
        values: Content of a config.json.
        name: Display name.
        where: File of the values, for errors.

    Raises:
        ModelUnreadable: HP305 with the missing, invalid or unsupported keys of the config.
    """
    config, notes = _text_part(ConfigView(values, where or f"config of {name}"))
    model_type = _model_type(config)
    dtype, dtype_notes = _dtype(config)
    if model_type == "gpt2":
        config = replace(config, defaults=_gpt2.DEFAULTS, aliases=_gpt2.ALIASES)
        blocks = _gpt2.read_blocks(config)
    else:
        family, family_notes = _family(model_type, config)
        notes += family_notes
        config = replace(config, defaults=family.defaults, aliases=family.aliases)
        blocks = _llama_like.read_blocks(config, family)
    return ModelSpec(
        name=name,
        family=TEXT_PARTS.get(model_type, model_type),
        dtype=dtype,
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        vocab_size=config.integer("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        blocks=blocks,
        notes=(*notes, *dtype_notes),
        max_position_embeddings=config.optional_integer("max_position_embeddings"),
        rules=_gpt2.RULES if model_type == "gpt2" else None,
        quantised=bool(config.values.get("quantization_config")),
    )


def _special_float(value: dict[str, Any]) -> Any:
    """Return the float of an object `{"__float__": "Infinity"}` of transformers; return other objects unchanged."""
    if value.keys() != {"__float__"}:
        return value
    number = value["__float__"]
    if not isinstance(number, (str, int, float)):
        raise ValueError("`__float__` of the config is not a number")
    return float(number)


def read_config_values(path: Path) -> dict[str, Any]:
    """Return the values of a config.json, checked against limits.

    Raises:
        ModelUnreadable: HP305 when the file is unreadable or no JSON object within `CONFIG_LIMITS`, for the errors of
            `check_config`, and when `model_type` or `architectures` has a wrong type.
    """
    try:
        text = read_text(path, CONFIG_LIMITS)
        values = json.loads(text, object_hook=_special_float)
        check_value(values, CONFIG_LIMITS)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        problem = "the config exceeds a size limit" if isinstance(error, LimitExceeded) else "the config is not JSON"
        hint = "fetch config.json again from where the model was published"
        if isinstance(error, OSError):
            problem, hint = "the config cannot be read", f"ls -l {shlex.quote(str(path))}"
        raise ModelUnreadable(problem, where=str(path), got=str(error), hint=hint) from error
    config = ConfigView(values, str(path))
    if not isinstance(values, dict):
        hint = 'a config starts with `{"model_type": ...`'
        config.refuse("the config is not a JSON object", got=type(values).__name__, hint=hint)
    check_config(values, str(path))
    _model_type(config)
    names = values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        config.refuse(
            "`architectures` of the config is not a list of class names",
            got=abbreviated(names),
            allowed='a list such as `["Qwen3ForCausalLM"]`, or null',
        )
    return values


def _text_part(config: ConfigView) -> tuple[ConfigView, tuple[str, ...]]:
    """Return the config of the language part of a multimodal model, and notes; other configs are returned unchanged."""
    values, text = config.values, config.values.get("text_config")
    outer = values.get("model_type")
    if text is None:
        multimodal = "vision_config" in values or "audio_config" in values
        note = f"`{outer}` is multimodal: only its language part is used"
        return config, (note,) if multimodal else ()
    if not isinstance(text, dict):
        config.refuse("`text_config` is not a JSON object", got=abbreviated(text))
    # The outer config contains the dtype and, in files of transformers 5, the tie.
    inherited = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "model_type")
    shared = {k: values[k] for k in inherited if k in values}
    merged = shared | {k: v for k, v in text.items() if v is not None or k not in shared}
    note = f"`{outer}` is multimodal: only its language part (`text_config`) is used"
    return replace(config, values=merged), (note,)


def _model_type(config: ConfigView) -> str:
    model_type = config.values.get("model_type")
    if model_type is None:
        return "unknown"
    if not isinstance(model_type, str):
        problem, hint = "`model_type` of the config is not a string", '"model_type": "llama"'
        config.refuse(problem, got=abbreviated(model_type), hint=f"write for example `{hint}`")
    return model_type


def is_read(values: Mapping[str, Any]) -> bool:
    """Return whether this package reads the model family in a config's values without transformers."""
    family = values.get("model_type")
    return TEXT_PARTS.get(str(family), family) in FAMILIES_READ


def _family(model_type: str, config: ConfigView) -> tuple[Family, tuple[str, ...]]:
    """Return the family of a `model_type`, and notes.

    An unknown type is read as Llama; HP305 if its config lacks one of `STANDARD_KEYS` or has one of `_NOT_GENERIC`.
    """
    known = FAMILIES.get(TEXT_PARTS.get(model_type, model_type))
    if known is not None:
        return known, ()
    values = config.values
    against = [f"{k}={abbreviated(values[k])}" for k in _NOT_GENERIC if values.get(k)]
    if model_type != "unknown":
        against += [f"no `{k}`" for k in STANDARD_KEYS if values.get(k) is None]
    if against:
        config.refuse(
            f"the model family `{model_type}` is not supported, and its config does not describe a plain decoder",
            got=", ".join(against),
            allowed=FAMILIES_READ,
            hint="use a model of a supported family",
        )
    config.require(STANDARD_KEYS)
    note = (
        f"the family `{model_type}` is not known: treated as a Llama-like decoder (gated MLP, "
        "RMSNorm, rotary positions), "
        "so names and counts may differ from the real model"
    )
    return LLAMA, (note,)


def _dtype(config: ConfigView) -> tuple[str, tuple[str, ...]]:
    """Return the dtype in the config, and notes; float32 when the config states none, as in transformers."""
    values = config.values
    dtype = next((values[k] for k in ("dtype", "torch_dtype") if values.get(k) is not None), "auto")
    if dtype == "auto":
        dtype = "float32"
    named = abbreviated(dtype) if isinstance(dtype, (list, dict)) else str(dtype)
    dtype = named.removeprefix("torch.")
    if dtype not in FLOAT_DTYPES.values():
        config.refuse(
            "`dtype` is not a floating-point format",
            got=dtype,
            allowed=tuple(FLOAT_DTYPES.values()),
            hint='write `"dtype": "bfloat16"` in the config',
        )
    quantization = values.get("quantization_config")
    if not quantization:
        return dtype, ()
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    note = f"the published weights are quantised ({method or 'method not named'}); sizes are planned in {dtype}"
    return dtype, (note,)


def _unknown_hint(text: str) -> str:
    near = nearest_path(text)
    # os.path, because pathlib raises for a text that is too long for a path.
    if "/" not in text and not (near and os.path.isfile(f"{near}/config.json")):  # noqa: PTH113
        presets = difflib.get_close_matches(_normal(text), preset_names(), cutoff=0.4)
        if presets:
            return f"did you mean `{presets[0]}`?"
    if (hint := export_hint(text)) is not None:
        return hint
    if os.path.isfile(f"{text}/export/config.json"):  # noqa: PTH113
        near = str(Path(text) / "export")
    if near is not None:
        return f"did you mean `{near}`?"
    if os.path.isdir(text):  # noqa: PTH112
        return f"ls {shlex.quote(text)}, to find the folder that holds config.json"
    return "check the path; a model directory holds config.json"
