"""plan(): the best strategy for an objective; each is a few searches for the fastest step under another limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hyper_parallel.errors import BadValue, DeadlineMissed
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.planner._pins import SearchLimits, check_exclusions, check_pins
from hyper_parallel.planner._plan import evaluate, require, search, to_plan
from hyper_parallel.planner._refine import Outcome, find
from hyper_parallel.planner._request import LOCAL, HostMemory, PlanRequest, resolve
from hyper_parallel.planner._space import divisors
from hyper_parallel.topology import Supernode
from hyper_parallel.units import format_seconds

OBJECTIVES: Final = ("step-time", "tokens-per-device-second", "memory", "fewest-devices")
MEMORY_STEPS: Final = 10
"""Halvings of the memory interval in the search for the least memory: to a thousandth of a device."""


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
) -> Plan:
    """The best strategy of a model on a machine that fits in memory, as a Plan.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode. On `local` only what this version
            can run is chosen; elsewhere the notes say when a plan cannot be run yet.
        workload: What a step is; None, or no batch number in it: assumed, and said in the notes.
        num_devices: Devices to use; None: the product of the degrees of `strategy`, else all of the topology.
        strategy: Price exactly this one instead of searching.
        pins: What is fixed, such as `{"tp": 8}` (tp is tp_x * tp_y) or `{"schedule": "zbv"}`.
        exclude: Axes that stay 1, and choices of `EXCLUDABLE` that stay as they usually are.
        objective: One of `OBJECTIVES`: the fastest step; the most tokens per second and device, on all of the devices
            or fewer; the least memory; the fewest devices that meet `deadline_s`.
        deadline_s: Longest step for `fewest-devices`, or for the least memory.
        top: Runners-up to keep.
        offload: What exceeds a device's memory may lie in host memory, or be computed again, by a memory plan; where
            a strategy is given, its own `offload` says so.

    Raises:
        DegreesMismatch: HP301 when the strategy does not multiply to `num_devices`.
        NotDivisible, UnsupportedSharding, BatchMismatch: When the strategy is not legal.
        NoLegalStrategy: HP302 when no combination of degrees is legal.
        DoesNotFit: HP401 when none fits; the hint is the nearest change that does.
        DeadlineMissed: HP322 when no number of devices meets the deadline.
    """
    if strategy is not None:
        request = resolve(model, topology, workload, strategy.world_size)
        return evaluate(request, strategy, num_devices=num_devices)
    request = resolve(model, topology, workload, num_devices)
    if offload:
        request = replace(request, offload=HostMemory())
    fixed = {**check_pins(pins), **check_exclusions(exclude, pins or {})}
    limits = SearchLimits(
        request.num_devices, fixed, (), executable=request.supernode.name == LOCAL
    )
    return _best_for(request, limits, objective, deadline_s, top)


def _best_for(
    request: PlanRequest, limits: SearchLimits, objective: str, deadline_s: float | None, top: int
) -> Plan:
    """The best Plan for an objective; arguments and errors as for `plan`."""
    if objective not in OBJECTIVES:
        raise BadValue("there is no such objective", got=objective, allowed=OBJECTIVES)
    if (objective == "fewest-devices") != (deadline_s is not None) and objective != "memory":
        raise BadValue(
            "a deadline belongs to the objective fewest-devices, and it needs one",
            got=f"objective={objective}, deadline={deadline_s}",
            hint="--objective fewest-devices --deadline 10",
        )
    if objective == "step-time":
        return search(request, limits, top=top)
    if objective == "memory":
        return _least_memory(request, limits, deadline_s, top)
    return _fewer(request, limits, objective, deadline_s, top)


def _with(
    request: PlanRequest, limits: SearchLimits, devices: int
) -> tuple[PlanRequest, SearchLimits]:
    return replace(request, num_devices=devices), replace(limits, num_devices=devices)


def _fewer(
    request: PlanRequest, limits: SearchLimits, objective: str, deadline_s: float | None, top: int
) -> Plan:
    """On all of the devices or fewer: every divisor of their number."""
    best: tuple[float, PlanRequest, Outcome] | None = None
    for devices in divisors(limits.num_devices):
        fewer, within = _with(request, limits, devices)
        tokens = request.workload.tokens_per_step
        most = deadline_s / tokens if deadline_s and tokens else None
        if best is not None and objective != "fewest-devices":
            most = best[0] / devices
        outcome = find(fewer, within, keep=top + 1, at_most_s_per_token=most)
        if not outcome.fits:
            continue
        first = outcome.ranked[0]
        if objective == "fewest-devices":
            assert deadline_s is not None
            if first.step_s <= deadline_s:
                return to_plan(fewer, outcome, objective, top=top)
            continue
        value = first.per_token_s * devices
        if best is None or value < best[0]:
            best = value, fewer, outcome
    if best is None:
        outcome = find(request, limits)
        require(request, limits, outcome)
        reached = outcome.ranked[0].step_s
        raise DeadlineMissed(
            f"no number of devices up to {limits.num_devices} makes a step of {request.model.name} that short",
            got=f"deadline {format_seconds(deadline_s or 0.0)}",
            allowed=f"from {format_seconds(reached)} on {limits.num_devices} devices",
            hint=f"--deadline {reached * 1.01:.3g}",
        )
    return to_plan(best[1], best[2], objective, top=top)


def _least_memory(
    request: PlanRequest, limits: SearchLimits, deadline_s: float | None, top: int
) -> Plan:
    """Halve the interval of memory between what is known to suffice and what is known not to."""
    tokens = request.workload.tokens_per_step
    most = deadline_s / tokens if deadline_s and tokens else None
    best = find(request, limits, keep=top + 1, at_most_s_per_token=most)
    if not best.fits and deadline_s is not None:
        fastest = find(request, limits)
        require(request, limits, fastest)
        reached = fastest.ranked[0].step_s
        raise DeadlineMissed(
            f"no strategy makes a step of {request.model.name} that short",
            got=f"deadline {format_seconds(deadline_s)}",
            allowed=f"from {format_seconds(reached)}",
            hint=f"--deadline {reached * 1.01:.3g}",
        )
    require(request, limits, best)
    low, high = 0.0, float(best.ranked[0].memory_bytes)
    for _ in range(MEMORY_STEPS):
        middle = (low + high) / 2
        outcome = find(
            request, limits, keep=top + 1, capacity_bytes=middle, at_most_s_per_token=most
        )
        if outcome.fits:
            best = outcome
            high = min(middle, float(outcome.ranked[0].memory_bytes))
        else:
            low = middle
    made = to_plan(request, best, "memory", top=top)
    assert made.certificate is not None
    proved = replace(made.certificate, value=float(made.memory_bytes), bound=low)
    return replace(made, certificate=proved)
