"""plan_of: the Plan of a module in hand under a strategy in words, without a search."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hyper_parallel.backends.torch import read_model
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.planner import default_workload, parse_strategy, plan
from hyper_parallel.topology import Supernode, detect_local


def plan_of(
    model: nn.Module,
    strategy: str | Strategy = "",
    workload: Workload | None = None,
    topology: str | Supernode = "local",
) -> Plan:
    """The Plan of a module under one strategy.

    Args:
        model: Any module, with values or on the meta device, Hugging Face or not; only its shapes are read.
        strategy: Keys of a recipe's `parallel` section as `key=value` words, `"dp_shard=4 tp=2"`, or a `Strategy`;
            "" is one rank.
        workload: Sequence length, batch numbers and number formats of a step. None: the formats that the module has,
            and lengths assumed as `plan` does, which the plan's notes say.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.

    Raises:
        UnknownKey: HP101 with the nearest key. BadValue: HP102 for a value that is not allowed.
        NotDivisible: HP203, RuleError: HP204, UnsupportedSharding: HP205 for what cannot be split exactly.
        BatchMismatch: HP308 when the batch does not divide over the data-parallel ranks.
    """
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    spec = read_model(model, name)
    if workload is None:
        workload = replace(
            default_workload(spec, detect_local(strategy.world_size), strategy.world_size),
            **dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), spec.dtype),
        )
    return plan(spec, topology, workload, strategy=strategy)
