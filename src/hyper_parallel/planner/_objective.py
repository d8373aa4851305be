"""Other goals than the fastest step: each is a few searches for the fastest step under another limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hyper_parallel.errors import BadValue, DeadlineMissed
from hyper_parallel.ir import Plan
from hyper_parallel.planner._context import Context
from hyper_parallel.planner._limits import Limits
from hyper_parallel.planner._plan import Outcome, find, require, search, to_plan
from hyper_parallel.planner._space import divisors
from hyper_parallel.units import format_seconds

OBJECTIVES: Final = ("step-time", "tokens-per-device-second", "memory", "fewest-devices")
MEMORY_STEPS: Final = 10
"""Halvings of the memory interval in the search for the least memory: to a thousandth of a device."""


def search_for(
    context: Context, limits: Limits, objective: str, deadline_s: float | None, top: int
) -> Plan:
    """The best Plan for an objective.

    Args:
        context: Model, machine and workload.
        limits: What may be chosen.
        objective: One of `OBJECTIVES`.
        deadline_s: Longest step, for `fewest-devices` (needed) and `memory`.
        top: Runners-up to keep.

    Raises:
        BadValue: HP102 for an unknown objective, or a deadline that is missing or has no meaning.
        DeadlineMissed: HP322 when no number of devices meets the deadline.
    """
    if objective not in OBJECTIVES:
        raise BadValue("there is no such objective", got=objective, allowed=OBJECTIVES)
    if (objective == "fewest-devices") != (deadline_s is not None) and objective != "memory":
        raise BadValue(
            "a deadline belongs to the objective fewest-devices, and it needs one",
            got=f"objective={objective}, deadline={deadline_s}",
            hint="--objective fewest-devices --deadline 10",
        )
    if objective == "step-time":
        return search(context, limits, top=top)
    if objective == "memory":
        return _least_memory(context, limits, deadline_s, top)
    return _fewer(context, limits, objective, deadline_s, top)


def _with(context: Context, limits: Limits, devices: int) -> tuple[Context, Limits]:
    return replace(context, num_devices=devices), replace(limits, num_devices=devices)


def _fewer(
    context: Context, limits: Limits, objective: str, deadline_s: float | None, top: int
) -> Plan:
    """On all of the devices or fewer: every divisor of their number."""
    best: tuple[float, Context, Outcome] | None = None
    for devices in divisors(limits.num_devices):
        fewer, within = _with(context, limits, devices)
        tokens = context.workload.tokens_per_step
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
        outcome = find(context, limits)
        require(context, limits, outcome)
        reached = outcome.ranked[0].step_s
        raise DeadlineMissed(
            f"no number of devices up to {limits.num_devices} makes a step of {context.model.name} that short",
            got=f"deadline {format_seconds(deadline_s or 0.0)}",
            allowed=f"from {format_seconds(reached)} on {limits.num_devices} devices",
            hint=f"--deadline {reached * 1.01:.3g}",
        )
    return to_plan(best[1], best[2], objective, top=top)


def _least_memory(context: Context, limits: Limits, deadline_s: float | None, top: int) -> Plan:
    """Halve the interval of memory between what is known to suffice and what is known not to."""
    tokens = context.workload.tokens_per_step
    most = deadline_s / tokens if deadline_s and tokens else None
    best = find(context, limits, keep=top + 1, at_most_s_per_token=most)
    if not best.fits and deadline_s is not None:
        fastest = find(context, limits)
        require(context, limits, fastest)
        reached = fastest.ranked[0].step_s
        raise DeadlineMissed(
            f"no strategy makes a step of {context.model.name} that short",
            got=f"deadline {format_seconds(deadline_s)}",
            allowed=f"from {format_seconds(reached)}",
            hint=f"--deadline {reached * 1.01:.3g}",
        )
    require(context, limits, best)
    low, high = 0.0, float(best.ranked[0].memory_bytes)
    for _ in range(MEMORY_STEPS):
        middle = (low + high) / 2
        outcome = find(
            context, limits, keep=top + 1, capacity_bytes=middle, at_most_s_per_token=most
        )
        if outcome.fits:
            best = outcome
            high = min(middle, float(outcome.ranked[0].memory_bytes))
        else:
            low = middle
    made = to_plan(context, best, "memory", top=top)
    assert made.certificate is not None
    proved = replace(made.certificate, value=float(made.memory_bytes), bound=low)
    return replace(made, certificate=proved)
