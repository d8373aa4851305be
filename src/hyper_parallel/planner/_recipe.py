"""The plan of a recipe: its explicit degrees, or with `parallel: auto` the planner's choice."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final, Literal

import yaml
from pydantic import Field

from hyper_parallel.config import Parallel, Recipe, parse_yaml, validated
from hyper_parallel.errors import BadValue, Contradiction, DegreesMismatch
from hyper_parallel.ir import Plan, Rule, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.mpmd import check_virtual
from hyper_parallel.planner.pins import PINNABLE, check_pins
from hyper_parallel.planner.plan_builder import evaluate, search
from hyper_parallel.planner.refusals import check_degrees
from hyper_parallel.planner.request import HostMemory, PlanRequest, resolve
from hyper_parallel.planner.trained_share import trained_share
from hyper_parallel.received import LimitExceeded

_SHARED: Final = tuple(
    f.name for f in fields(Strategy) if f.name in Parallel.model_fields and f.name != "rules"
)
"""Keys of a recipe's `parallel:` section that a strategy has under the same name."""
_ASKED_APART: Final = ("zero", "cp_ulysses")
"""Keys whose value may also mean that nothing was asked."""
ONE_STAGE: Final = ("gpipe", "1f1b", "zb-h1")
"""Schedules whose ranks hold one stage each."""


def plan_recipe(
    recipe: Recipe,
    world_size: int | None = None,
    where: Callable[[str], str] = str,
    model: ModelSpec | None = None,
    trained: float | None = None,
) -> Plan:
    """The plan that a recipe trains with.

    With explicit degrees exactly those are planned. With `parallel: auto` the degrees that the recipe does not name
    are chosen, among the axes that this version can run, for the number of tokens that the recipe names; where it
    names none, one sequence per rank and step, so that the choice of axes does not change the training.

    Args:
        recipe: The run.
        world_size: Ranks that were already started and train, with `grpo.rollout_ranks: auto` all; None: the product
            of explicit degrees; with auto `parallel.world_size`, else every accelerator of the topology, or 4 on a
            machine without one.
        where: Tells where the value of a key was set, for errors; `LoadedRecipe.where`.
        model: The recipe's model, where it has been read already; None: it is read from `model.path`.
        trained: Elements with a gradient over the parameters of the model; None: estimated from the specification.

    Raises:
        DegreesMismatch: HP301 when explicit degrees do not multiply to the ranks.
        HyperParallelError: What `plan` raises.
    """
    parallel = recipe.parallel
    strategy = _strategy(recipe)
    if not parallel.auto:
        culprit = where(_culprit(strategy))
        check_degrees(strategy, parallel.world_size, where("parallel.world_size"))
        check_degrees(strategy, world_size, culprit)
        request = _request(recipe, model, strategy.world_size, trained)
        if recipe.stage == "grpo":
            request = request.beside(strategy.world_size + recipe.grpo.sampling_ranks)
        plan = evaluate(request, strategy, culprit, world_size or parallel.world_size)
        if recipe.stage == "grpo":
            from hyper_parallel.planner._roles import with_roles

            plan = with_roles(recipe, request, plan, where)
        return plan
    if None not in (world_size, parallel.world_size) and world_size != parallel.world_size:
        raise DegreesMismatch(
            f"the recipe plans for {parallel.world_size} ranks, but {world_size} were started",
            where=where("parallel.world_size"),
            got=parallel.world_size,
            allowed=world_size,
            changes={"parallel.world_size": world_size},
        )
    # What no column of the search stands for.
    base = Strategy(
        rules=strategy.rules,
        schedule_file=strategy.schedule_file,
        stage_layers=strategy.stage_layers,
    )
    request = _request(recipe, model, world_size or parallel.world_size, trained)
    pins = _pins(recipe, strategy, where)
    request = replace(request, from_recipe=True, executable=True, pins=pins, base=base)
    if recipe.stage == "grpo":
        from hyper_parallel.planner._roles import split_devices

        # What samples: neither pipelines nor cut sequences, and one axis of tensor parallelism.
        request = replace(request, pins={**pins, "pp": 1, "cp": 1, "tp_y": pins.get("tp_y", 1)})
        return split_devices(recipe, request.with_headroom(), where)
    return search(request.with_headroom())


def _request(
    recipe: Recipe, model: ModelSpec | None, num_devices: int | None, trained: float | None
) -> PlanRequest:
    """Model, machine and work of a recipe; where it names no batch number, one sequence per rank and step.

    With a goal of `offload` the budget is what a device may hold, and host memory holds the rest.
    """
    t, offload = recipe.training, recipe.offload
    stored = "float64" if t.dtype == "float64" else "float32"
    given = any((t.tokens_per_step, t.microbatch, t.accumulation_steps))
    workload = Workload(
        recipe.data.seq_len,
        tokens_per_step=t.tokens_per_step,
        microbatch=t.microbatch if given else 1,
        accumulation_steps=t.accumulation_steps,
        compute_dtype=t.dtype,
        param_dtype=stored,
        reduce_dtype=stored,
        optimizer=t.optimizer,
    )
    request = resolve(model or recipe.model.path, recipe.topology, workload, num_devices)
    share = trained_share(request.model, recipe) if trained is None else trained
    if share != 1.0:
        workload = replace(request.workload, trained=share)
        note = f"{share:.3%} of the parameters are trained; passes are timed as if all were"
        request = replace(request, workload=workload, notes=(*request.notes, note))
    if recipe.stage == "grpo":
        request = replace(request, together=recipe.grpo.num_generations)
    if not given and recipe.parallel.auto:
        tokens = workload.seq_len * request.num_devices * request.together
        workload = replace(workload, tokens_per_step=tokens, microbatch=None)
        each = "one sequence" if request.together == 1 else "one group of completions"
        note = f"tokens per step assumed: {each} per rank, {tokens}"
        request = replace(request, workload=workload, notes=(*request.notes, note))
    if t.optimizer not in ("adamw", "adam"):
        note = f"optimizer states and time of {t.optimizer} are predicted as those of adamw: two per parameter"
        request = replace(request, notes=(*request.notes, note))
    if not offload.on:
        return request
    budget = offload.budget if isinstance(offload.budget, int) else None
    if budget is not None:
        budget = min(budget, request.machine.memory_bytes)
    host = HostMemory(
        None if offload.dram is None else float(offload.dram),
        None if offload.bandwidth is None else float(offload.bandwidth),
        offload.recompute,
    )
    return replace(request, offload=host, capacity_bytes=budget)


def _pins(recipe: Recipe, strategy: Strategy, where: Callable[[str], str]) -> dict[str, int]:
    """What a recipe with `parallel: auto` names, as pins of the search.

    Choices that belong to an axis (shapes to tp_y, the kind to cp, the schedule to pp) say how it is used where the
    search takes it.

    Raises:
        Contradiction: HP104 for choices that no degrees can have.
        UnsupportedSharding: HP205 for virtual stages that the schedule does not have.
    """
    p, given = recipe.parallel, recipe.parallel.model_fields_set
    asked = [n for n in Parallel.model_fields if n in given & {*PINNABLE} - {*_ASKED_APART}]
    named = {n: getattr(p, n) for n in asked}
    if "recompute" in recipe.training.model_fields_set:
        named["recompute"] = recipe.training.recompute
    # Every pipeline has the schedule of the recipe, 1F1B where it names none.
    pins = check_pins({**named, "schedule": strategy.schedule})
    if p.zero is not None:
        pins["zero"] = p.zero
    elif "reshard_after_forward" in given:
        pins["zero"] = 3 if p.reshard_after_forward else 2
    if p.cp_ulysses > 1:
        if "cp_kind" in given and p.cp_kind != "hybrid":
            raise Contradiction(
                "`cp_ulysses` is a choice of cp_kind=hybrid",
                where=where("parallel.cp_ulysses"),
                got=f"cp_kind={p.cp_kind}, cp_ulysses={p.cp_ulysses}",
                changes={"parallel.cp_kind": "hybrid"},
            )
        pins["cp_ulysses"] = p.cp_ulysses
    if "virtual_stages" in given:
        check_virtual(strategy, where("parallel.virtual_stages"))
    key = "stage_layers" if p.stage_layers else "schedule_file"
    if getattr(p, key):
        missing = "pp" if p.pp == 1 else "virtual_stages"
        if p.pp == 1 or ("virtual_stages" not in given and p.schedule not in ONE_STAGE):
            raise Contradiction(
                f"`{key}` is made for certain stages, which `auto` may not choose",
                where=where(f"parallel.{key}"),
                got=f"{key} without {missing}",
                hint=f"parallel.{missing}=2",
            )
        if p.stage_layers and len(p.stage_layers) != strategy.stages:
            raise Contradiction(
                "`stage_layers` has one number for every stage",
                where=where("parallel.stage_layers"),
                got=f"{len(p.stage_layers)} numbers, {strategy.stages} stages",
                changes={"parallel.pp": max(1, len(p.stage_layers) // strategy.virtual_stages)},
            )
        pins["vpp"] = strategy.virtual_stages
    return pins


def _culprit(strategy: Strategy) -> str:
    """Key of the degree that an error of this strategy is most likely about."""
    degrees = strategy.degrees()
    suspects = ("pp", "cp", "tp_y", "ep", "tp_x", "dp_shard", "dp_replicate")
    return "parallel." + next((axis for axis in suspects if degrees[axis] > 1), "dp_shard")


def _strategy(recipe: Recipe) -> Strategy:
    t = recipe.training
    return strategy_of(
        recipe.parallel,
        recompute=t.recompute,
        recompute_layers=t.recompute_layers,
        offload=recipe.offload.on,
    )


def strategy_of(parallel: Parallel, **others: Any) -> Strategy:
    """The strategy of a `parallel` section and what other sections say."""
    return Strategy(
        **{name: getattr(parallel, name) for name in _SHARED},
        rules=tuple(Rule(pattern, style) for pattern, style in parallel.rules.items()),
        **others,
    )


_WHERE = "strategy"
_PREFIXES = ("parallel.", "training.")


class StrategyWords(Parallel):
    """The keys of a strategy: those of a recipe's `parallel` section, and what its `training` says of recompute."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations redone in backward."""
    recompute_layers: int | None = Field(default=None, ge=1)
    """Layers of every rank that it applies to. None: all."""


def parse_strategy(text: str) -> Strategy:
    """The strategy that words say.

    Args:
        text: Keys of a recipe as `key=value`, separated by spaces; values are YAML, and `parallel.` may be left out:
            `dp_shard=4 tp=2`, `pp=2 schedule=zb-h1 recompute=full`, `tp=2 rules.layers.*.up=colwise`.

    Raises:
        UnknownKey: HP101 with the nearest key. BadValue: HP102 for a word or value that is not allowed.
    """
    given: dict[str, Any] = {}
    for word in shlex.split(text):
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise BadValue(
                f"`{word}` is not a choice of a strategy",
                where=_WHERE,
                got=text,
                allowed="key=value",
                hint="dp_shard=4 tp=2",
            )
        for prefix in _PREFIXES:
            key = key.removeprefix(prefix)
        rule = key.removeprefix("rules.")
        if rule == key:
            given[key] = _value(key, value)
        else:
            given.setdefault("rules", {})[rule] = value
    words = validated(
        StrategyWords,
        given,
        lambda key: f"{_WHERE}: {key}" if key else _WHERE,
        lambda key, value, _: f"{key}={value}",
    )
    if words.auto or words.world_size is not None:
        raise BadValue(
            "a strategy names its degrees; nothing is searched",
            where=_WHERE,
            got=text,
            allowed="degrees, whose product is the number of ranks",
            hint="dp_shard=4 tp=2",
        )
    return strategy_of(words, recompute=words.recompute, recompute_layers=words.recompute_layers)


def _value(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, LimitExceeded) as cause:
        raise BadValue(
            f"the value of `{key}` is not YAML", where=f"{_WHERE}: {key}", got=text
        ) from cause
