"""Conversion of a LlamaFactory YAML file to an equivalent recipe, with the origin of each value."""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

from hyper_parallel.config import (
    PAIRED_STAGES,
    PREFERENCE_STAGES,
    SCHEDULE_ARGS,
    LoadedRecipe,
    load_recipe,
    parse_yaml,
    read_mapping,
)
from hyper_parallel.errors import BadValue, Contradiction, RecipeUnreadable, UnknownKey, abbreviated
from hyper_parallel.hub import fetch, parse_name
from hyper_parallel.integration.llamafactory.arguments import YAML_KEYS, HyperParallelArguments
from hyper_parallel.integration.llamafactory.data import check_template, source_of
from hyper_parallel.integration.llamafactory.keys import KNOWN, NEEDED, REFUSED, SAME, TOGETHER, WORDS
from hyper_parallel.model import load_model
from hyper_parallel.received import LimitExceeded
from hyper_parallel.topology import find_accelerators
from hyper_parallel.units import MiB, parse_bytes

logger = logging.getLogger(__name__)

_OFF: Final = (None, False, 0, "", "none", "null")
_ALL: Final = 10**6
"""Value of `checkpoint.keep` that keeps all checkpoints; no run writes more."""

_CHECKPOINTING: Final = "gradient_checkpointing"
"""Key that is on by default in LlamaFactory; results do not depend on it."""
_RECOMPUTES: Final = "torch"
"""Back end that recomputes activations."""

_DEGREES: Final = ("dp_replicate", "dp_shard", "cp", "tp_x", "ep")
_SERVED: Final = {"activation_mode": ("none", "recompute"), "reduce_dtype": (None, "float32"), "device_type": ("auto",)}
"""Supported values of `hyper_parallel_args` keys without a recipe key; the hint shows the last one."""

_WHOLE: Final = (
    "max_steps", "per_device_train_batch_size", "warmup_steps", "max_samples", "freeze_trainable_layers", "lora_rank",
    "lora_alpha",
)  # fmt: skip
_NUMBERS: Final = (*_WHOLE, "warmup_ratio", "val_size")
"""Keys with numbers from which recipe values are computed; keys in `_WHOLE` have integers."""

Layer = tuple[str, dict[str, Any]]
"""(origin of the values, values by dotted key)."""


def load_llamafactory(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a LlamaFactory file as a recipe.

    Args:
        path: The file.
        overrides: Values as `key=value`, for keys of LlamaFactory or of a recipe (`parallel.tp=2`). Recipe keys apply
            last.

    Raises:
        UnknownKey: HP101 for an unknown key, with the nearest key if one is similar, or for an unknown dataset.
        BadValue: HP102 for a missing required key or an unsupported value.
        Contradiction: HP104 for an unsupported option.
        DegreesMismatch: HP301 when the degrees of `hyper_parallel_args` do not divide the ranks.
        NoData: HP602 for data files that cannot be read, and with `template` for a model without a tokenizer.

    Also the errors of `load_recipe`, those of `load_model` with `finetuning_type: freeze`, and those of `fetch` and
    `load_tokenizer` with `template`.
    """
    values, recipe_overrides = read_mapping(path, RecipeUnreadable, "file of LlamaFactory"), []
    origins: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key in KNOWN:
            origins[key] = f"{path}: {key} (set by command line)"
            values[key] = _parsed(key, value, origins[key])
        else:
            recipe_overrides.append(override)
    for key, value in values.items():
        _check(key, value, origins.get(key, f"{path}: {key}"))
    defaults = {key: default for key, (_, default) in {**SAME, **TOGETHER}.items()}
    if missing := [k for k, d in defaults.items() if d == NEEDED and values.get(k) is None]:
        key = missing[0]
        hint = f"add the line `{key}: {'true' if key == 'do_train' else 'VALUE'}`"
        raise BadValue(f"required key `{key}` is missing", where=str(path), got="nothing", hint=hint)
    values |= {key: _number(key, values[key], f"{path}: {key}") for key in _NUMBERS if key in values}
    backend = [o.partition("=")[2] for o in recipe_overrides if o.startswith("backend=")]
    keeps = backend[-1:] not in ([], [_RECOMPUTES]) and _CHECKPOINTING not in values
    if keeps:
        defaults[_CHECKPOINTING] = False
    layers = list(_layers({**defaults, **values}, path, recipe_overrides))
    loaded = load_recipe(path, recipe_overrides, layers)
    is_default = keeps and not values.get(f"disable_{_CHECKPOINTING}")
    if is_default and loaded.recipe.training.recompute == "none":
        name = loaded.recipe.backend
        logger.info("note: backend=%s keeps activations instead of recomputing them", name)
    return loaded


def _parsed(key: str, text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, LimitExceeded) as error:
        raise BadValue(
            f"the value of `{key}` is not YAML",
            where=where,
            got=abbreviated(text),
            hint=f"close all brackets and quotes, and write '{key}=VALUE' on the command line",
        ) from error


def _number(key: str, value: Any, where: str) -> Any:
    """Return a value as a number, or None if the key may be null; raise BadValue (HP102) for any other value."""
    default = {**SAME, **TOGETHER}[key][1]
    if value is None and (default is None or key == "val_size"):
        return None
    is_whole = key in _WHOLE
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # YAML reads 1e-1 as a text
            number = float(value)
            if math.isfinite(number) and (not is_whole or number == int(number)):
                return int(number) if is_whole else number
    raise BadValue(
        f"`{key}` is not {'an integer' if is_whole else 'a number'}",
        where=where,
        got="null" if value is None else abbreviated(value),
        allowed=("an integer" if is_whole else "a number") + (" or null" if default is None else ""),
        hint=f"{key}={'null' if default is None else default}",
    )


def _check(key: str, value: Any, where: str) -> None:
    """Raise an error for an unknown key (HP101), a set key of `REFUSED` (HP104), or a value not in `WORDS` (HP102)."""
    if key not in KNOWN:
        near = difflib.get_close_matches(key, KNOWN, n=1)
        raise UnknownKey(
            f"the LlamaFactory key `{key}` is not supported",
            where=where,
            hint=f"write `{near[0]}`" if near else None,
        )
    if key in REFUSED and value not in _OFF:
        raise Contradiction(
            f"the LlamaFactory setting `{key}` is not supported",
            where=where,
            got=value,
            hint=f"{key}=null",
        )
    if key in WORDS and (not isinstance(value, Hashable) or value not in WORDS[key]):
        raise BadValue(
            f"`{key}` has a value that is not supported",
            where=where,
            got=abbreviated(value) if isinstance(value, list | dict) else _yaml_word(value),
            allowed=[_yaml_word(word) for word in WORDS[key]],
            hint=f"{key}={_yaml_word(next(iter(WORDS[key])))}" if len(WORDS[key]) == 1 else None,
        )


def _yaml_word(value: Any) -> Any:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)


def _layers(v: dict[str, Any], path: Path, overrides: Sequence[str]) -> Iterator[Layer]:
    stage, kind = v["stage"], v["finetuning_type"]
    for key, (target, _) in SAME.items():
        section, value = target.partition(".")[0], WORDS[key][v[key]] if key in WORDS else v[key]
        if (section == "lora" and kind != "lora") or (section in PREFERENCE_STAGES and section != stage):
            continue
        yield key, {target: value}
    yield "LlamaFactory", {"training.eval_tokens": 2**40}
    yield from _schedule_layers(v, path)
    yield "LlamaFactory", {"checkpoint.every_minutes": 0}
    init = "random" if v["train_from_scratch"] else "pretrained"
    yield "train_from_scratch", {"model.init": init}
    yield "disable_shuffling", {"data.shuffle": not v["disable_shuffling"]}
    if stage in PAIRED_STAGES:
        if stage != "rm":
            yield "pref_beta", {f"{stage}.beta": v["pref_beta"]}
        rows = 2 * v["per_device_train_batch_size"]
        yield "per_device_train_batch_size", {"training.microbatch": rows}
    if v["save_total_limit"] is None:
        yield "save_total_limit", {"checkpoint.keep": _ALL}
    if not WORDS["save_strategy"][v["save_strategy"]]:
        yield "save_strategy", {"checkpoint.every": 0}
    resume = "never" if v["overwrite_output_dir"] else "auto"
    yield "overwrite_output_dir", {"checkpoint.resume": resume}
    names = v["report_to"] if isinstance(v["report_to"], list) else [v["report_to"]]
    yield "report_to", {"training.report_to": [name for name in names if name not in _OFF]}
    if v["max_steps"] > 0:
        yield "max_steps", {"training.steps": v["max_steps"]}
    else:
        yield "num_train_epochs", {"training.epochs": v["num_train_epochs"]}
    warm = v["lr_scheduler_type"] != "constant"
    if warm and not v["warmup_steps"]:
        yield "warmup_ratio", {"training.warmup_ratio": v["warmup_ratio"]}
    else:
        yield "warmup_steps", {"training.warmup_steps": v["warmup_steps"] if warm else 0}
    yield "adam_beta1", {"training.betas": [v["adam_beta1"], v["adam_beta2"]]}
    yield "max_grad_norm", {"training.max_grad_norm": v["max_grad_norm"] or None}
    dtype = "bfloat16" if v["bf16"] else "float16" if v["fp16"] else "float32"
    yield "bf16" if v["bf16"] else "fp16", {"training.dtype": dtype}
    keeps = v["disable_gradient_checkpointing"] or not v["gradient_checkpointing"]
    yield "disable_gradient_checkpointing", {"training.recompute": "none" if keeps else "full"}
    packs = v["neat_packing"] or (stage == "pt" if v["packing"] is None else v["packing"])
    masks = bool(v["neat_packing"]) if packs else None
    yield "packing", {"data.packing": packs, "data.mask_documents": masks}
    yield from _trained_layers(v, kind, path)
    yield from _data_layers(v, path, overrides)
    yield from _layout_layers(v, path, overrides)


def _trained_layers(v: dict[str, Any], kind: str, path: Path) -> Iterator[Layer]:
    if kind == "lora":
        targets = [t.strip() for t in str(v["lora_target"]).split(",")]
        extra = [t.strip() for t in str(v["additional_target"] or "").split(",") if t]
        yield "lora_alpha", {"lora.lora_alpha": v["lora_alpha"] or 2 * v["lora_rank"]}
        modules = "all-linear" if targets == ["all"] else targets
        yield "lora_target", {"lora.target_modules": modules}
        yield "additional_target", {"lora.modules_to_save": extra}
    elif kind == "freeze":
        frozen = _frozen(str(v["model_name_or_path"]), v["freeze_trainable_layers"], path)
        yield "freeze_trainable_layers", {"training.freeze": frozen}


def _schedule_layers(v: dict[str, Any], path: Path) -> Iterator[Layer]:
    """Yield `training.lr_schedule_args` with LlamaFactory's defaults, and `training.min_lr_ratio`; raise HP102."""
    name, args = v["lr_scheduler_type"], v["lr_scheduler_kwargs"] or {}
    args = _parsed("lr_scheduler_kwargs", args, f"{path}: lr_scheduler_kwargs") if isinstance(args, str) else args
    needed, hint = (), "lr_scheduler_kwargs=null"
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        needed, hint = ("min_lr", "min_lr_rate"), "'lr_scheduler_kwargs={min_lr_rate: 0.1}'"
    elif name == "warmup_stable_decay" and v["max_steps"] <= 0:
        hint = "give the number of steps, max_steps=STEPS, or 'lr_scheduler_kwargs={num_decay_steps: STEPS}'"
    if not isinstance(args, dict):
        raise BadValue(
            "`lr_scheduler_kwargs` is not a mapping",
            where=f"{path}: lr_scheduler_kwargs",
            got=args,
            allowed="a mapping of arguments, or null",
            hint=hint,
        )
    if name == "warmup_stable_decay":
        if v["max_steps"] > 0:
            warm = v["warmup_steps"] or math.ceil(v["warmup_ratio"] * v["max_steps"])
            stable = (rest := v["max_steps"] - warm) // 3
            args = {"num_stable_steps": stable, "num_decay_steps": rest - stable, **args}
        needed = ("num_decay_steps",)
    if needed and not {*needed} & {*args}:
        raise BadValue(
            f"the schedule {name} needs {' or '.join(needed)}",
            where=f"{path}: lr_scheduler_kwargs",
            got=args or "nothing",
            allowed=list(SCHEDULE_ARGS[name]),
            hint=hint,
        )
    if args:
        yield "lr_scheduler_kwargs", {"training.lr_schedule_args": args}
    ends_itself = name in SCHEDULE_ARGS and "min_lr_rate" not in SCHEDULE_ARGS[name]
    if not ends_itself or name in ("constant_with_warmup", "warmup_stable_decay"):
        yield "LlamaFactory", {"training.min_lr_ratio": 0.0}


def _layout_layers(v: dict[str, Any], path: Path, overrides: Sequence[str]) -> Iterator[Layer]:
    keys = {key: v[f"hyper_parallel_{key}"] for key in YAML_KEYS}
    arguments = HyperParallelArguments.from_yaml(v["hyper_parallel_args"], keys)
    for name, served in _SERVED.items():
        if (value := getattr(arguments, name)) not in served:
            raise Contradiction(
                f"this value of `{name}` in hyper_parallel_args is not supported",
                where=f"{path}: hyper_parallel_args",
                got=value,
                allowed=[value_of_key for value_of_key in served if value_of_key is not None],
                hint=json.dumps({name: served[-1]}),
            )
    if arguments.activation_mode == "recompute":
        yield "hyper_parallel_args", {"training.recompute": "full"}
    if arguments.param_dtype is not None:
        yield "hyper_parallel_args", {"training.dtype": arguments.param_dtype}
    if any(o.startswith("parallel") for o in overrides):
        return
    ranks = _ranks(overrides) or arguments.smallest_world
    layout = arguments.strategy(ranks)
    degrees = {f"parallel.{d}": getattr(layout, d) for d in _DEGREES}
    if not layout.reshard_after_forward:
        degrees["parallel.reshard_after_forward"] = False
    has_degrees = arguments.smallest_world > 1
    yield f"LlamaFactory: {'hyper_parallel_*' if has_degrees else 'data-parallel ranks'}", degrees


def _record_bytes(overrides: Sequence[str]) -> int:
    """Return the last override of `data.max_record_bytes` in bytes; without a valid override, its default."""
    texts = [o.partition("=")[2] for o in overrides if o.startswith("data.max_record_bytes=")]
    with suppress(ValueError):
        return parse_bytes(texts[-1]) if texts else 64 * MiB
    return 64 * MiB


def _names(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else str(value).split(",")
    return [str(text).strip() for text in texts]


def _one_name(value: Any, path: Path) -> str:
    names = _names(value)
    if len(names) != 1:
        raise BadValue(
            "`eval_dataset` names several datasets, but a recipe has one source for evaluation"
            if names
            else "`eval_dataset` is an empty list",
            where=f"{path}: eval_dataset",
            got=names,
            allowed="one dataset, or null",
            hint=f"eval_dataset={names[0] if names else 'null'}",
        )
    return names[0]


def _data_layers(v: dict[str, Any], path: Path, overrides: Sequence[str]) -> Iterator[Layer]:
    stage, directory, most = v["stage"], str(v["dataset_dir"]), _record_bytes(overrides)
    parts = [source_of(name, directory, stage, most) for name in _names(v["dataset"])]
    limit = v["max_samples"] or 2**62
    if len(parts) == 1:
        yield "dataset", {f"data.{key}": value for key, value in parts[0][0].items()}
    else:
        yield "dataset", {"data.source": [{**one, "weight": min(n, limit)} for one, n in parts]}
    records, num_held_out = sum(min(n, limit) for _, n in parts), v["val_size"] or 0.0
    holdout = num_held_out / records if num_held_out >= 1 else num_held_out
    yield "val_size", {"data.holdout": holdout}
    if v["eval_dataset"] is not None:
        held_out, _ = source_of(_one_name(v["eval_dataset"], path), directory, stage, most)
        _check_same_names(parts[0][0], held_out, f"{path}: eval_dataset")
        yield "eval_dataset", {"data.validation": held_out["source"]}
    if WORDS["eval_strategy"][v["eval_strategy"]]:
        yield "eval_steps", {"training.eval_every": v["eval_steps"] or v["logging_steps"]}
    if v["template"] is not None and stage != "pt":
        model = str(v["model_name_or_path"])
        if (name := parse_name(model)) is not None:
            where = f"{path}: model_name_or_path"
            model = str(fetch(name, "tokenizer", where=where, key="model_name_or_path"))
        check_template(str(v["template"]), model, f"{path}: template")


def _check_same_names(training: dict[str, Any], held_out: dict[str, Any], where: str) -> None:
    for key in ("format", "text_key", "columns", "roles", "ignore_keys"):
        if training.get(key) != held_out.get(key):
            raise Contradiction(
                "the datasets have different keys or tags, but a recipe has one setting for both",
                where=where,
                got=f"{key}: {training.get(key)} and {held_out.get(key)}",
                allowed="the same keys and tags in both datasets",
                hint="val_size=0.02 eval_dataset=null",
            )


def _frozen(model: str, layers: int, path: Path) -> list[str]:
    """Return globs of the parameters outside of the last `layers` (if negative, the first -`layers`) decoder layers."""
    spec = load_model(model, where=f"{path}: model_name_or_path")
    names = {p.name for block in spec.blocks for p in block.params if not p.tied_to}
    prefixes = sorted({name.partition("*")[0] for name in names if "*" in name})
    if len(prefixes) != 1:
        raise Contradiction(
            "`finetuning_type: freeze` needs a model with one list of layers",
            where=f"{path}: finetuning_type",
            got=prefixes or "no list of layers",
            hint="finetuning_type=lora",
        )
    prefix = prefixes[0]
    all_layers = range(spec.num_layers)
    trained = all_layers[-layers:] if layers > 0 else all_layers[:-layers]
    frozen = [f"{prefix}{layer}.*" for layer in all_layers if layer not in trained]
    return sorted([*frozen, *(name for name in names if "*" not in name)])


def _ranks(overrides: Sequence[str]) -> int | None:
    """Return the number of ranks by `launch.*`, launcher or accelerators, in this order; None if all are unknown."""
    values = dict(o.partition("=")[::2] for o in overrides if o.startswith("launch.n"))
    # `load_recipe` refuses other values than positive integers and null.
    if local := _positive(values.get("launch.nproc_per_node")):
        return local * (_positive(values.get("launch.nnodes")) or 1)
    if "RANK" in os.environ:
        return _positive(os.environ.get("WORLD_SIZE")) or 1
    tasks = _positive(os.environ.get("SLURM_NTASKS")) or 1 if "SLURM_STEP_ID" in os.environ else 1
    return tasks if tasks > 1 else len(find_accelerators()) or None


def _positive(text: str | None) -> int | None:
    is_number = text is not None and text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 10
    return (int(text) or None) if is_number and text else None
