"""Best strategies of a request by full price: the step time with a simulated pipeline schedule.

The full price is the closed form (the step time by formulas) plus the extra time of the simulated schedule, if any. The
closed form is therefore a lower bound of the full price. The search keeps every strategy with a closed form up to the
best full price. The kept strategies are simulated in order of their closed form, until no other can be better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.ir import Strategy
from hyper_parallel.planner.bounds import TIE, ranked, strategy_at, tuples
from hyper_parallel.planner.pins import shown_pin
from hyper_parallel.planner.pricing import PricedStrategy, price
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Columns, Space

MIN_RANKED_STRATEGIES: Final = 4
"""Minimum number of best strategies that a search keeps; no two have the same degrees."""
MAX_SIMULATIONS: Final = 4000
"""Number of fully priced strategies at which `price_until_proved` stops; the certificate then states the gap."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a search: the best strategies, and a lower bound that limits how much better another can be."""

    search: BranchAndBound  # the finished branch and bound
    # Strategies of distinct degrees with full prices, best first
    ranked: tuple[PricedStrategy, ...]
    # lower bound of the seconds per token of all strategies that may still be better than the first of `ranked`
    bound: float
    simulated: int  # strategies priced in full; those with a pipeline were simulated

    @property
    def fits(self) -> bool:
        """True if any strategy is legal, fits in memory and is fast enough."""
        return bool(self.ranked)

    @property
    def space_note(self) -> str:
        """Note for the plan about the searched space: devices, executability, pins, exclusions and offload."""
        space, request = self.search.space, self.search.space.request
        parts = [f"strategies on {request.num_devices:,} devices"]
        parts += ["only what this version runs"] * request.executable
        parts += [shown_pin(*pin) for pin in request.pins.items()]
        if space.offloads == [0]:
            parts.append("nothing offloaded")
        return "the space that was searched: " + ", ".join(parts)


def find_best(request: PlanRequest, keep: int = 1, max_s_per_token: float | None = None) -> Outcome:
    """Return the best strategies of a request, with a lower bound of the time of all that may be better.

    Args:
        request: Model, machine, workload and pins.
        keep: Maximum number of strategies of distinct degrees to return; raised to `MIN_RANKED_STRATEGIES` if less.
        max_s_per_token: Maximum step time divided by tokens per step, in seconds; None: no maximum.
    """
    keep, full = max(keep, MIN_RANKED_STRATEGIES), _FullPrices(request)
    search = BranchAndBound(Space(request), keep, max_s_per_token, full.seconds)
    values, open_bound = full.price_until_proved(search.rows)
    limit = (math.inf if max_s_per_token is None else max_s_per_token) * (1 + TIE)
    best = [p for p in full.ranked(search.rows, values, keep) if p.per_token_s <= limit]
    return Outcome(search, tuple(best), min(search.bound, open_bound), len(full.prices))


class _FullPrices:
    """Cache of full prices of complete strategies."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.prices: dict[tuple[Strategy, int], PricedStrategy] = {}

    def price_of(self, rows: Columns, position: int) -> PricedStrategy:
        r = self.request
        strategy, workload = strategy_at(rows, position, r.base, r.workload)
        key = (strategy, workload.microbatch or 1)
        if key not in self.prices:
            self.prices[key] = price(r, strategy, workload)
        return self.prices[key]

    def seconds(self, rows: Columns, position: int) -> float:
        """Return the full price of one row in seconds per token; without a pipeline it is the closed form."""
        if rows["pp"][position] == 1:
            return float(rows["per_token_s"][position])
        return self.price_of(rows, position).per_token_s

    def price_until_proved(self, rows: Columns) -> tuple[NDArray[np.float64], float]:
        """Compute full prices in order of the closed form, until no other row can be better.

        Returns:
            (seconds per token of every row, lower bound of rows that may still be better). The seconds are the full
            price if computed, else the closed form. The bound is infinity unless `MAX_SIMULATIONS` stopped the loop.
        """
        values, unpiped = rows["per_token_s"].copy(), rows["pp"] == 1
        least = float(values[unpiped].min(initial=math.inf))
        piped = np.flatnonzero(~unpiped)
        for position in piped[np.argsort(values[piped], kind="stable")].tolist():
            if values[position] >= least * (1 - TIE):
                break
            if len(self.prices) >= MAX_SIMULATIONS:
                return values, float(values[position])
            values[position] = self.seconds(rows, position)
            least = min(least, float(values[position]))
        return values, math.inf

    def ranked(self, rows: Columns, values: NDArray[np.float64], keep: int) -> list[PricedStrategy]:
        """Return up to `keep` strategies of distinct degrees, best first; `values` are the seconds per token by row."""
        order, degrees = ranked(rows), tuples(rows)
        chosen: dict[tuple[int, ...], PricedStrategy] = {}
        for position in order[np.argsort(np.round(values[order], 18), kind="stable")].tolist():
            if len(chosen) < keep and degrees[position] not in chosen:
                chosen[degrees[position]] = self.price_of(rows, position)
        # The sort is stable: equal prices keep the order of the search.
        return sorted(chosen.values(), key=lambda p: round(p.per_token_s, 18))
