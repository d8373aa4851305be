"""`parallelize` applies a plan to a model. `plan_of` returns the plan of a module under a given strategy.

`save_pretrained` of a parallelized Hugging Face model writes the same files as `hp.save_pretrained`.
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Final

from torch import nn

import hyper_parallel
from hyper_parallel.backends.torch import Ranks, Routing, apply_plan, read_model
from hyper_parallel.errors import BadValue, Caller, reported_by, value_text
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.planner import default_workload, parse_strategy, plan
from hyper_parallel.runtime._world import World
from hyper_parallel.topology import Supernode, detect_local


def parallelize(
    model: nn.Module,
    plan: Plan,
    world: World | None = None,
    ranks: Sequence[int] | None = None,
    *,
    routing: Routing | None = None,
    average: bool = False,
    one_order: bool = True,
    sync_replicas: bool = True,
) -> nn.Module:
    """Apply a plan to an unmodified model, in place.

    Args:
        model: Any `nn.Module`; Hugging Face models provide sharding rules. Parameters have equal values on every rank,
            or are on the meta device.
        plan: Plan of the model.
        world: World whose ranks run the model; None: join the world of the launcher until the process ends.
        ranks: Ranks of the world that run this model and call this function; None: all ranks. Meanwhile, other ranks
            call `world.mesh(plan.strategy, ranks)` and `world.expert_mesh(plan.strategy, ranks)`.
        routing: Options of expert routing; None: as implemented by the model.
        average: Whether `loss.backward()` averages gradients over data-parallel ranks, as `DistributedDataParallel`
            does. This suits loops whose loss is the mean over a rank's own data. If False, gradients are summed. No
            effect on `forward_backward`.
        one_order: Whether all ranks call the submodules in the order of the first steps and equally often; a step may
            skip some submodules. If False, order and number of calls may differ between ranks. FSDP then needs a
            message between hosts for every module that it gathers.
        sync_replicas: Whether to reduce gradients over replicas. If False, the caller sums the gradients; supported
            only for unsharded replicas.

    Returns:
        `model` with sharded parameters of the same names. FSDP replaces its class by a subclass, as in `fully_shard`.

    Raises:
        BadValue: HP102 when `ranks` has a repeated rank, or a rank outside the world.
        DegreesMismatch: HP301 when the plan is for another number of ranks.
        PlanMismatch: HP307 when the plan is for another model.
        NotDivisible: HP203 for a dimension that the degrees do not divide.
        RuleError: HP204 for a sharding rule that matches no parameter.
        UnsupportedSharding: HP205 for an unsupported layout.
        HyperParallelError: Errors of `World.join`, if `world` is None.
    """
    if world is None:
        world = World.join()
        atexit.register(_end, world)
    strategy = plan.strategy
    mixed = plan.workload.compute_dtype != plan.workload.param_dtype
    placed = Ranks(None, 0, world.device)
    if strategy.world_size > 1 or world.world_size > 1 or mixed:
        mesh = world.mesh(strategy, ranks)
        expert_mesh = world.expert_mesh(strategy, ranks)
        position = mesh.mesh.flatten().tolist().index(world.rank)
        placed = Ranks(mesh, position, world.device, world.group(mesh), expert_mesh)
    options = {"average": average, "one_order": one_order, "sync_replicas": sync_replicas}
    apply_plan(model, plan, placed, routing, **options)
    attach_save_pretrained(model)
    return model


def _end(world: World) -> None:
    """Leave the world before the interpreter exits, and free unreachable process groups by garbage collection.

    A destroyed process group exists until its last reference is gone. If the group outlives the interpreter, its
    threads may free a tensor too late, which ends the process by SIGABRT.
    """
    world.leave()
    gc.collect()


def plan_of(
    model: nn.Module,
    strategy: str | Strategy = "",
    workload: Workload | None = None,
    topology: str | Supernode = "local",
) -> Plan:
    """Return the plan of a module under a given strategy, without a search.

    Args:
        model: Any module, also on the meta device; only its structure and parameter shapes are read.
        strategy: A `Strategy`, or a text of keys as in `"dp_shard=4 tp=2 recompute=full overlap.tp=chunks"`: keys of a
            recipe's section `parallel`, `recompute` and `overlap.*`. An empty text means a single rank.
        workload: Sequence length, batch sizes and dtypes of a step. None: the dtypes of the module, and default sizes,
            which the attribute `workload` of the plan contains.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.

    Raises:
        UnknownKey: HP101 for an unknown key of `strategy`.
        BadValue: HP102 for an invalid value of `strategy`.
        NotDivisible: HP203 for a dimension that the degrees do not divide.
        RuleError: HP204 for a sharding rule that matches no parameter.
        UnsupportedSharding: HP205 for an unsupported layout.
        BatchMismatch: HP308 when the number of data-parallel ranks does not divide the batch.
        HyperParallelError: Other errors of `hp.plan`, such as those of `topology`.
    """
    words = strategy if isinstance(strategy, str) else None
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy, of_step=True)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    spec = read_model(model, name)
    if workload is None:
        workload = replace(
            default_workload(spec, detect_local(strategy.world_size), strategy.world_size),
            **dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), spec.dtype),
            microbatch=2 if strategy.overlap.half_batch else None,
        )
    with nullcontext() if words is None else reported_by(StrategyText(words)):
        return plan(spec, topology, workload, strategy=strategy)


@dataclass(frozen=True, slots=True)
class StrategyText(Caller):
    """Call of `plan_of`, or command with `option`, whose user wrote the strategy as a text of recipe keys."""

    text: str
    option: str | None = None

    def where(self, text: str) -> str:
        """Return the place of a recipe key: the option or `strategy: KEY` for section `parallel`, else `text`."""
        name = self.option or f"strategy: {text.removeprefix('parallel.')}"
        return name if text.startswith("parallel.") else text

    def hint(self, changes: Mapping[str, object]) -> str | None:
        """Return the call or option with the changed strategy; None if a strategy cannot express a key of `changes`."""
        keys = {key.removeprefix("parallel.").removeprefix("training."): key for key in changes}
        others = [key for k, key in keys.items() if key not in (f"parallel.{k}", "training.recompute")]
        if any(key.partition(".")[0] != "overlap" for key in others):
            return None
        words: dict[str, object] = {}
        for word in shlex.split(self.text):
            if ("rules" in keys and "rules." in word) or ("overlap" in keys and word.startswith("overlap.")):
                continue
            name, _, value = word.removeprefix("parallel.").removeprefix("training.").partition("=")
            words["tp" if name == "tp_x" else name] = value
        words |= {"tp" if name == "tp_x" else name: changes[key] for name, key in keys.items()}
        if isinstance(rules := words.pop("rules", None), Mapping):
            words |= {f"rules.{glob}": style for glob, style in rules.items()}
        texts = {name: value_text(value).replace(" ", "") for name, value in words.items()}
        defaults = () if self.option is None else ("1", "[]", "")
        text = " ".join(f"{name}={value}" for name, value in texts.items() if value not in defaults)
        if self.option is None:
            return f'hp.plan_of(model, "{text}")'
        return f'{self.option} "{text}"' if text else f"leave out {self.option}"


_DEFAULTS: Final = {
    "state_dict": None,
    "push_to_hub": False,
    "variant": None,
    "save_original_format": True,
    "distributed_checkpoint": False,
    "safe_serialization": True,
    "save_peft_format": True,
    "token": None,
}
"""Arguments of transformers' `save_pretrained` for which only the default value is supported."""


def attach_save_pretrained(model: nn.Module) -> None:
    """Replace the method `save_pretrained` of a model, if there is one, so that it can write sharded parameters."""
    if callable(getattr(model, "save_pretrained", None)):
        object.__setattr__(model, "save_pretrained", MethodType(_save_pretrained, model))


def _save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    **kwargs: Any,
) -> None:
    """Write the model to a directory that `from_pretrained` can load; collective over all ranks.

    Args:
        model: Parallelized model.
        save_directory: Directory to write.
        is_main_process: Ignored: rank 0 writes.
        max_shard_size: Maximum file size, in bytes or as a text such as `5GB`; None: 5 GiB.
        kwargs: Arguments named in `_DEFAULTS`, each only with its default value.

    Raises:
        BadValue: HP102 for an unsupported argument.
        ValueError: `max_shard_size` is a text that is not a size.
        HyperParallelError: Errors of `hp.save_pretrained`.
    """
    from huggingface_hub.serialization._base import parse_size_to_int

    for name, value in kwargs.items():
        if name in _DEFAULTS and value == _DEFAULTS[name]:
            continue
        size_option = "" if max_shard_size is None else f", max_shard_size={max_shard_size!r}"
        raise BadValue(
            f"`save_pretrained` of a parallelized model does not support `{name}`",
            got=f"{name}={type(value).__name__}" if name == "state_dict" else f"{name}={value!r}",
            allowed=f"{name}={_DEFAULTS[name]!r}" if name in _DEFAULTS else sorted(_DEFAULTS),
            hint=f"model.save_pretrained({os.fspath(save_directory)!r}{size_option})",
        )
    text = isinstance(max_shard_size, str)
    size = parse_size_to_int(max_shard_size) if text else max_shard_size
    hyper_parallel.save_pretrained(model, save_directory, max_file_bytes=size)
