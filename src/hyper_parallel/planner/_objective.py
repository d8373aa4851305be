"""`plan`: evaluation of a given strategy, or search for the best one; every objective searches for fastest steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from hyper_parallel.errors import BadValue, Caller, DeadlineMissed, NoLegalStrategy, abbreviated, reported_by
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, Tower
from hyper_parallel.planner.pins import check_exclusions, check_pins
from hyper_parallel.planner.plan_builder import evaluate, require_fit, search, to_plan
from hyper_parallel.planner.refinement import Outcome, find_best
from hyper_parallel.planner.refusals import check_objective
from hyper_parallel.planner.request import LOCAL, HostMemory, PlanRequest, resolve
from hyper_parallel.planner.submodels import MEDIA, plan_with_towers
from hyper_parallel.topology import Supernode
from hyper_parallel.units import divisors, format_seconds

OBJECTIVES: Final = ("step-time", "tokens-per-device-second", "memory", "fewest-devices")
MEMORY_STEPS: Final = 10
"""Bisection steps in the search for the least memory; the result is exact to 1/1024 of the fastest strategy's peak."""


def _check_types(model: object, topology: object, workload: object) -> None:
    for name, value, kinds, allowed in (
        ("model", model, (str, os.PathLike, ModelSpec), "a name, a path, or a ModelSpec"),
        ("topology", topology, (str, os.PathLike, Supernode), "a name, a path, or a Supernode"),
        ("workload", workload, (Workload, type(None)), "a Workload, or None"),
    ):
        if not isinstance(value, kinds):
            raise BadValue(
                f"`{name}` has the unsupported type {type(value).__name__}",
                where=name,
                got=abbreviated(value),
                allowed=allowed,
                hint='hp.plan("llama-3-8b", "dgx-h100", hp.Workload(4096))',
            )


def plan(
    model: str | Path | ModelSpec,
    topology: str | Supernode = LOCAL,
    workload: Workload | None = None,
    *,
    num_devices: int | None = None,
    strategy: Strategy | None = None,
    pins: Mapping[str, int | str] | None = None,
    exclude: Sequence[str] = (),
    objective: str = "step-time",
    deadline_s: float | None = None,
    top: int = 5,
    offload: bool = False,
    all_layouts: bool = False,
    memory_headroom: float | None = None,
    towers: Sequence[Tower] = (),
    media: int = MEDIA,
) -> Plan:
    """Return the Plan of the best strategy that trains a model within the memory of a machine, or of a given strategy.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.
        workload: Training step; missing batch numbers are assumed, with a note. None: a default workload.
        num_devices: Number of devices to use; None: those of `strategy`, else all of the topology.
        strategy: Strategy to evaluate without a search; a note says if it exceeds memory. The arguments below then have
            no effect. None: search for the best.
        pins: Choices that the search must use, such as `{"tp": 8}` (tp_x = 8, tp_y = 1) or `{"schedule": "zbv"}`. If
            this version cannot run them, the plan is a prediction only, with a note; on `local` they are refused.
        exclude: Axes whose degree stays 1, and choices that keep their default, such as `recompute` or `offload`.
        objective: `step-time`: the fastest step. `tokens-per-device-second`: the most tokens per second and device, on
            all devices or fewer. `memory`: the least peak memory. `fewest-devices`: as few as `deadline_s` permits.
        deadline_s: Maximum seconds per step, for the objectives `fewest-devices` (required) and `memory` (None: any).
        top: Maximum number of runners-up in the plan.
        offload: Whether bytes that exceed device memory may be offloaded to host memory or recomputed.
        all_layouts: Whether to include strategies that this version cannot run, with a note; no effect on `local`.
        memory_headroom: Fraction of device memory that a search leaves free; None: 0.05 on accelerators, 0 on a CPU.
        towers: Image or audio encoders of a multimodal model, from `model.towers_of`, to include in the search.
        media: Number of images or recordings per sequence, for every tower.

    Raises:
        BadValue: HP102 for an argument of an unsupported type or value.
        HyperParallelError: Errors of `load_model`, `load_topology` and `check_pins`; HP310 for a missing peak rate.
        DegreesMismatch, NotDivisible, RuleError, UnsupportedSharding, BatchMismatch, ScheduleError: When the `strategy`
            is not legal.
        NoLegalStrategy, DoesNotFit, DeadlineMissed: When no strategy is legal, fits in memory, or meets the deadline.
    """
    _check_types(model, topology, workload)
    if strategy is not None:
        return evaluate(resolve(model, topology, workload, strategy.world_size), strategy, num_devices=num_devices)
    request = resolve(model, topology, workload, num_devices).with_headroom(memory_headroom)
    local = request.supernode.name == LOCAL
    request = replace(request, executable=local or not all_layouts, offload=HostMemory() if offload else None)
    find = partial(_best_for, objective=objective, deadline_s=deadline_s, top=top)
    if towers:
        find = partial(plan_with_towers, towers=towers, media=media, find=find)
    with reported_by(_PlanCall()):
        request = replace(request, pins={**check_pins(pins), **check_exclusions(exclude, pins or {})})
        return _find_executable(request, find, or_priced=bool(pins) and not local and not all_layouts)


_ARGUMENTS: Final = {"--devices": "num_devices", "--deadline": "deadline_s", "--pin": "pins"}
"""Dict from option of the plan command to argument of `plan`, where the names differ."""


class _PlanCall(Caller):
    """Caller of `plan`, for errors that name its arguments instead of options of the plan command."""

    def where(self, text: str) -> str:
        """Return the argument of `plan` for an option of the plan command."""
        return _ARGUMENTS.get(text, text.removeprefix("--"))

    def sentence(self, text: str) -> str:
        """Return a sentence in which options of the plan command are replaced by arguments of `plan`."""
        return text.replace("--topology ", "the topology ").replace("--exclude", "exclude")

    def hint(self, changes: Mapping[str, object]) -> str | None:
        """Return the changes as arguments, such as `pins={"tp": 8}`; None if any change is not of an option."""
        values = {_ARGUMENTS.get(k, k[2:].replace("-", "_")): 0 if v == "0%" else v for k, v in changes.items()}
        texts = (f"{name}={value!r}".replace("'", '"') for name, value in values.items())
        return ", ".join(texts) if all(key.startswith("--") for key in changes) else None


def _find_executable(request: PlanRequest, find: Callable[[PlanRequest], Plan], or_priced: bool) -> Plan:
    """Return `find(request)`; if that has no legal strategy and `or_priced` is set, allow any that can be priced."""
    try:
        return find(request)
    except NoLegalStrategy:
        if or_priced:
            with suppress(NoLegalStrategy):
                return find(replace(request, executable=False))
        raise


def _best_for(request: PlanRequest, objective: str, deadline_s: float | None, top: int) -> Plan:
    check_objective(objective, OBJECTIVES)
    if (objective == "fewest-devices") != (deadline_s is not None) and objective != "memory":
        seconds = deadline_s or 10
        raise BadValue(
            f"the objective {objective} {'needs' if deadline_s is None else 'does not accept'} a deadline",
            got=f"objective={objective}, deadline={deadline_s}",
            changes={"--objective": "fewest-devices", "--deadline": int(seconds) if seconds % 1 == 0 else seconds},
            where="--deadline",
        )
    if objective == "step-time":
        return search(request, top)
    tokens = request.workload.tokens_per_step
    if deadline_s is not None and not tokens:
        w = request.workload
        sequences = request.num_devices * (w.microbatch or 1) * (w.accumulation_steps or 1)
        raise BadValue(
            f"the objective {objective} with a deadline needs a workload with a fixed number of tokens per step",
            where="workload.tokens_per_step",
            got=tokens,
            hint=f"tokens_per_step={w.seq_len * sequences}",
        )
    limit = deadline_s / tokens if deadline_s is not None and tokens else None
    if objective == "memory":
        return _least_memory(request, deadline_s, limit, top)
    best: tuple[float, PlanRequest, Outcome] | None = None
    for devices in divisors(request.num_devices):
        smaller = replace(request, num_devices=devices)
        outcome = find_best(smaller, top + 1, limit if best is None else best[0] / devices)
        if not outcome.fits:
            continue
        first = outcome.ranked[0]
        if deadline_s is None:
            value = first.per_token_s * devices
            if best is None or value < best[0]:
                best = value, smaller, outcome
        elif first.step_s <= deadline_s:
            return to_plan(smaller, outcome, objective, top)
    if best is None:
        devices = request.num_devices
        raise _deadline_missed(request, f"number of devices up to {devices}", deadline_s, f" on {devices} devices")
    return to_plan(best[1], best[2], objective, top)


def _least_memory(request: PlanRequest, deadline_s: float | None, limit: float | None, top: int) -> Plan:
    """Return the plan with the least peak memory, found by bisection over the memory that a device may use.

    `limit` is the deadline in seconds per token; None: no deadline.
    """
    best = find_best(request, top + 1, limit)
    if not best.fits and deadline_s is not None:
        raise _deadline_missed(request, "strategy", deadline_s)
    require_fit(request, best)
    low, high = 0.0, float(best.ranked[0].memory_bytes)
    for _ in range(MEMORY_STEPS):
        middle = (low + high) / 2
        outcome = find_best(replace(request, capacity_bytes=middle), top + 1, limit)
        if outcome.fits:
            best = outcome
            high = min(middle, float(outcome.ranked[0].memory_bytes))
        else:
            low = middle
    result = to_plan(request, best, "memory", top)
    assert result.certificate is not None
    proved = replace(result.certificate, value=float(result.memory_bytes), bound=low)
    return replace(result, certificate=proved)


def _deadline_missed(request: PlanRequest, subject: str, deadline_s: float | None, where: str = "") -> DeadlineMissed:
    """Return the error for a deadline that no plan meets; its hint is a deadline that the fastest plan meets.

    If no strategy is legal or none fits, raise the error of `require_fit` instead.
    """
    outcome = find_best(request)
    require_fit(request, outcome)
    fastest_s = outcome.ranked[0].step_s
    return DeadlineMissed(
        f"no {subject} meets the deadline for a step of {request.model.name}",
        got=f"deadline {format_seconds(deadline_s or 0.0)}",
        allowed=f"from {format_seconds(fastest_s)}{where}",
        changes={"--deadline": float(f"{fastest_s * 1.01:.3g}")},
    )
