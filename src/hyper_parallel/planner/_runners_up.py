"""Strategies beside the chosen one: runners-up, those that do not fit, and a faster one that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from hyper_parallel.ir import Rejected
from hyper_parallel.planner._explain import gained, slower, too_big
from hyper_parallel.planner.bounds import FREED, select, strategy_at, tuples
from hyper_parallel.planner.pricing import PricedStrategy, price
from hyper_parallel.planner.refusals import fits
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Columns

TOO_BIG_SHOWN: Final = 2
"""Strategies that do not fit in a list of runners-up: more would push those that can run off the screen."""
MOST_PRICED: Final = 24
"""Strategies that are priced in full at most for a list of runners-up or a note, a few milliseconds each; a choice."""


def runner_up(best: PricedStrategy, other: PricedStrategy) -> Rejected:
    """Return a strategy that fits, with the reason why it lost."""
    share = other.per_token_s / best.per_token_s
    reason = slower(best.cost, best.step_s, other.cost, best.step_s * share)
    return Rejected(other.strategy, reason, other.step_s, other.memory_bytes)


def too_big_strategies(
    request: PlanRequest, found: BranchAndBound, best: PricedStrategy
) -> tuple[Rejected, ...]:
    """Return the fastest strategies that would win if they fitted, one per mesh, each with its full price.

    The search knows lower bounds of them only, so each is priced. A mesh that fits in another way is no part of the
    list: that way was found to be slower.
    """
    lost, faster = found.too_big(), []
    fitting = {*tuples(found.rows), *tuples(found.slower)}
    for position in _fastest(lost, best.per_token_s, fitting):
        priced = _without_limit(request, found, lost, position)
        if request.executable and request.refusal(priced.strategy) is not None:
            continue
        if priced.per_token_s < best.per_token_s:
            faster.append((priced, int(lost["memory_bytes"][position])))
    kept: list[Rejected] = []
    for priced, least in sorted(faster, key=lambda pair: pair[0].per_token_s):
        reason = _why_too_big(request, priced, least) if len(kept) < TOO_BIG_SHOWN else None
        if reason is not None:
            kept.append(Rejected(priced.strategy, reason, priced.step_s, priced.memory_bytes))
    return tuple(kept)


def barred_note(
    request: PlanRequest, found: BranchAndBound, best: PricedStrategy
) -> tuple[str, ...]:
    """Return the note about the fastest strategy that fits and whose layouts are refused; none without a gain."""
    fastest: PricedStrategy | None = None
    for position in _fastest(found.barred, best.per_token_s, set()):
        priced = price(
            request, *strategy_at(found.barred, position, request.base, request.workload)
        )
        if priced.per_token_s < (fastest or best).per_token_s:
            fastest = priced
    if fastest is None:
        return ()
    return (gained(fastest, best, request.refusal(fastest.strategy) or ""),)


def _fastest(rows: Columns, per_token_s: float, without: set[tuple[int, ...]]) -> Iterator[int]:
    """Yield the row of every mesh with the least closed form below a price, the least first."""
    seen, meshes = set(without), tuples(rows)
    for position in np.argsort(rows["per_token_s"], kind="stable").tolist():
        if rows["per_token_s"][position] >= per_token_s or len(seen) - len(without) == MOST_PRICED:
            return
        if meshes[position] not in seen:
            seen.add(meshes[position])
            yield position


def _without_limit(
    request: PlanRequest, found: BranchAndBound, rows: Columns, position: int
) -> PricedStrategy:
    """Return the fastest strategy that a row can become where memory has no limit."""
    pricer, row = found.pricer, select(rows, np.array([position]))
    allowed = (c for c, may in zip(pricer.choices, pricer.may, strict=True) if may)
    chosen = dict(zip(FREED, next(allowed), strict=True))
    ways = []
    for zero in found.space.zeros_of(int(row["pp"][0])):
        columns = {name: np.full(1, float(v)) for name, v in {**chosen, "zero": zero}.items()}
        found_at = strategy_at({**row, **columns}, 0, request.base, request.workload)
        ways.append(price(request, *found_at))
    return min(ways, key=lambda priced: priced.per_token_s)


def _why_too_big(request: PlanRequest, priced: PricedStrategy, least_bytes: int) -> str | None:
    """Return why a strategy does not fit; None where its degrees fit in another way that was searched."""
    degrees, micro = priced.strategy.degrees(), priced.workload.microbatch or 1
    pins = {**request.pins, **degrees}
    if fits(replace(request, pins=pins)):
        return None
    fitting = None
    if micro > 1 and "microbatch" in request.pins:
        fitting = 1 if fits(replace(request, pins={**pins, "microbatch": 1})) else None
    capacity = request.machine.memory_bytes
    return too_big(priced.memory_bytes, least_bytes, capacity, micro, fitting)
