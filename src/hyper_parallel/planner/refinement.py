"""The best strategies of a space with their full prices: real layers on stages, simulated schedules.

The full price of a strategy is its closed form plus what the simulation of its schedule takes longer, so the closed
form, and every lower bound of it, bounds the full price from below. The search keeps every strategy whose closed form
does not exceed the best full price known; those are simulated, the most promising first, until the best full price does
not exceed the closed form of anything that is left.
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

KEPT: Final = 4
"""Degrees that are kept at least, runners-up included."""
MOST_SIMULATED: Final = 4000
"""Simulations after which the search stops; the certificate then tells the gap."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished search."""

    search: BranchAndBound  # what branch and bound found
    ranked: tuple[PricedStrategy, ...]  # strategies of distinct degrees in full, best first
    bound: float  # seconds per token that no strategy of the space is below, beside `ranked`
    simulated: int  # strategies whose schedule was simulated

    @property
    def fits(self) -> bool:
        """Whether any strategy fits."""
        return bool(self.ranked)

    @property
    def searched_space(self) -> str:
        """What was searched, in words: of all strategies those that pins, exclusions and this version leave."""
        space, request = self.search.space, self.search.space.request
        parts = [f"strategies on {request.num_devices:,} devices"]
        parts += ["only what this version runs"] * request.executable
        parts += [shown_pin(*pin) for pin in request.pins.items()]
        if space.offloads == [0]:
            parts.append("nothing offloaded")
        return "the space that was searched: " + ", ".join(parts)


def find(request: PlanRequest, keep: int = 1, at_most_s_per_token: float | None = None) -> Outcome:
    """The best strategies of a request, so many of distinct degrees and none slower than the limit, proved."""
    keep, full = max(keep, KEPT), _FullPrices(request)
    search = BranchAndBound(Space(request), keep, at_most_s_per_token, full.seconds)
    values, left = full.until_proved(search.rows)
    most = (at_most_s_per_token or math.inf) * (1 + TIE)
    best = [p for p in full.ranked(search.rows, values, keep) if p.per_token_s <= most]
    return Outcome(search, tuple(best), min(search.bound, left), len(full.known))


class _FullPrices:
    """Full prices of complete strategies, each computed once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.known: dict[tuple[Strategy, int], PricedStrategy] = {}

    def at(self, rows: Columns, position: int) -> PricedStrategy:
        """The full price of one row."""
        r = self.request
        strategy, workload = strategy_at(rows, position, r.base, r.workload)
        key = (strategy, workload.microbatch or 1)
        if key not in self.known:
            self.known[key] = price(r, strategy, workload)
        return self.known[key]

    def seconds(self, rows: Columns, position: int) -> float:
        """Seconds per token of one row; without a pipeline the closed form is the full price."""
        if rows["pp"][position] == 1:
            return float(rows["per_token_s"][position])
        return self.at(rows, position).per_token_s

    def until_proved(self, rows: Columns) -> tuple[NDArray[np.float64], float]:
        """Full prices as far as they decide which row is best, closed forms of the others.

        Returns:
            Seconds per token of every row; least closed form of those that are left though they may be better.
        """
        values, alone = rows["per_token_s"].copy(), rows["pp"] == 1
        least = float(values[alone].min(initial=math.inf))
        piped = np.flatnonzero(~alone)
        for position in piped[np.argsort(values[piped], kind="stable")].tolist():
            if values[position] >= least * (1 - TIE):
                break
            if len(self.known) >= MOST_SIMULATED:
                return values, float(values[position])
            values[position] = self.seconds(rows, position)
            least = min(least, float(values[position]))
        return values, math.inf

    def ranked(self, rows: Columns, values: NDArray[np.float64], keep: int) -> list[PricedStrategy]:
        """The best strategies of distinct degrees in full, best first."""
        order, degrees = ranked(rows), tuples(rows)
        chosen: dict[tuple[int, ...], PricedStrategy] = {}
        for position in order[np.argsort(np.round(values[order], 18), kind="stable")].tolist():
            if len(chosen) < keep and degrees[position] not in chosen:
                chosen[degrees[position]] = self.at(rows, position)
        # Python's sort keeps the order of the search where prices are equal.
        return sorted(chosen.values(), key=lambda p: round(p.per_token_s, 18))
