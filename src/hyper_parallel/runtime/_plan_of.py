"""plan_of: plan of an existing module under a given strategy, without a search."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

from torch import nn

from hyper_parallel.backends.torch import read_model
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.planner import default_workload, parse_strategy, plan
from hyper_parallel.topology import Supernode, detect_local


def plan_of(
    model: nn.Module,
    strategy: str | Strategy = "",
    workload: Workload | None = None,
    topology: str | Supernode = "local",
) -> Plan:
    """Return the plan of a module under one strategy.

    Args:
        model: Any module, with values or on the meta device, Hugging Face or not; only its shapes are read.
        strategy: Keys of a recipe's `parallel` section as `key=value` words, `"dp_shard=4 tp=2"`, or a `Strategy`;
            "" is one rank.
        workload: Sequence length, batch sizes and dtypes of a step. None: the dtypes of the module, and lengths that
            `plan` assumes and lists in the notes of the plan.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.

    Raises:
        UnknownKey: HP101 with the nearest key. BadValue: HP102 for a value that is not allowed.
        NotDivisible: HP203, RuleError: HP204, UnsupportedSharding: HP205 for parameters that cannot be split exactly.
        BatchMismatch: HP308 when the batch is not divisible by the number of data-parallel ranks.
    """
    words = strategy if isinstance(strategy, str) else None
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    spec = read_model(model, name)
    if workload is None:
        workload = replace(
            default_workload(spec, detect_local(strategy.world_size), strategy.world_size),
            **dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), spec.dtype),
        )
    try:
        return plan(spec, topology, workload, strategy=strategy)
    except HyperParallelError as error:
        if words is not None:
            _say_in_words(error, words)
        raise


def _say_in_words(error: HyperParallelError, words: str) -> None:
    """Rewrite an error that names keys of a recipe in the words of a strategy text."""
    if error.where is not None and error.where.startswith("parallel."):
        error.where = f"strategy: {error.where.removeprefix('parallel.')}"
    changes = error.changes
    if match := re.fullmatch(r"'parallel\.rules=\{(.*)\}'", error.hint or ""):
        changes = {"parallel.rules": dict(pair.split(": ") for pair in match[1].split(", "))}
    keys = {key.removeprefix("parallel.").removeprefix("training."): key for key in changes}
    if not changes or not all(
        key in (f"parallel.{k}", "training.recompute") for k, key in keys.items()
    ):
        return
    words_by_name: dict[str, Any] = {}
    for word in shlex.split(words):
        if "parallel.rules" in changes and "rules." in word:
            continue
        name, _, value = word.removeprefix("parallel.").removeprefix("training.").partition("=")
        words_by_name["tp" if name == "tp_x" else name] = value
    for name, key in keys.items():
        words_by_name["tp" if name == "tp_x" else name] = changes[key]
    rules = words_by_name.pop("rules", None)
    words_text = [f"{name}={_word(value)}" for name, value in words_by_name.items()]
    words_text += [f"rules.{glob}={style}" for glob, style in (rules or {}).items()]
    text = " ".join(words_text)
    error.hint = f'hp.plan_of(model, "{text}")'


def _word(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return str(value).replace(" ", "")
