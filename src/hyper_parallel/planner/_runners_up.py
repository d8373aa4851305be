"""Rejected strategies of a plan: runners-up, strategies that exceed memory, and a faster one that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from hyper_parallel.ir import Rejected
from hyper_parallel.planner._explain import barred_strategy_note, memory_reason, slower_reason
from hyper_parallel.planner.bounds import FREED, select, strategy_at, tuples
from hyper_parallel.planner.pricing import PricedStrategy, price
from hyper_parallel.planner.refusals import fits
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Columns

MAX_OVERSIZED: Final = 2
"""Strategies exceeding memory in a list of runners-up: more would push runnable ones off the screen."""
MAX_PRICED: Final = 24
"""Strategies that are priced in full for a list of runners-up or a note: a few milliseconds each."""


def rejected_runner_up(best: PricedStrategy, loser: PricedStrategy) -> Rejected:
    """Return a strategy that fits, with the reason why it lost."""
    share = loser.per_token_s / best.per_token_s
    reason = slower_reason(best.cost, best.step_s, loser.cost, best.step_s * share)
    return Rejected(loser.strategy, reason, loser.step_s, loser.memory_bytes)


def faster_oversized_strategies(
    request: PlanRequest, result: BranchAndBound, best: PricedStrategy
) -> tuple[Rejected, ...]:
    """Return the fastest strategies that would win if they fitted, one per mesh, each with its full price.

    The search has only lower bounds of them, so each is priced. Meshes that fit with other choices are omitted: those
    choices are slower than the winner.
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
        reason = (
            _oversize_reason(request, priced, least_bytes)
            if len(rejected) < MAX_OVERSIZED
            else None
        )
        if reason is not None:
            rejected.append(Rejected(priced.strategy, reason, priced.step_s, priced.memory_bytes))
    return tuple(rejected)


def barred_note(
    request: PlanRequest, result: BranchAndBound, best: PricedStrategy
) -> tuple[str, ...]:
    """Return the note about the fastest strategy that fits and has refused layouts; empty if it is not faster."""
    fastest: PricedStrategy | None = None
    for position in _fastest(result.barred, best.per_token_s, set()):
        priced = price(
            request, *strategy_at(result.barred, position, request.base, request.workload)
        )
        if priced.per_token_s < (fastest or best).per_token_s:
            fastest = priced
    if fastest is None:
        return ()
    return (barred_strategy_note(fastest, best, request.refusal(fastest.strategy) or ""),)


def _fastest(rows: Columns, per_token_s: float, excluded: set[tuple[int, ...]]) -> Iterator[int]:
    """Yield the row of every mesh with the least closed form below a price, the least first."""
    seen, meshes = set(excluded), tuples(rows)
    for position in np.argsort(rows["per_token_s"], kind="stable").tolist():
        if rows["per_token_s"][position] >= per_token_s or len(seen) - len(excluded) == MAX_PRICED:
            return
        if meshes[position] not in seen:
            seen.add(meshes[position])
            yield position


def _without_limit(
    request: PlanRequest, result: BranchAndBound, rows: Columns, position: int
) -> PricedStrategy:
    """Return the fastest strategy with the row's columns and unlimited memory."""
    pricer, row = result.pricer, select(rows, np.array([position]))
    allowed = (
        c for c, selectable in zip(pricer.choices, pricer.selectable, strict=True) if selectable
    )
    chosen = dict(zip(FREED, next(allowed), strict=True))
    strategies = []
    for zero in result.space.zeros_of(int(row["pp"][0])):
        columns = {name: np.full(1, float(v)) for name, v in {**chosen, "zero": zero}.items()}
        completed = strategy_at({**row, **columns}, 0, request.base, request.workload)
        strategies.append(price(request, *completed))
    return min(strategies, key=lambda priced: priced.per_token_s)


def _oversize_reason(request: PlanRequest, priced: PricedStrategy, least_bytes: int) -> str | None:
    """Return why a strategy does not fit; None if its degrees fit with another searched choice."""
    degrees, micro = priced.strategy.degrees(), priced.workload.microbatch or 1
    pins = {**request.pins, **degrees}
    if fits(replace(request, pins=pins)):
        return None
    fitting = None
    if micro > 1 and "microbatch" in request.pins:
        fitting = 1 if fits(replace(request, pins={**pins, "microbatch": 1})) else None
    capacity = request.machine.memory_bytes
    return memory_reason(priced.memory_bytes, least_bytes, capacity, micro, fitting)
