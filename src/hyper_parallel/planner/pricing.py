"""Predicted time and memory of one strategy: all cost terms, pipeline stages, and the simulated pipeline schedule.

The closed form is the step time by formulas, without the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from hyper_parallel.cost import (
    COPIES,
    Candidates,
    LayerPrices,
    ModelNumbers,
    PricingCase,
    RankStages,
    Scores,
    interpolate_copies,
    kept_bytes,
    memory_terms,
    move_to_host,
    partition,
    rank_model,
    score,
)
from hyper_parallel.ir import CostTerm, MemoryTerm, Stage, StageCost, Strategy, Workload
from hyper_parallel.mpmd import makespan_s, schedule_name
from hyper_parallel.planner.request import PlanRequest

STEP_TAIL: Final = ("gradient norm", "optimizer", COPIES, "every step", "stragglers")
"""Cost terms of a step that occur once, after the gradient reduction."""
MAX_ACTIONS: Final = 20_000
"""Budget of actions, from which `pipeline_s` derives the number of microbatches to simulate."""
MAX_SIMULATED_S: Final = 1e8
"""Pipeline time in seconds (three years) above which no schedule is simulated."""
MIN_SCHEDULE_SHARE: Final = 1e-4
"""Differences between simulation and closed form up to this fraction of the step time are ignored."""


@dataclass(frozen=True, slots=True)
class PricedStrategy:
    """Strategy with its predicted time and memory.

    Attributes:
        strategy: Degrees and choices.
        workload: Resolved batch numbers.
        cost: Terms of the step time.
        memory: Terms of the peak memory.
        stages: Pipeline stages, virtual ones included.
    """

    strategy: Strategy
    workload: Workload
    cost: tuple[CostTerm, ...]
    memory: tuple[MemoryTerm, ...]
    stages: tuple[Stage, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return sum(term.seconds for term in self.cost)

    @property
    def memory_bytes(self) -> int:
        """Predicted peak bytes in the memory of the fullest device."""
        return sum(term.bytes for term in self.memory if term.tier == "hbm")

    @property
    def per_token_s(self) -> float:
        """Predicted seconds per step divided by tokens per step."""
        return self.step_s / (self.workload.tokens_per_step or 1)


def with_stage_memory(request: PlanRequest, priced: PricedStrategy) -> PricedStrategy:
    """Return a priced strategy with memory terms for its actual pipeline stages.

    The search predicts memory for stages with equal FLOPs, but layers are assigned by seconds, or explicitly by the
    user. A strategy without a pipeline, or with bytes in host memory, is returned unchanged.
    """
    w, model = priced.workload, request.model
    s = replace(priced.strategy, stage_layers=tuple(stage.layers for stage in priced.stages))
    if s.pp == 1 or any(term.tier != "hbm" for term in priced.memory):
        return priced
    ranks = [
        RankStages(
            ModelNumbers.of(rank_model(model, s, w.seq_len, rank)),
            first=0 in s.stages_of(rank),
            last=s.stages - 1 in s.stages_of(rank),
        )
        for rank in range(s.pp)
    ]
    candidate = Candidates.of(replace(s, recompute_layers=None), w)
    case = PricingCase(request.numbers, request.machine, w, candidate)
    recomputed_layers = s.recompute_layers if s.recompute != "none" else None
    recomputed_layers = recomputed_layers and min(recomputed_layers, -(-model.num_layers // s.pp))
    terms = memory_terms(case, recomputed_layers, ranks)
    return replace(priced, memory=tuple(t.term_of(0) for t in terms if t.bytes[0] > 0.0))


def price(request: PlanRequest, strategy: Strategy, workload: Workload) -> PricedStrategy:
    """Return the predicted time and memory of one legal strategy; batch numbers in `workload` must be resolved.

    With partial recomputation, time and memory are interpolated between no and all recomputed layers. If the simulated
    schedule is notably slower than the closed form, for example because of unequal layers, the difference is the term
    `schedule`. Otherwise, and without a simulation (above `MAX_SIMULATED_S`), the time is the closed form.
    """
    share = 1.0
    candidate = Candidates.of(replace(strategy, recompute_layers=None), workload)
    machine = request.machine
    if strategy.overlap.tp_symmetric:  # no other matmul runs while such an operator waits
        machine = replace(machine, stack=replace(machine.stack, overlap_weights=0.0))
    recomputed_case = plain = PricingCase(request.numbers, machine, workload, candidate)
    scores = score(recomputed_case)
    cost, memory = scores.cost_at(0), scores.memory_at(0)
    layers = -(-request.model.num_layers // strategy.pp)
    kept_per_layer = _scalar(kept_bytes(recomputed_case))
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        recomputed_layers = min(strategy.recompute_layers, layers)
        share = recomputed_layers / layers
        plain = recomputed_case.with_columns(recompute=np.zeros(1))
        kept_per_layer = (1.0 - share) * _scalar(kept_bytes(plain)) + share * kept_per_layer
        cost = _mixed_time(score(plain), scores, share)
        terms = memory_terms(recomputed_case, recomputed_layers)
        memory = move_to_host(tuple(t.term_of(0) for t in terms if t.bytes[0] > 0.0), cost)
    sends = next(t for t in scores.time if t.name == "pipeline sends")
    send_s = _scalar(sends.inputs["send_s"])
    costs = _layer_seconds(request, recomputed_case, plain, share)
    stages = _stages(strategy, workload, cost, costs, send_s, layers * kept_per_layer)
    priced = PricedStrategy(strategy, workload, cost, memory, stages)
    closed = sum(t.seconds for t in cost if t.name not in ("data-parallel reduction", *STEP_TAIL))
    if strategy.pp == 1 or closed > MAX_SIMULATED_S:
        return priced
    longer = pipeline_s(priced, request.machine.paces(strategy.pp)) - closed
    if longer <= max(0.0, MIN_SCHEDULE_SHARE * priced.step_s):
        return priced
    formula = "simulated schedule - its closed form: uneven layers, full links"
    inputs = {"stages": float(len(stages))}
    schedule_term = CostTerm("schedule", longer, formula, inputs, "event simulation")
    return replace(priced, cost=(*cost, schedule_term))


def _scalar(column: ArrayLike) -> float:
    return float(np.ravel(column)[0])


def _mixed_time(plain: Scores, full: Scores, share: float) -> tuple[CostTerm, ...]:
    """Return the time terms if a fraction `share` of the layers is as in `full`, and the rest as in `plain`."""
    mixed = []
    for plain_term, full_term in zip(plain.time, full.time, strict=True):
        term = full_term.term_of(0)
        if term.name == COPIES:
            copies = interpolate_copies(plain_term.term_of(0), term, share)
            mixed += [] if copies is None else [copies]
            continue
        seconds = (1.0 - share) * float(plain_term.seconds[0]) + share * term.seconds
        if seconds > 0.0:
            mixed.append(replace(term, seconds=seconds))
    return tuple(mixed)


def pipeline_s(priced: PricedStrategy, pace: tuple[float, ...] = ()) -> float:
    """Return the seconds of the simulated pipeline schedule, from the first forward to the end of the last backward.

    A step with many microbatches is simulated with two smaller numbers, which differ by pp, and the time is
    extrapolated linearly. `pace` is the speed of a rank while 1, 2, ... ranks are busy, relative to its speed
    while all are busy; (): ranks do not share cores.
    """
    s, m = priced.strategy, priced.workload.accumulation_steps or 1
    name, costs = schedule_name(s), [stage.cost for stage in priced.stages]

    def seconds(microbatches: int) -> float:
        return makespan_s(name, s.pp, microbatches, s.virtual_stages, costs, pace)

    per_round = 3 * s.pp * s.pp * s.virtual_stages
    rounds = min(3, MAX_ACTIONS // per_round)
    if m <= max(2, rounds + 1) * s.pp:
        return seconds(m)
    simulated = max(1, rounds) * s.pp + m % s.pp
    first, second = seconds(simulated), seconds(simulated + s.pp)
    return first + (second - first) * (m - simulated) / s.pp


def _layer_seconds(
    request: PlanRequest, recomputed_case: PricingCase, plain: PricingCase, share: float
) -> tuple[list[tuple[float, ...]], float, float]:
    """Return seconds of one microbatch: (per decoder layer, of the head, of exposed collectives outside the layers).

    The seconds of a layer are (forward, input gradient, weight gradient, exposed communication per direction). Each is
    the mean of `recomputed_case` with weight `share` and of `plain`.
    """
    by_layer: dict[int, tuple[float, ...]] = {}
    head = outside = 0.0
    for layers, numbers in request.layer_kinds:
        parts = []
        for layer_case in (plain,) if plain is recomputed_case else (plain, recomputed_case):
            prices = LayerPrices.of(replace(layer_case, n=numbers))
            w, c = prices.work, prices.comm
            head, outside = _scalar(prices.head), _scalar(c.outside)
            values = (
                w.forward + w.launch / 3.0,
                w.backward - w.matmul + w.recompute + w.launch / 3.0,
                w.matmul + w.launch / 3.0,
                (c.tp + c.cp + c.ep + c.fsdp) / 2.0,
            )
            parts.append(np.array([_scalar(v) for v in values]))
        mixed = parts[0] if len(parts) == 1 else (1.0 - share) * parts[0] + share * parts[1]
        by_layer.update(dict.fromkeys(layers, tuple(mixed.tolist())))
    return [by_layer[layer] for layer in sorted(by_layer)], head, outside


def _stages(
    strategy: Strategy,
    workload: Workload,
    cost: tuple[CostTerm, ...],
    seconds: tuple[list[tuple[float, ...]], float, float],
    send_s: float,
    activation_bytes: float,
) -> tuple[Stage, ...]:
    """Return the pipeline stages with their costs.

    Unless `strategy.stage_layers` is set, the split minimizes the time of the slowest stage. `seconds` is the result of
    `_layer_seconds`, `send_s` the time of a send to an adjacent stage. `activation_bytes` are the bytes of one
    microbatch that a rank keeps for backward.
    """
    terms = {t.name: t.seconds for t in cost}
    share, count = 1.0 / strategy.virtual_stages, strategy.pp * strategy.virtual_stages
    added = sum(terms.get(n, 0.0) for n in ("gradient accumulation", "host work of axes"))
    added = added / (workload.accumulation_steps or 1)
    reduce_s = terms.pop("data-parallel reduction", 0.0)
    update_s = sum(terms.get(n, 0.0) for n in STEP_TAIL)
    layers, head, outside = seconds
    totals = [forward + inputs + weights + out + out for forward, inputs, weights, out in layers]
    cut = strategy.stage_layers or partition(totals, count, last=head)
    per_layer = activation_bytes / max(1.0, len(layers) / strategy.pp)
    ranges = [range(end - size, end) for end, size in zip(accumulate(cut), cut, strict=True)]
    recomputed_layers: set[int] = set()
    if strategy.recompute != "none":  # full or selective
        full = replace(strategy, recompute="full")
        for rank in range(strategy.pp):
            own = strategy.stages_of(rank) if strategy.pp > 1 else (0,)
            recomputed_layers |= full.recomputed([ranges[s] for s in own])
    stages = []
    for index, layer_range in enumerate(ranges):
        columns = zip(*(layers[layer] for layer in layer_range), strict=True)
        forward, inputs, weights, exposed = (sum(column) for column in columns)
        extra = head / 3.0 if index == count - 1 else 0.0
        exposed = exposed + outside * share / 2.0
        times = StageCost(
            forward_s=forward + extra,
            input_grad_s=inputs + extra,
            weight_grad_s=weights + extra + added * share,
            send_forward_s=send_s if index < count - 1 else 0.0,
            send_backward_s=send_s if index else 0.0,
            activation_bytes=round(per_layer * len(layer_range)),
            exposed_forward_s=exposed,
            exposed_backward_s=exposed,
            reduce_grad_s=reduce_s * share,
            update_s=update_s * share,
        )
        num_recomputed = len(recomputed_layers.intersection(layer_range))
        stages.append(Stage(layer_range.start, len(layer_range), num_recomputed, times))
    return tuple(stages)
