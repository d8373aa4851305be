"""The best strategies of a space with their full prices: real layers on stages, simulated schedules.

The full price of a strategy is its closed form plus what the simulation of its schedule takes longer, so the closed
form, and every lower bound of it, bounds the full price from below. The search keeps every strategy whose closed form
does not exceed the best full price known; those are simulated, the most promising first, until the best full price does
not exceed the closed form of anything that is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner._pins import PINNABLE, SearchLimits, shown_pin
from hyper_parallel.planner._price import PricedStrategy, price
from hyper_parallel.planner._request import PlanRequest
from hyper_parallel.planner._rows import TIE, PricedRows, SearchGoal, SearchResult
from hyper_parallel.planner._search import solve
from hyper_parallel.planner._space import MOST_CP, MOST_TP, ModelLimits, Space

KEPT: Final = 4
"""Degrees that are kept at least, runners-up included."""
MOST_SIMULATED: Final = 4000
"""Simulations after which the search stops; the certificate then tells the gap."""


def space_of(request: PlanRequest, limits: SearchLimits) -> Space:
    """The space within limits, whose `tp` and `ep` are filled in here.

    What must run is asked of the layouts themselves, so that the search needs no copy of their rules.

    Args:
        request: Model, machine and workload.
        limits: What may be chosen.
    """
    runs, base, usual = limits.executable, limits.base, Strategy()
    # What the strategy to start with says beyond the usual is as good as a pin.
    said = {
        name: PINNABLE[name].values.index(getattr(base, name))
        for name in ("attention_scatter", "gathered_inputs")
        if getattr(base, name) != getattr(usual, name)
    }
    limits = replace(
        limits,
        pins={**said, **limits.pins},
        tp=request.tp_degrees(limits.num_devices, runs),
        ep=request.ep_degrees(limits.num_devices) if runs else None,
    )

    def refusal(strategy: Strategy) -> str | None:
        try:
            request.shard(strategy)
        except HyperParallelError as error:
            return error.what
        return None

    offload = request.offload is not None and request.machine.host_bytes_s > 0
    rules = ModelLimits.of(request.model, request.workload, offload)
    return Space(rules, request.workload, limits, refusal if runs else None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished search.

    Attributes:
        result: What branch and bound found.
        ranked: Strategies of distinct degrees in full, best first.
        bound: Seconds per token that no strategy of the space is below, beside `ranked`.
        simulated: Strategies whose schedule was simulated.
        space: What was legal.
    """

    result: SearchResult
    ranked: tuple[PricedStrategy, ...]
    bound: float
    simulated: int
    space: Space

    @property
    def fits(self) -> bool:
        """Whether any strategy fits."""
        return bool(self.ranked)

    @property
    def searched_space(self) -> str:
        """What was searched, in words: of all strategies those that pins, exclusions and this version leave."""
        limits = self.space.limits
        micro = self.space.microbatches()
        parts = [
            f"strategies on {limits.num_devices:,} devices with tp <= {MOST_TP}, cp <= {MOST_CP}"
        ]
        if len(micro) > 1:
            parts.append("sequences per microbatch " + ", ".join(map(str, micro)))
        parts.append("sequences not padded" + ", only what this version runs" * limits.executable)
        parts += [shown_pin(*pin) for pin in limits.pins.items()]
        if not self.space.rules.offload:
            parts.append("nothing offloaded")
        return "the space that was searched: " + ", ".join(parts)


def find(
    request: PlanRequest,
    limits: SearchLimits,
    keep: int = 1,
    capacity_bytes: float | None = None,
    at_most_s_per_token: float | None = None,
) -> Outcome:
    """The best strategies within limits, proved.

    Args:
        request: Model, machine and workload.
        limits: What may be chosen; its `tp` and `ep` are filled in here.
        keep: Strategies of distinct degrees to find.
        capacity_bytes: Memory of a device; None: all of it.
        at_most_s_per_token: Slower strategies are of no interest.
    """
    if capacity_bytes is not None:
        request = replace(request, capacity_bytes=capacity_bytes)
    space, keep = space_of(request, limits), max(keep, KEPT)
    simulations = _Simulations(request, space)
    goal = SearchGoal(request.machine.memory_bytes, at_most_s_per_token, keep, simulations.full_s)
    result = solve(request.numbers, request.machine, request.workload, space, goal)
    values, left = simulations.until_proved(result.rows)
    most = (at_most_s_per_token or math.inf) * (1 + TIE)
    ranked = simulations.ranked(result.rows, values, keep)
    return Outcome(
        result,
        tuple(p for p in ranked if p.per_token_s <= most),
        min(result.bound, left),
        len(simulations.known),
        space,
    )


def strategy_at(
    rows: PricedRows, position: int, base: Strategy, workload: Workload
) -> tuple[Strategy, Workload]:
    """One complete strategy with its resolved workload."""
    row = rows.take(np.array([position]))
    columns = {n: c for n, c in row.columns.items() if n != "dp"}
    strategy, resolved = Candidates.of_columns(**columns).at(0, base, workload)
    layers = int(row.layers[0])
    if strategy.pp == 1:
        strategy = replace(strategy, schedule="1f1b", schedule_file="", stage_layers=())
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved


@dataclass(slots=True)
class _Simulations:
    """Full prices of complete strategies, each computed once.

    Attributes:
        request: Model and machine.
        space: What is legal.
        known: Full prices by strategy and sequences per microbatch.
    """

    request: PlanRequest
    space: Space
    known: dict[tuple[Strategy, int], PricedStrategy] = field(default_factory=dict)

    def full(self, rows: PricedRows, position: int) -> PricedStrategy:
        """The full price of one row."""
        base = self.space.limits.base
        strategy, workload = strategy_at(rows, position, base, self.request.workload)
        key = (strategy, workload.microbatch or 1)
        if key not in self.known:
            self.known[key] = price(self.request, strategy, workload)
        return self.known[key]

    def full_s(self, rows: PricedRows, position: int) -> float:
        """Seconds per token of one row; without a pipeline the closed form is the full price."""
        if rows.columns["pp"][position] == 1:
            return float(rows.per_token_s[position])
        return self.full(rows, position).per_token_s

    def until_proved(self, rows: PricedRows) -> tuple[NDArray[np.float64], float]:
        """Full prices as far as they decide which row is best, closed forms of the others.

        Returns:
            Seconds per token of every row; least closed form of those that are left though they may be better.
        """
        values = rows.per_token_s.copy()
        alone = rows.columns["pp"] == 1
        least = float(values[alone].min()) if alone.any() else math.inf
        piped = np.flatnonzero(~alone)
        for position in piped[np.argsort(values[piped], kind="stable")].tolist():
            if values[position] >= least * (1 - TIE):
                break
            if len(self.known) >= MOST_SIMULATED:
                return values, float(values[position])
            values[position] = self.full_s(rows, position)
            least = min(least, float(values[position]))
        return values, math.inf

    def ranked(
        self, rows: PricedRows, values: NDArray[np.float64], keep: int
    ) -> list[PricedStrategy]:
        """The best strategies of distinct degrees in full, best first."""
        if not len(rows):
            return []
        order, meshes = rows.ranked(), rows.meshes()
        chosen: dict[tuple[int, ...], PricedStrategy] = {}
        for position in order[np.argsort(np.round(values[order], 18), kind="stable")].tolist():
            if meshes[position] not in chosen:
                chosen[meshes[position]] = self.full(rows, position)
            if len(chosen) == keep:
                break
        # Python's sort keeps the order of the search where prices are equal.
        return sorted(chosen.values(), key=lambda p: round(p.per_token_s, 18))
