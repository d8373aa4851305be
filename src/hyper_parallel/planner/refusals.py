"""Checks of strategies and objectives, and errors for requests without a legal strategy or with none that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from hyper_parallel.config import DEGREES
from hyper_parallel.cost import ModelNumbers, check_stage_layers
from hyper_parallel.errors import (
    BadValue,
    DegreesMismatch,
    DoesNotFit,
    HyperParallelError,
    NoLegalStrategy,
    NotDivisible,
)
from hyper_parallel.ir import Rule, Strategy, Workload
from hyper_parallel.mpmd import check_pipeline
from hyper_parallel.planner.bounds import count, tuples
from hyper_parallel.planner.pins import EXCLUDABLE, PINNABLE, shown_pin
from hyper_parallel.planner.request import LOCAL, PlanRequest
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Space
from hyper_parallel.shard import without_axes
from hyper_parallel.topology import topology_hint
from hyper_parallel.units import divisors, format_bytes

MAX_DOUBLINGS: Final = 7
"""Maximum number of times that the number of devices is doubled to find a hint."""
_EXCLUSIONS: Final = dict.fromkeys((*DEGREES, "tp"), 1) | dict.fromkeys(EXCLUDABLE, 0)
"""Dict from pin to the value that an exclusion gives it."""
MAX_REFUSALS: Final = 12
"""Maximum number of errors whose suggested changes are applied in turn to make a strategy legal."""


def check_objective(objective: str, allowed: Sequence[str], purpose: str = "") -> None:
    """Raise BadValue (HP102) if an objective is not among the `allowed` ones; `purpose` ends the error sentence."""
    if objective not in allowed:
        near = get_close_matches(objective, allowed, 1) or allowed
        raise BadValue(
            f"unknown objective `{objective}`{purpose}",
            got=objective,
            allowed=allowed,
            changes={"--objective": near[0]},
            where="--objective",
        )


def check_degrees(
    strategy: Strategy, num_devices: int | None, where: str | None = None, hint: str | None = None
) -> None:
    """Raise an error if the degrees do not multiply to `num_devices`; None: any number. `where` is for the error.

    Raises:
        DegreesMismatch: HP301. Its hint is `hint` if set, else a dp_shard that makes the product match, else advice.
    """
    size = strategy.world_size
    if num_devices is None or size == num_devices:
        return
    rest = size // strategy.dp_shard
    shown = " * ".join(f"{k}={v}" for k, v in strategy.mesh().axes if v > 1) or "all 1"
    advice = f"start {size} ranks, or choose degrees that multiply to {num_devices}"
    raise DegreesMismatch(
        f"the degrees multiply to {size}, but there are {num_devices} ranks",
        where=where,
        got=shown,
        allowed=f"a product of {num_devices}",
        hint=hint or (advice if num_devices % rest else {"parallel.dp_shard": num_devices // rest}),
    )


def check_legal(numbers: ModelNumbers, workload: Workload, strategy: Strategy, where: str | None = None) -> None:
    """Raise an error if a strategy is illegal for a model and a resolved workload.

    Divisibility of heads and widths is not checked here, but by `shard.plan_layouts`.

    Raises:
        UnsupportedSharding: HP205 for virtual stages that the schedule does not have, and for pipeline settings without
            a pipeline.
        NotDivisible: HP203 for more stages than layers, `stage_layers` that do not match stages and layers, and `ep`
            above 1 that does not divide the experts and the ranks.
        BatchMismatch: HP308 for a number of microbatches that the schedule cannot run.
    """
    s = strategy
    check_pipeline(s, numbers.layers, workload.accumulation_steps or 1, where)
    check_stage_layers(s, numbers.layers)
    if s.ep > 1:
        inner = s.dp_shard * s.cp * s.tp
        allowed = [e for e in divisors(max(1, numbers.experts)) if inner % e == 0]
        if s.ep not in allowed:
            problem = f"must divide the number of experts ({numbers.experts}) and dp_shard * cp * tp ({inner})"
            if not numbers.experts:
                problem = "needs a mixture of experts, but the model has none"
            raise NotDivisible(
                f"ep={s.ep} {problem}",
                where=where,
                got=f"ep={s.ep}",
                allowed=allowed,
                changes={"parallel.ep": max(allowed)} if max(allowed) > 1 else without_axes(s, "ep"),
            )


_NO_TP_OVERLAP: Final[dict[str, Any]] = {"half_batch": False, "tp_chunks": 1, "tp_symmetric": False}
_NO_OVERLAP: Final = {
    "overlap": {**_NO_TP_OVERLAP, "ep_chunks": 1},
    "overlap.tp": _NO_TP_OVERLAP,
    "overlap.ep": {"ep_chunks": 1},
}
"""For a recipe key that a change sets to `none`, the fields of `Overlap` that change."""


def follow_changes(
    error: HyperParallelError,
    strategy: Strategy,
    workload: Workload,
    check: Callable[[Strategy, Workload], None],
) -> dict[str, object]:
    """Return recipe changes, as a dict from key to value, that make a refused strategy pass `check`.

    The changes that `error`, raised by `check`, suggests are applied first, then those of each further error of
    `check`. The result is empty if no legal strategy is found.
    """
    changes: dict[str, object] = {}
    for _ in range(MAX_REFUSALS):
        if not error.changes:
            return {}
        strategy, workload = with_changes(strategy, workload, error.changes)
        changes |= error.changes
        try:
            check(strategy, workload)
        except HyperParallelError as refusal:
            error = refusal
        else:
            return changes
    return {}


def with_changes(strategy: Strategy, workload: Workload, changes: Mapping[str, Any]) -> tuple[Strategy, Workload]:
    """Return a strategy and a workload after `changes`: keys of `training` and `parallel`, or overlap set to `none`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if section == "training":
            workload = replace(workload, **{name: value})
        elif key in _NO_OVERLAP and value == "none":
            strategy = replace(strategy, overlap=replace(strategy.overlap, **_NO_OVERLAP[key]))
        elif key == "parallel.rules":
            strategy = replace(strategy, rules=tuple(Rule(*rule) for rule in value.items()))
        else:
            strategy = replace(strategy, **{"tp_x" if name == "tp" else name: value})
    return strategy, workload


def no_legal_strategy_error(request: PlanRequest, ruled_out: Mapping[str, int]) -> NoLegalStrategy:
    """Return the error for a request without legal degrees.

    Its hint is a change that makes some combination legal, if one is found. `ruled_out` is a dict from reason to number
    of illegal combinations.
    """
    workload, devices, pins = request.workload, request.num_devices, request.pins
    shown = ", ".join(shown_pin(*pin) for pin in pins.items()) or "no pins"
    reasons = ", ".join(_impossible_pins(request)) or ", ".join(
        f"{reason} ({n} combination{'' if n == 1 else 's'})" for reason, n in ruled_out.items()
    )
    changes, allowed = dict[str, object](), None
    fixed = ("pp", "cp") if request.group_sequences > 1 else ()  # `stage: grpo` supports no other values
    for name in (n for n in pins if n in PINNABLE and n not in fixed):
        legal = _legal_values(request, name)
        if legal:
            allowed = [shown_pin(name, v) for v in legal]
            near = min(legal, key=lambda v: (abs(v - pins[name]), v))
            key = PINNABLE[name]
            changes = request.change(f"--pin {name}", key.recipe_key, key.shown(near))
            break
    if not changes:
        unit = workload.seq_len * devices
        tokens = max(1, round((workload.tokens_per_step or 0) / unit)) * unit
        if _any_legal(replace(request, workload=replace(workload, tokens_per_step=tokens))):
            changes = request.change("--tokens-per-step", "training.tokens_per_step", tokens)
    if not changes and request.supernode.name != LOCAL:
        # The nearest number of devices, fewer first.
        near_by = (n for d in range(1, devices) for n in (devices - d, devices + d))
        legal_devices = (n for n in near_by if _any_legal(replace(request, num_devices=n)))
        if near_devices := next(legal_devices, None):
            changes = request.change("--devices", "parallel.world_size", near_devices)
    return NoLegalStrategy(
        f"no combination of degrees is legal for {request.model.name} on {devices} devices"
        + (f": {reasons}" if reasons else ""),
        got=f"{shown}; seq_len={workload.seq_len}, tokens_per_step={workload.tokens_per_step}",
        allowed=allowed,
        changes=changes,
    )


def _impossible_pins(request: PlanRequest) -> Iterator[str]:
    """Yield a sentence about each pin that is illegal for all values of the other choices."""
    experts = request.model.num_experts
    for name, value in request.pins.items():
        if name not in (*DEGREES, "tp"):
            continue
        if request.num_devices % value:
            yield f"{name}={value} does not divide {request.num_devices} devices"
        elif name == "ep" and value > 1 and (not experts or experts % value):
            yield f"ep={value}, but the model has {experts or 'no'} experts"


def _legal_values(request: PlanRequest, name: str) -> list[int]:
    """Return legal values of the pin `name`, except the pinned one.

    Of numbers, only divisors of the number of devices, and of the number of layers if that is larger, are tried.
    """
    values = [*range(len(PINNABLE[name].values))]
    if not values:
        largest = max(request.num_devices, request.model.num_layers)
        values = sorted({*divisors(largest), *divisors(request.num_devices)})
    rest = [v for v in values if v != request.pins[name]]
    return [v for v in rest if _any_legal(_pinned(request, name, v))]


def _pinned(request: PlanRequest, name: str, value: int) -> PlanRequest:
    return replace(request, pins={**request.pins, name: value})


def _any_legal(request: PlanRequest) -> bool:
    space = Space(request)
    names = ("pp", "tp_x", "tp_y", "cp", "dp", "accumulation", "microbatch")
    meshes = tuples(space.meshes(), names)
    return any(
        space.refusal_of(shard, cp, x, y, *block, pp=pp) is None
        for pp, x, y, cp, dp, steps, micro in dict.fromkeys(meshes)
        if space.schedules(pp, steps)
        for block in space.blocks(x, y, cp, dp)
        for _, shard, zero in space.states(pp, dp, x * y * cp, block[2] * block[3])
        if space.has_pinned_zero(np.array(shard * cp))
        if space.overlaps_of(pp, shard, cp, x, y, block[2], zero, micro)
    )


def does_not_fit_error(request: PlanRequest, least_bytes: int) -> DoesNotFit:
    """Return the error for a request of which no strategy fits in memory.

    Its hint is the first of `_single_changes` with which a strategy fits, else `_changes_together`. `least_bytes` is
    the smallest peak of any strategy in the search.
    """
    return DoesNotFit(
        f"{request.model.name} does not fit on {request.num_devices} devices of {request.supernode.name}",
        got=f"{format_bytes(least_bytes)} on the fullest device at best",
        allowed=f"up to {format_bytes(request.machine.memory_bytes)}",
        hint=next((hint for hint, r in _single_changes(request) if fits(r)), None) or _changes_together(request),
    )


def _changes_together(request: PlanRequest) -> str:
    """Return the hint if no single change suffices: a smaller model, another topology, or several changes."""
    if request.supernode.name == LOCAL:
        return f"a smaller model, or {topology_hint('topology=' if request.from_recipe else '--topology ')}"
    pins = ", no pins" if request.pins else ""
    return f"a smaller model, or several changes at once: a shorter sequence, more devices{pins}"


def _single_changes(request: PlanRequest) -> Iterator[tuple[str | dict[str, object], PlanRequest]]:
    """Yield (hint, changed request) for single changes with which a strategy may fit, in order of preference."""
    pins, workload = request.pins, request.workload
    single_sequence = request.change("--pin microbatch", "training.microbatch", 1)
    if request.headroom and not request.from_recipe:
        yield {"--memory-headroom": "0%"}, replace(request, headroom=0.0)
    for name in sorted(pins, key=lambda n: (n != "recompute", n != "microbatch")):
        without = replace(request, pins={k: v for k, v in pins.items() if k != name})
        if name == "recompute":
            yield request.change("--pin recompute", "training.recompute", "full"), without
            continue
        if name == "microbatch":
            yield single_sequence, _pinned(request, name, 1)
        if leave_out := _without_pin(request, name):
            yield leave_out, without
    if workload.microbatch not in (None, 1):
        yield single_sequence, replace(request, workload=replace(workload, microbatch=1))
    if request.supernode.name != LOCAL:
        # Twice as many devices, 4 times as many, ... with the same tokens per device.
        for factor in (1 << doubling for doubling in range(1, MAX_DOUBLINGS + 1)):
            devices, tokens = request.num_devices * factor, workload.tokens_per_step
            scaled = replace(workload, tokens_per_step=tokens * factor if tokens else None)
            hint = request.change("--devices", "parallel.world_size", devices)
            yield hint, replace(request, num_devices=devices, workload=scaled)
    while workload.seq_len >= 512 and workload.seq_len % 2 == 0:
        workload = replace(workload, seq_len=workload.seq_len // 2)
        yield request.change("--seq-len", "data.seq_len", workload.seq_len), replace(request, workload=workload)


def _without_pin(request: PlanRequest, name: str) -> str | None:
    """Return the hint to leave out a pin; None if a recipe pins the default, because it may lack the key."""
    value = request.pins[name]
    if not request.from_recipe:
        kind = "pin or exclusion" if _EXCLUSIONS.get(name) == value else "pin"
        return f"leave out the {kind} {shown_pin(name, value)}"
    key = PINNABLE[name]
    if key.shown(value) == getattr(Strategy(), key.recipe_key.rpartition(".")[2], None):
        return None
    is_resharding = name == "zero" and value > 1
    return f"leave out {'parallel.reshard_after_forward' if is_resharding else key.recipe_key}"


def fits(request: PlanRequest) -> bool:
    """Return whether any strategy of a request is legal, fits in memory, and can run if the request requires it."""
    return count(BranchAndBound(Space(request)).rows) > 0
