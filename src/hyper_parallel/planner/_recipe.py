"""Plan of a recipe: for the degrees in the recipe, or with `parallel: auto` for degrees that the planner chooses."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Final, Literal

import yaml
from pydantic import Field

from hyper_parallel.config import Overlap as OverlapSection
from hyper_parallel.config import Parallel, Recipe, parse_yaml, validated
from hyper_parallel.cost import check_stage_layers
from hyper_parallel.errors import BadValue, Contradiction, DegreesMismatch, UnsupportedSharding
from hyper_parallel.ir import Overlap, Plan, Rule, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.mpmd import check_virtual
from hyper_parallel.planner.bounds import TIE
from hyper_parallel.planner.pins import AUTO_OVERLAP, OVERLAPS, PINNABLE, check_pins
from hyper_parallel.planner.plan_builder import evaluate, search
from hyper_parallel.planner.refusals import check_degrees
from hyper_parallel.planner.request import HostMemory, PlanRequest, resolve
from hyper_parallel.planner.trained_share import trained_share
from hyper_parallel.received import LimitExceeded
from hyper_parallel.shard import check_overlap

_STRATEGY_KEYS: Final = tuple(f.name for f in fields(Strategy) if f.name in Parallel.model_fields and f.name != "rules")
"""Keys of a recipe's `parallel:` section that are fields of `Strategy` with the same name."""
_PINNED_SEPARATELY: Final = ("zero", "cp_ulysses")
"""Keys of `parallel:` with a value that means "not set"; `_pins` handles them separately."""
SINGLE_STAGE_SCHEDULES: Final = ("gpipe", "1f1b", "zb-h1")
"""Schedules with one stage per rank."""


def plan_recipe(
    recipe: Recipe,
    world_size: int | None = None,
    where: Callable[[str], str] = str,
    model: ModelSpec | None = None,
    trained: float | None = None,
    half_batches: bool = True,
) -> Plan:
    """Return the plan of a recipe.

    Degrees that the recipe sets are kept. With `parallel: auto` the planner chooses the other degrees, for the recipe's
    tokens per step. Without batch numbers, a step has one sequence per data-parallel rank; with `parallel: auto`, one
    sequence (in `stage: grpo`, one group of completions) per rank.

    Args:
        recipe: Recipe of the run.
        world_size: Number of started ranks that train; with `grpo.rollout_ranks: auto`, of all started ranks. None
            means the product of the degrees. With `parallel: auto`, None means `parallel.world_size` if set, else every
            device of the topology (`local` without accelerators: 4 ranks).
        where: Function from a recipe key to the origin of its value, such as `LoadedRecipe.where`, for errors.
        model: Spec of the recipe's model; None: read from `model.path`.
        trained: Fraction of the parameters with a gradient; None: estimated by `trained_share`.
        half_batches: Whether `overlap: auto` may choose half-batches.

    Raises:
        DegreesMismatch: HP301 when explicit degrees, or `parallel.world_size`, do not match the number of ranks.
        Contradiction: HP104 when keys of a recipe with `parallel: auto` contradict each other.
        HyperParallelError: As raised by `plan`.
    """
    auto, in_recipe, strategy = recipe.parallel.auto, recipe.parallel.world_size, _strategy(recipe)
    if not auto:
        check_degrees(strategy, in_recipe, where("parallel.world_size"))
        check_degrees(strategy, world_size, where(_culprit(strategy)))
    elif None not in (world_size, in_recipe) and world_size != in_recipe:
        raise DegreesMismatch(
            f"`parallel.world_size` is {in_recipe}, but there are {world_size} ranks",
            where=where("parallel.world_size"),
            got=in_recipe,
            allowed=world_size,
            changes={"parallel.world_size": world_size},
        )
    stated = world_size or in_recipe
    request = _request(recipe, model, stated if auto else strategy.world_size, trained)
    request = replace(request, half_batches=half_batches)
    if auto:
        return _plan_auto(recipe, request, strategy, where)
    return _plan_explicit(recipe, request, strategy, where, stated)


def _plan_explicit(
    recipe: Recipe,
    request: PlanRequest,
    strategy: Strategy,
    where: Callable[[str], str],
    num_devices: int | None,
) -> Plan:
    others = recipe.grpo.sampling_ranks if recipe.stage == "grpo" else recipe.parallel.tower_ranks
    request = request.sharing_cores_with(strategy.world_size + others)
    price = _evaluate_overlaps if _searches_overlap(recipe) else evaluate
    plan = price(request, strategy, where(_culprit(strategy)), num_devices)
    if recipe.stage == "grpo":
        from hyper_parallel.planner._roles import with_roles

        plan = with_roles(recipe, request, plan, where)
    return plan


def _evaluate_overlaps(request: PlanRequest, strategy: Strategy, where: str | None, num_devices: int | None) -> Plan:
    """Return the Plan of one strategy with the fastest legal overlap; arguments and errors as for `evaluate`."""
    best = evaluate(request, strategy, where, num_devices)
    for overlap in filter(request.may_overlap, OVERLAPS):
        candidate = replace(strategy, overlap=overlap)
        with suppress(UnsupportedSharding):
            check_overlap(candidate, best.workload)
            plan = evaluate(request, candidate, where, num_devices)
            best = plan if plan.step_s < best.step_s * (1 - TIE) else best
    return best


def _plan_auto(recipe: Recipe, request: PlanRequest, strategy: Strategy, where: Callable[[str], str]) -> Plan:
    # Every strategy of the search has these choices of the recipe; a pin of overlap has priority.
    names = ("rules", "schedule_file", "stage_layers", "overlap")
    base = Strategy(**{name: getattr(strategy, name) for name in names})
    pins = _pins(recipe, strategy, where, request.num_devices)
    check_stage_layers(strategy, request.model.num_layers)
    request = replace(request, from_recipe=True, executable=True, pins=pins, base=base)
    if recipe.stage == "grpo":
        from hyper_parallel.planner._roles import split_devices

        # Sampling supports no pipelines, no context parallelism, and one tensor-parallel axis.
        request = replace(request, pins={**pins, "pp": 1, "cp": 1, "tp_y": pins.get("tp_y", 1)})
        return split_devices(recipe, request.with_headroom(), where)
    return search(request.with_headroom())


def _request(recipe: Recipe, model: ModelSpec | None, num_devices: int | None, trained: float | None) -> PlanRequest:
    """Return the inputs of the planner for a recipe, with the default batch numbers that `plan_recipe` documents.

    An `offload.budget` in bytes limits the memory of a device that the plan may use.
    """
    t, offload = recipe.training, recipe.offload
    stored = "float64" if t.dtype == "float64" else "float32"
    has_batch = any((t.tokens_per_step, t.microbatch, t.accumulation_steps))
    workload = Workload(
        recipe.data.seq_len,
        tokens_per_step=t.tokens_per_step,
        microbatch=t.microbatch if has_batch else 1,
        accumulation_steps=t.accumulation_steps,
        compute_dtype=t.dtype,
        param_dtype=stored,
        reduce_dtype=stored,
        optimizer=t.optimizer,
    )
    request = resolve(model or recipe.model.path, recipe.topology, workload, num_devices)
    notes = list(request.notes)
    share = trained_share(request.model, recipe) if trained is None else trained
    if share != 1.0:
        workload = replace(workload, trained=share)
        notes.append(f"{share:.3%} of the parameters are trained; passes are timed as if all were")
    group = recipe.grpo.num_generations if recipe.stage == "grpo" else 1
    if not has_batch and recipe.parallel.auto:
        tokens = workload.seq_len * request.num_devices * group
        workload = replace(workload, tokens_per_step=tokens, microbatch=None)
        unit = "one sequence" if group == 1 else "one group of completions"
        notes.append(f"tokens per step assumed: {unit} per rank, {tokens}")
    if t.optimizer not in ("adamw", "adam"):
        notes.append(f"optimizer states and time of {t.optimizer} are predicted as for adamw: two states per parameter")
    drops_inputs = recipe.lora and recipe.lora.lora_dropout > 0 and not t.disable_dropout
    request = replace(
        request,
        workload=workload,
        notes=tuple(notes),
        token_chunks=not (t.compile or drops_inputs),
        group_sequences=group,
    )
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


def _pins(recipe: Recipe, strategy: Strategy, where: Callable[[str], str], num_ranks: int) -> dict[str, int]:
    """Return the choices that a recipe with `parallel: auto` sets, as pins of the search for `num_ranks` ranks.

    Some pins have an effect only on strategies with an axis above 1: block shapes need tp_y, `cp_kind` needs cp, and
    the schedule needs pp.

    Raises:
        Contradiction: HP104 for choices that contradict each other, whichever degrees the search chooses.
        UnsupportedSharding: HP205 for virtual stages that the schedule does not have.
    """
    p, explicit = recipe.parallel, recipe.parallel.model_fields_set
    pinnable = explicit & {*PINNABLE} - {*_PINNED_SEPARATELY}
    pinned_keys = [n for n in Parallel.model_fields if n in pinnable]
    named = {n: getattr(p, n) for n in pinned_keys}
    if "recompute" in recipe.training.model_fields_set:
        named["recompute"] = recipe.training.recompute
    # Every pipeline has the schedule of the recipe, 1F1B by default.
    pins = check_pins({**named, "schedule": strategy.schedule})
    if _searches_overlap(recipe):
        pins["overlap"] = AUTO_OVERLAP
    if p.zero is not None:
        pins["zero"] = p.zero
    elif "reshard_after_forward" in explicit:
        pins["zero"] = 3 if p.reshard_after_forward else 2
    if p.cp_ulysses > 1:
        if "cp_kind" in explicit and p.cp_kind != "hybrid":
            raise Contradiction(
                f"`cp_ulysses` requires cp_kind=hybrid, not cp_kind={p.cp_kind}",
                where=where("parallel.cp_ulysses"),
                got=f"cp_kind={p.cp_kind}, cp_ulysses={p.cp_ulysses}",
                changes={"parallel.cp_kind": "hybrid"},
            )
        pins["cp_ulysses"] = p.cp_ulysses
    if "virtual_stages" in explicit:
        check_virtual(strategy, where("parallel.virtual_stages"))
    if p.stage_layers or p.schedule_file:
        _check_stages(p, strategy, where, num_ranks)
        pins["vpp"] = strategy.virtual_stages
    return pins


def _check_stages(p: Parallel, strategy: Strategy, where: Callable[[str], str], num_ranks: int) -> None:
    """Raise Contradiction (HP104) if `stage_layers` or a schedule file is set without a matching number of stages."""
    key = "stage_layers" if p.stage_layers else "schedule_file"
    has_virtual = "virtual_stages" in p.model_fields_set or p.schedule in SINGLE_STAGE_SCHEDULES
    missing = ["pp"] * (p.pp == 1) + ["virtual_stages"] * (not has_virtual)
    if missing:
        others = strategy.virtual_stages if p.pp == 1 else p.pp
        number, rest = divmod(len(p.stage_layers), others)
        is_legal = len(missing) == 1 and number > 1 and not rest
        if is_legal:
            is_legal = num_ranks % number == 0 if missing == ["pp"] else p.schedule == "interleaved" or number == 2
        keys = " and ".join(f"`parallel.{name}`" for name in missing)
        raise Contradiction(
            f"`{key}` fixes the number of stages, so `auto` needs {keys} to be set",
            where=where(f"parallel.{key}"),
            got=f"{key} without {' and '.join(missing)}",
            hint=f"parallel.{missing[0]}={number}" if is_legal else f"set {keys}, to match `{key}`",
        )
    if p.stage_layers and len(p.stage_layers) != strategy.stages:
        pp, rest = divmod(len(p.stage_layers), strategy.virtual_stages)
        is_legal = pp > 1 and not rest and num_ranks % pp == 0
        raise Contradiction(
            f"`stage_layers` has {len(p.stage_layers)} numbers for {strategy.stages} stages",
            where=where("parallel.stage_layers"),
            got=list(p.stage_layers),
            hint={"parallel.pp": pp} if is_legal else f"give `stage_layers` {strategy.stages} numbers",
        )


def _culprit(strategy: Strategy) -> str:
    """Return the recipe key to name in errors about the degrees: the first degree above 1 in `suspects`."""
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
        overlap=_overlap(recipe.overlap),
    )


def _searches_overlap(recipe: Recipe) -> bool:
    """Return whether the planner chooses the overlap; `moe.capacity_factor` excludes overlap."""
    return recipe.overlap.auto and recipe.moe.capacity_factor is None


def _overlap(section: OverlapSection) -> Overlap:
    return Overlap(
        half_batch="half-batch" in (section.tp, section.ep),
        ep_chunks=section.chunks if section.ep == "chunks" else 1,
        tp_chunks=section.chunks if section.tp == "chunks" else 1,
        tp_symmetric=section.tp == "symmetric",
    )


def strategy_of(parallel: Parallel, **choices: Any) -> Strategy:
    """Return the strategy of a `parallel` section; `choices` are other fields of `Strategy`, such as `recompute`."""
    return Strategy(
        **{name: getattr(parallel, name) for name in _STRATEGY_KEYS},
        rules=tuple(Rule(pattern, style) for pattern, style in parallel.rules.items()),
        **choices,
    )


_WHERE = "strategy"
_PREFIXES = ("parallel.", "training.")


class StrategyWords(Parallel):
    """Keys of a strategy written as text: a recipe's `parallel` section, and two keys of its `training` section."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward."""
    recompute_layers: int | None = Field(default=None, ge=1)
    """Recomputed layers per rank. None: all."""


class StepWords(StrategyWords):
    """Keys of `StrategyWords`, and those of a recipe's `overlap` section."""

    overlap: OverlapSection = OverlapSection()
    """Communication within a layer that overlaps with computation."""


def parse_strategy(text: str, *, of_step: bool = False) -> Strategy:
    """Return the strategy that a text of `key=value` words describes.

    Args:
        text: Recipe keys with YAML values, separated by spaces; the prefixes `parallel.` and `training.` are optional,
            and "" means one device.
            Examples: `dp_shard=4 tp=2`, `pp=2 schedule=zb-h1 recompute=full`, `tp=2 rules.layers.*.up=colwise`.
        of_step: Whether the strategy is that of a training step, which may have keys such as `overlap.tp`.

    Raises:
        UnknownKey: HP101 for an unknown key.
        BadValue: HP102 for unpaired quotes, a word that is no `key=value`, a repeated key, a value that is not allowed,
            `auto`, `world_size`, `submodels`, `one_order=false`, and with `of_step` also `overlap=auto`.
    """
    values = _values_by_key(text, nested=("rules", "overlap") if of_step else ("rules",))
    words = validated(
        StepWords if of_step else StrategyWords,
        values,
        lambda key: f"{_WHERE}: {key}" if key else _WHERE,
        lambda key, value, _: shlex.quote(f"{key}={value}"),
    )
    overlap = words.overlap if isinstance(words, StepWords) else OverlapSection()
    if overlap.auto:
        raise BadValue(
            "`overlap=auto` needs a search, but no search runs for a given strategy",
            where=_WHERE,
            got=text,
            hint=_without(text, ("overlap", "overlap.auto")) or "overlap=none",
        )
    if words.auto or words.world_size is not None or words.submodels is not None or not words.one_order:
        raise BadValue(
            "`auto`, `world_size`, `submodels` and `one_order` are keys of a recipe, not of a strategy",
            where=_WHERE,
            got=text,
            allowed="degrees, whose product is the number of ranks, and choices such as `schedule`",
            hint=_without(text, ("auto", "world_size", "submodels", "one_order")) or "dp_shard=4 tp=2",
        )
    return strategy_of(
        words,
        recompute=words.recompute,
        recompute_layers=words.recompute_layers,
        overlap=_overlap(overlap),
    )


def _values_by_key(text: str, nested: Collection[str]) -> dict[str, Any]:
    """Return the `key=value` words of a strategy as a dict, with an inner dict for the keys of `nested` sections."""
    values: dict[str, Any] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadValue(
            f"the text of a strategy cannot be split into words: {error}",
            where=_WHERE,
            got=text,
            allowed="key=value words with paired quotes",
            hint="dp_shard=4 tp=2",
        ) from error
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise BadValue(
                f"`{word}` does not have the form key=value",
                where=_WHERE,
                got=text,
                allowed="words such as tp=2, separated by spaces",
                hint="dp_shard=4 tp=2",
            )
        key = _plain_key(key)
        section, dot, name = key.partition(".")
        inner = values.get(section)
        inner = inner if isinstance(inner, dict) else {}
        if key in values or (dot and section in nested and name in inner):
            raise BadValue(
                f"`{key}` is set twice",
                where=_WHERE,
                got=text,
                hint=shlex.join({_plain_key(w.partition("=")[0]): w for w in words}.values()),
            )
        if not dot or section not in nested:
            values[key] = _value(key, value)
            continue
        values[section] = {**inner, name: value if section == "rules" else _value(key, value)}
    return values


def _plain_key(key: str) -> str:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    return key


def _without(text: str, keys: Collection[str]) -> str:
    return shlex.join(word for word in shlex.split(text) if _plain_key(word.partition("=")[0]) not in keys)


def _value(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, LimitExceeded) as cause:
        reason = cause.problem if isinstance(cause, yaml.MarkedYAMLError) else cause
        raise BadValue(
            f"the value of `{key}` cannot be read as YAML: {reason}",
            where=f"{_WHERE}: {key}",
            got=text,
            hint="dp_shard=4 tp=2",
        ) from cause
