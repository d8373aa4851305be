"""Construction of plans from one strategy, and from the result of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from hyper_parallel.cost import step_collectives
from hyper_parallel.errors import HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import Alternative, Certificate, Layout, Plan, Rejected, Strategy, Workload
from hyper_parallel.mpmd import step_schedule
from hyper_parallel.planner._explain import offload_note, search_note, sensitivity, slower_reason
from hyper_parallel.planner.bounds import FREED, join, ranked, select, strategy_at, tuples
from hyper_parallel.planner.pricing import PricedStrategy, price, with_stage_memory
from hyper_parallel.planner.refinement import Outcome, find_best
from hyper_parallel.planner.refusals import (
    check_degrees,
    check_legal,
    does_not_fit_error,
    fits,
    follow_changes,
    no_legal_strategy_error,
)
from hyper_parallel.planner.request import LOCAL, PlanRequest, unimplemented
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Columns
from hyper_parallel.shard import check_overlap
from hyper_parallel.units import format_bytes

MAX_OVERSIZED: Final = 2
"""Maximum number of rejected strategies in a plan that exceed device memory."""
MAX_PRICED: Final = 24
"""Maximum number of combinations of degrees that `_fastest` yields. Its callers price each of them in full."""


def faster_oversized_strategies(
    request: PlanRequest, result: BranchAndBound, best: PricedStrategy
) -> tuple[Rejected, ...]:
    """Return entries in `Plan.rejected` for faster strategies that exceed memory, one per combination of degrees.

    At most `MAX_OVERSIZED` are returned, the fastest first. The search has only lower bounds of their time, so up to
    `MAX_PRICED` are priced in full. Degrees that fit in memory with other choices are omitted.
    """
    misses, faster = result.closest_misses(), []
    fitting = {*tuples(result.rows), *tuples(result.slower)}
    for position in _fastest(misses, best.per_token_s, fitting):
        priced = _without_limit(request, result, misses, position)
        if request.executable and request.refusal(priced.strategy) is not None:
            continue
        if priced.per_token_s < best.per_token_s:
            faster.append((priced, int(misses["memory_bytes"][position])))
    rejected: list[Rejected] = []
    for priced, least_bytes in sorted(faster, key=lambda pair: pair[0].per_token_s):
        if len(rejected) == MAX_OVERSIZED:
            break
        reason = _oversize_reason(request, priced, least_bytes)
        if reason is not None:
            rejected.append(Rejected(priced.strategy, reason, priced.step_s, priced.memory_bytes))
    return tuple(rejected)


def barred_note(request: PlanRequest, result: BranchAndBound, best: PricedStrategy) -> tuple[str, ...]:
    """Return a tuple with the note about the fastest strategy that fits, but that this version cannot run.

    The tuple is empty if no such strategy is faster than `best`.
    """
    fastest: PricedStrategy | None = None
    for position in _fastest(result.barred, best.per_token_s, set()):
        row = strategy_at(result.barred, position, request.base, request.workload)
        priced = price(request, *row)
        if priced.per_token_s < (fastest or best).per_token_s:
            fastest = priced
    if fastest is None:
        return ()
    share, reason = 1.0 - fastest.per_token_s / best.per_token_s, request.refusal(fastest.strategy)
    return (
        f"a step would be {share:.1%} shorter with {fastest.strategy}, which this version cannot run: {reason or ''}",
    )


def _fastest(rows: Columns, per_token_s: float, excluded: set[tuple[int, ...]]) -> Iterator[int]:
    """Yield the index of the fastest row of each combination of degrees, in order of time, at most `MAX_PRICED`.

    Rows that take `per_token_s` or more by the closed form are omitted, and so are rows with degrees in `excluded`.
    """
    seen, meshes = set(excluded), tuples(rows)
    for position in np.argsort(rows["per_token_s"], kind="stable").tolist():
        if rows["per_token_s"][position] >= per_token_s or len(seen) - len(excluded) == MAX_PRICED:
            return
        if meshes[position] not in seen:
            seen.add(meshes[position])
            yield position


def _without_limit(request: PlanRequest, result: BranchAndBound, rows: Columns, position: int) -> PricedStrategy:
    """Return the strategy in a row with the simplest legal choice and the fastest ZeRO stage, even if too large."""
    pricer, row = result.pricer, select(rows, np.array([position]))
    chosen = dict(zip(FREED, pricer.choices[int(np.argmax(pricer.selectable))], strict=True))
    strategies = []
    for zero in result.space.zeros_of(int(row["pp"][0])):
        columns = {name: np.full(1, float(v)) for name, v in {**chosen, "zero": zero}.items()}
        completed = strategy_at({**row, **columns}, 0, request.base, request.workload)
        strategies.append(price(request, *completed))
    return min(strategies, key=lambda priced: priced.per_token_s)


def _oversize_reason(request: PlanRequest, priced: PricedStrategy, least_bytes: int) -> str | None:
    """Return the reason why a strategy does not fit in memory; None if its degrees fit with other choices."""
    degrees, micro = priced.strategy.degrees(), priced.workload.microbatch or 1
    pins = {**request.pins, **degrees}
    if fits(replace(request, pins=pins)):
        return None
    least = f" (at least {format_bytes(least_bytes)})" if least_bytes < priced.memory_bytes else ""
    reason = (
        f"does not fit at microbatch {micro}: {format_bytes(priced.memory_bytes)}{least} of "
        f"{format_bytes(request.machine.memory_bytes)}"
    )
    single = replace(request, pins={**pins, "microbatch": 1})
    if micro > 1 and "microbatch" in request.pins and fits(single):
        reason += "; fits at microbatch 1"
    return reason


def evaluate(
    request: PlanRequest,
    strategy: Strategy,
    where: str | None = None,
    num_devices: int | None = None,
) -> Plan:
    """Return the Plan of one given strategy, without a search; if it exceeds device memory, a note says so.

    Args:
        request: Model, machine and workload.
        strategy: The strategy.
        where: Origin of the strategy, for errors. If it is set, or the topology is `local`, a strategy that this
            version cannot run is refused.
        num_devices: Required product of the degrees; None: not checked.

    Raises:
        HyperParallelError: Errors of `hyper_parallel.plan` for a `strategy`.
    """

    def check(strategy: Strategy, workload: Workload) -> None:
        check_degrees(strategy, num_devices, where)
        check_legal(request.numbers, workload.resolve(strategy.dp), strategy, where)
        _layouts(request, strategy, where)

    try:
        check(strategy, request.workload)
    except HyperParallelError as error:
        if changes := follow_changes(error, strategy, request.workload, check):
            error.changes, error.hint = changes, None
        raise
    workload = request.workload.resolve(strategy.dp)
    _check_symmetric_memory(request, strategy, workload)
    priced = with_stage_memory(request, price(request, strategy, workload))
    notes = []
    if strategy.overlap.tp_symmetric:
        notes.append(_SYMMETRIC_NOTE)
    if priced.memory_bytes > request.machine.memory_bytes:
        notes.append(_exceeds(priced, request.machine.memory_bytes))
    return _build_plan(request, priced, notes=tuple(notes), where=where)


def _exceeds(priced: PricedStrategy, capacity_bytes: int) -> str:
    return (
        f"the predicted peak of {format_bytes(priced.memory_bytes)} exceeds the device's {format_bytes(capacity_bytes)}"
    )


def search(request: PlanRequest, top: int = 5) -> Plan:
    """Return the fastest Plan of a request, with up to `top` runners-up; raise the errors of `require_fit`."""
    outcome = find_best(request, top + 1)
    require_fit(request, outcome)
    return to_plan(request, outcome, "step-time", top)


def require_fit(request: PlanRequest, outcome: Outcome) -> None:
    """Raise an error if a search has no result.

    Raises:
        NoLegalStrategy: HP302 if no strategy is legal, or the search is limited to strategies that this version can run
            and there are none.
        DoesNotFit: HP401 if all these strategies exceed device memory.
    """
    if outcome.fits:
        return
    least_bytes = outcome.search.completer.least_bytes
    if not outcome.search.legal or outcome.search.num_refused or np.isinf(least_bytes):
        raise no_legal_strategy_error(request, outcome.search.space.ruled_out)
    raise does_not_fit_error(request, int(least_bytes))


def to_plan(request: PlanRequest, outcome: Outcome, objective: str, top: int = 5) -> Plan:
    """Return the Plan of the best strategy in `outcome`, with up to `top` runners-up; `outcome.fits` must be True."""
    best, *runners_up = outcome.ranked
    rejected = [Rejected(p.strategy, slower_reason(best, p), p.step_s, p.memory_bytes) for p in runners_up[:top]]
    result = outcome.search
    faster = faster_oversized_strategies(result.space.request, result, best)
    tokens = best.workload.tokens_per_step or 1
    certificate = Certificate(
        objective,
        best.step_s,
        min(best.step_s, outcome.bound * tokens),
        result.completer.priced,
        outcome.simulated,
        dict(result.completer.cut),
        dict(result.space.ruled_out),
    )
    notes: tuple[str, ...] = (search_note(certificate), outcome.space_note)
    if best.strategy.recompute != "none" and "recompute" not in request.pins:
        notes += ("activations are recomputed because it is the fastest choice that fits",)
    if best.strategy.gathered_inputs == "re-gather" and "gathered_inputs" not in request.pins:
        notes += ("inputs are re-gathered because it is the fastest choice that fits",)
    shown = best if objective == "memory" else with_stage_memory(request, best)
    if shown.memory_bytes > request.device_bytes:
        notes += (_exceeds(shown, request.device_bytes),)
    plan = _build_plan(request, shown, (*faster, *rejected), notes)
    return replace(
        plan,
        notes=(*barred_note(result.space.request, result, best), *plan.notes),
        certificate=certificate,
        pareto=_pareto(request, result, shown),
        sensitivity=sensitivity(best, runners_up),
    )


def _pareto(request: PlanRequest, result: BranchAndBound, best: PricedStrategy) -> tuple[Alternative, ...]:
    """Return the priced strategies on the Pareto front of time and memory that need less memory than `best`."""
    front, least, rows = [], float(best.memory_bytes), join([result.rows, result.slower])
    for position in ranked(rows).tolist():
        memory = float(rows["memory_bytes"][position])
        if memory < least * (1 - 1e-3) and result.is_executable(rows, position):
            least = memory
            strategy, workload = strategy_at(rows, position, request.base, request.workload)
            seconds = float(rows["per_token_s"][position]) * (workload.tokens_per_step or 1)
            front.append(Alternative(strategy, workload.microbatch or 1, seconds, int(least)))
    return tuple(front)


def _layouts(request: PlanRequest, strategy: Strategy, where: str | None) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Return (dict from parameter name to layout, notes); no layouts if this version cannot run the strategy.

    Such a strategy raises UnsupportedSharding (HP205) instead if `where` is set, or the topology is `local`.
    """
    must_run = where is not None or request.supernode.name == LOCAL
    if not must_run and (choices := unimplemented(strategy)):
        return {}, (
            f"this version cannot run this plan yet ({', '.join(choices)} not implemented): it is a prediction, and "
            "the layouts are left out",
        )
    try:
        sharded = request.shard(strategy, where, staged=must_run)
    except UnsupportedSharding as error:
        if must_run:
            raise
        return {}, (f"this version cannot run this plan yet ({error.what}): the layouts are omitted",)
    return sharded.layouts, sharded.notes


def _build_plan(
    request: PlanRequest,
    priced: PricedStrategy,
    rejected: tuple[Rejected, ...] = (),
    notes: tuple[str, ...] = (),
    where: str | None = None,
) -> Plan:
    strategy, workload = priced.strategy, priced.workload
    if strategy.pp > 1:
        strategy = replace(strategy, stage_layers=tuple(stage.layers for stage in priced.stages))
    check_overlap(strategy, workload)
    layouts, layout_notes = _layouts(request, strategy, where)
    layout_notes += offload_note(priced.cost, priced.memory_bytes)
    if strategy.pp > 1 and layouts:
        # Verify the schedule before any process starts.
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
        notes=(*request.notes, *layout_notes, *notes),
    )


_DEFAULT_CHUNKS: Final = 4
"""Value of `overlap.chunks` in a recipe that does not set it."""
_SYMMETRIC_NOTE: Final = (
    "`overlap.tp=symmetric` is priced as one chunk of tokens per tensor-parallel rank, without communication "
    "behind weight gradients; it has not run on CUDA devices"
)


def _check_symmetric_memory(request: PlanRequest, strategy: Strategy, workload: Workload) -> None:
    """Raise UnsupportedSharding (HP205) for `overlap.tp=symmetric` on devices other than CUDA devices."""
    overlap, device = strategy.overlap, request.supernode.device
    if not overlap.tp_symmetric or device.kind == "cuda":
        return
    chunks = replace(overlap, tp_symmetric=False, tp_chunks=_DEFAULT_CHUNKS)
    try:
        check_overlap(replace(strategy, overlap=chunks), workload)
        other = "chunks"
    except UnsupportedSharding:
        other = "none"
    raise UnsupportedSharding(
        "`overlap.tp=symmetric` needs CUDA devices",
        where="overlap",
        got=f"topology {request.supernode.name}, devices of kind {device.kind}",
        changes={"overlap.tp": other},
    )
