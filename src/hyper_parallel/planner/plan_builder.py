"""Plans: of one given strategy, of the best of a search, and of a file, priced again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hyper_parallel.cost import step_collectives
from hyper_parallel.errors import HyperParallelError, PlanMismatch, UnsupportedSharding, overrides
from hyper_parallel.ir import (
    Alternative,
    Certificate,
    Layout,
    Plan,
    Rejected,
    Strategy,
    Workload,
)
from hyper_parallel.model import ModelSpec
from hyper_parallel.mpmd import step_schedule
from hyper_parallel.planner._explain import (
    not_executable,
    offloaded,
    searched,
    sensitivity,
)
from hyper_parallel.planner._runners_up import barred_note, runner_up, too_big_strategies
from hyper_parallel.planner.bounds import join, ranked, strategy_at
from hyper_parallel.planner.pricing import PricedStrategy, price, with_stage_memory
from hyper_parallel.planner.refinement import Outcome, find
from hyper_parallel.planner.refusals import (
    check_degrees,
    check_legal,
    follow_changes,
    nothing_fits,
    nothing_legal,
)
from hyper_parallel.planner.request import LOCAL, PlanRequest, resolve
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.topology import Supernode
from hyper_parallel.units import format_bytes


def evaluate(
    request: PlanRequest,
    strategy: Strategy,
    where: str | None = None,
    num_devices: int | None = None,
) -> Plan:
    """The Plan of exactly one strategy, whose degrees multiply to `num_devices`, if given; `where` is for errors."""

    def check(strategy: Strategy, workload: Workload) -> None:
        check_degrees(strategy, num_devices, where)
        check_legal(request.numbers, workload.resolve(strategy.dp), strategy, where)
        _layouts(request, strategy, where)

    try:
        check(strategy, request.workload)
    except HyperParallelError as error:
        if changes := follow_changes(error, strategy, request.workload, check):
            error.changes, error.hint = changes, overrides(changes)
        raise
    workload = request.workload.resolve(strategy.dp)
    priced = with_stage_memory(request, price(request, strategy, workload))
    notes = []
    if priced.memory_bytes > request.machine.memory_bytes:
        notes.append(_exceeds(priced, request.machine.memory_bytes))
    return _make(request, priced, notes=tuple(notes), where=where)


def _exceeds(priced: PricedStrategy, capacity_bytes: int) -> str:
    """Return the note about a peak that is larger than the device's memory."""
    return (
        f"the predicted peak of {format_bytes(priced.memory_bytes)} exceeds the device's "
        f"{format_bytes(capacity_bytes)}"
    )


def search(request: PlanRequest, top: int = 5) -> Plan:
    """The fastest Plan of a request, with so many runners-up."""
    outcome = find(request, top + 1)
    require(request, outcome)
    return to_plan(request, outcome, "step-time", top)


def require(request: PlanRequest, outcome: Outcome) -> None:
    """Raise when nothing was found.

    Raises:
        NoLegalStrategy: HP302. DoesNotFit: HP401.
    """
    if outcome.fits:
        return
    least_bytes = outcome.search.completer.least_bytes
    if not outcome.search.legal or outcome.search.refused or np.isinf(least_bytes):
        raise nothing_legal(request, outcome.search.space.ruled_out)
    raise nothing_fits(request, int(least_bytes))


def to_plan(request: PlanRequest, outcome: Outcome, objective: str, top: int = 5) -> Plan:
    """The Plan of the best strategy of a search."""
    best, *others = outcome.ranked
    rejected = [runner_up(best, other) for other in others[:top]]
    found = outcome.search
    faster = too_big_strategies(found.space.request, found, best)
    tokens = best.workload.tokens_per_step or 1
    certificate = Certificate(
        objective,
        best.step_s,
        min(best.step_s, outcome.bound * tokens),
        found.completer.priced,
        outcome.simulated,
        dict(found.completer.cut),
        dict(found.space.ruled_out),
    )
    notes: tuple[str, ...] = (searched(certificate), outcome.searched_space)
    if best.strategy.recompute != "none" and "recompute" not in request.pins:
        notes += ("activations are recomputed because it is the fastest choice that fits",)
    if best.strategy.gathered_inputs == "re-gather" and "gathered_inputs" not in request.pins:
        notes += ("inputs are gathered again because it is the fastest choice that fits",)
    shown = best if objective == "memory" else with_stage_memory(request, best)
    if shown.memory_bytes > request.device_bytes:
        notes += (_exceeds(shown, request.device_bytes),)
    made = _make(request, shown, (*faster, *rejected), notes)
    return replace(
        made,
        notes=(*barred_note(found.space.request, found, best), *made.notes),
        certificate=certificate,
        pareto=_pareto(request, found, shown),
        sensitivity=sensitivity(best, others),
    )


def _pareto(
    request: PlanRequest, found: BranchAndBound, best: PricedStrategy
) -> tuple[Alternative, ...]:
    """The front of time and memory among the strategies that were completed, fastest first, the chosen one left out."""
    front, least, rows = [], float(best.memory_bytes), join([found.rows, found.slower])
    for position in ranked(rows).tolist():
        memory = float(rows["memory_bytes"][position])
        if memory < least * (1 - 1e-3) and found.runs(rows, position):
            least = memory
            strategy, workload = strategy_at(rows, position, request.base, request.workload)
            seconds = float(rows["per_token_s"][position]) * (workload.tokens_per_step or 1)
            front.append(Alternative(strategy, workload.microbatch or 1, seconds, int(least)))
    return tuple(front)


def _layouts(
    request: PlanRequest, strategy: Strategy, where: str | None
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Layouts and their notes; none, with a note, for what this version only predicts.

    What is meant to run now (`where` is given, or the machine is this one) is refused instead.
    """
    must_run = where is not None or request.supernode.name == LOCAL
    later = not_executable(strategy)
    if later is not None and not must_run:
        return {}, (later,)
    try:
        sharded = request.shard(strategy, where)
    except UnsupportedSharding as error:
        if must_run:
            raise
        return {}, (
            f"this version cannot run this plan yet ({error.what}): the layouts are left out",
        )
    return sharded.layouts, sharded.notes


def _make(
    request: PlanRequest,
    priced: PricedStrategy,
    rejected: tuple[Rejected, ...] = (),
    notes: tuple[str, ...] = (),
    where: str | None = None,
) -> Plan:
    strategy, workload = priced.strategy, priced.workload
    if strategy.pp > 1:
        strategy = replace(strategy, stage_layers=tuple(stage.layers for stage in priced.stages))
    layouts, told = _layouts(request, strategy, where)
    told += offloaded(priced.cost, priced.memory_bytes)
    if strategy.pp > 1 and layouts:
        # Verified before any process starts.
        step_schedule(strategy, workload.accumulation_steps or 1)
    collectives = step_collectives(request.model, layouts, strategy, workload) if layouts else ()
    return Plan(
        model=request.model_ref(),
        topology=request.supernode.name,
        peak_flops=request.machine.peak_flops,
        workload=workload,
        strategy=strategy,
        layouts=layouts,
        step_s=priced.step_s,
        cost=priced.cost,
        memory=priced.memory,
        memory_capacity_bytes=request.device_bytes,
        collectives=collectives,
        rejected=rejected,
        stages=priced.stages,
        pace=request.machine.paces(strategy.pp),
        notes=(*request.notes, *told, *notes),
    )


def recheck(
    plan: Plan, model: str | Path | ModelSpec, topology: str | Supernode | None = None
) -> Plan:
    """A plan priced and checked again, for one that was loaded from a file and may have been edited.

    Degrees, recompute and the batch may be edited; layouts, cost and memory follow from them and are made anew.

    Args:
        plan: The plan as loaded.
        model: The model it is going to be applied to.
        topology: The machine; None: the one the plan names.

    Raises:
        PlanMismatch: HP307 when the plan was made for another model or another machine.
        HyperParallelError: What `plan` raises for an illegal strategy.
    """
    strategy = plan.strategy
    # Accumulation follows from the other two numbers, so editing a degree needs no second edit.
    workload = replace(plan.workload, accumulation_steps=None)
    machine = topology if topology is not None else plan.topology
    again = evaluate(resolve(model, machine, workload, strategy.world_size), strategy)
    if again.model.fingerprint != plan.model.fingerprint:
        raise PlanMismatch(
            "the plan was made for another model",
            got=f"plan for {plan.model.name} ({plan.model.fingerprint})",
            allowed=f"{again.model.name} ({again.model.fingerprint})",
            hint=f"hyper-parallel plan {again.model.name} -o plan.json",
        )
    if again.topology != plan.topology:
        raise PlanMismatch(
            "the plan was made for another machine",
            got=plan.topology,
            allowed=again.topology,
            hint=f"hyper-parallel plan {again.model.name} --topology {again.topology} -o plan.json",
        )
    same = {**dict.fromkeys(plan.notes), **dict.fromkeys(again.notes)}
    notes = tuple(same)
    if again.layouts != plan.layouts:
        notes += ("layouts were made anew for the degrees in the file",)
    return replace(again, rejected=plan.rejected, notes=notes)
