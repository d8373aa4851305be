"""One strategy with its full price: every term, stages, and the simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hyper_parallel.cost import (
    COPIES,
    Candidates,
    Scores,
    Setting,
    kept_bytes,
    memory_terms,
    mixed_term,
    put_away,
    score,
)
from hyper_parallel.ir import CostTerm, MemoryTerm, Stage, Strategy, Workload
from hyper_parallel.mpmd import makespan_s, schedule_name
from hyper_parallel.planner._request import PlanRequest
from hyper_parallel.planner._stages import make_stages

ONCE: Final = ("data-parallel reduction", "gradient norm", "optimizer", COPIES, "every step")
"""Terms that come once per step, after the last microbatch."""
MOST_ACTIONS: Final = 20_000
"""Computations that one simulation may have; longer steps are simulated for fewer microbatches and continued."""
WORTH: Final = 1e-4
"""Share of the step below which a simulation agrees with the closed form: the rest is rounding and links."""


@dataclass(frozen=True, slots=True)
class PricedStrategy:
    """A strategy and what it costs.

    Attributes:
        strategy: Degrees and choices.
        workload: Resolved batch numbers.
        cost: Terms of the step time.
        memory: Terms of the peak memory.
        stages: Virtual stages.
    """

    strategy: Strategy
    workload: Workload
    cost: tuple[CostTerm, ...]
    memory: tuple[MemoryTerm, ...]
    stages: tuple[Stage, ...]

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(term.seconds for term in self.cost)

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return sum(term.bytes for term in self.memory if term.tier == "hbm")

    @property
    def per_token_s(self) -> float:
        """Seconds per token."""
        return self.step_s / (self.workload.tokens_per_step or 1)


def price(request: PlanRequest, strategy: Strategy, workload: Workload) -> PricedStrategy:
    """Terms, stages and simulated schedule of one strategy.

    With recomputation of some layers, time and memory lie between those of none and all. What the simulated schedule
    takes longer than the closed form (uneven layers, full links) is a term of its own; where it takes less, the closed
    form stands, so that the search, which knows only the closed form, never misses a better strategy.

    Args:
        request: Model and machine.
        strategy: Legal degrees and choices.
        workload: Resolved batch numbers.
    """
    machine = request.machine
    whole = replace(strategy, recompute_layers=None)
    scores = score(_setting(request, whole, workload))
    cost, memory = scores.cost_at(0), scores.memory_at(0)
    layers = -(-request.model.num_layers // strategy.pp)
    kept = _kept(request, whole, workload)
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        share = strategy.recompute_layers / layers
        without = replace(whole, recompute="none")
        plain = score(_setting(request, without, workload))
        kept = (1.0 - share) * _kept(request, without, workload) + share * kept
        cost = _mixed_time(plain, scores, share)
        held = memory_terms(_setting(request, whole, workload), strategy.recompute_layers)
        memory = put_away(tuple(t.at(0) for t in held if t.bytes[0] > 0.0), cost)
    terms = {t.name: t.seconds for t in cost}
    sends = next((t for t in scores.time if t.name == "pipeline sends"), None)
    send_s = float(np.ravel(sends.inputs.get("send_s", 0.0))[0]) if sends is not None else 0.0
    stages = make_stages(
        request,
        workload,
        strategy,
        accumulate_s=sum(terms.get(n, 0.0) for n in ("gradient accumulation", "host work of axes"))
        / (workload.accumulation_steps or 1),
        reduce_s=terms.get("data-parallel reduction", 0.0),
        update_s=sum(
            terms.get(n, 0.0) for n in (*ONCE, "stragglers") if n != "data-parallel reduction"
        ),
        send_s=send_s if strategy.pp > 1 else 0.0,
        activation_bytes=layers * kept,
    )
    priced = PricedStrategy(strategy, workload, cost, memory, stages)
    longer = _longer(priced, machine.paces(strategy.pp))
    if longer > WORTH * priced.step_s:
        cost = (
            *cost,
            CostTerm(
                "schedule",
                longer,
                "simulated schedule - its closed form: uneven layers, full links",
                {"stages": float(len(stages))},
                "event simulation",
            ),
        )
        priced = replace(priced, cost=cost)
    return priced


def _setting(request: PlanRequest, strategy: Strategy, workload: Workload) -> Setting:
    candidate = Candidates.of(strategy, workload)
    return Setting(request.numbers, request.machine, workload, candidate)


def _kept(request: PlanRequest, strategy: Strategy, workload: Workload) -> float:
    """Bytes that a layer and microbatch keeps for backward."""
    return float(np.ravel(kept_bytes(_setting(request, strategy, workload)))[0])


def _mixed_time(plain: Scores, full: Scores, share: float) -> tuple[CostTerm, ...]:
    mixed = []
    for one, other in zip(plain.time, full.time, strict=True):
        term = other.at(0)
        if term.name == COPIES:
            copies = mixed_term(one.at(0), term, share)
            mixed += [] if copies is None else [copies]
            continue
        seconds = (1.0 - share) * float(one.seconds[0]) + share * term.seconds
        if seconds > 0.0:
            mixed.append(replace(term, seconds=seconds))
    return tuple(mixed)


def _longer(priced: PricedStrategy, pace: tuple[float, ...]) -> float:
    """Seconds that the simulated pipeline takes beyond the closed form; 0 without a pipeline."""
    s = priced.strategy
    if s.pp == 1:
        return 0.0
    closed = sum(t.seconds for t in priced.cost if t.name not in (*ONCE, "stragglers"))
    return max(0.0, pipeline_s(priced, pace) - closed)


def pipeline_s(priced: PricedStrategy, pace: tuple[float, ...] = ()) -> float:
    """Seconds of the simulated schedule, from the first forward to the last backward.

    A step of very many microbatches is simulated for one and two rounds of one per rank, and continued in a straight
    line: once the pipeline is full every round takes the same time.
    """
    s, m = priced.strategy, priced.workload.accumulation_steps or 1
    name, costs = schedule_name(s), [stage.cost for stage in priced.stages]

    def seconds(microbatches: int) -> float:
        return makespan_s(name, s.pp, microbatches, s.virtual_stages, costs, pace)

    per_round = 3 * s.pp * s.pp * s.virtual_stages
    rounds = min(3, MOST_ACTIONS // per_round)
    if m <= max(2, rounds + 1) * s.pp:
        return seconds(m)
    few = max(1, rounds) * s.pp + m % s.pp
    first, second = seconds(few), seconds(few + s.pp)
    return first + (second - first) * (m - few) / s.pp
