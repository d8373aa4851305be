"""One strategy with its full price: every term, stages, and the simulated schedule."""

from __future__ import annotations

from collections.abc import Sequence
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
    RankStages,
    Scores,
    Setting,
    kept_bytes,
    memory_terms,
    mixed_term,
    put_away,
    rank_model,
    score,
)
from hyper_parallel.ir import CostTerm, MemoryTerm, Stage, StageCost, Strategy, Workload
from hyper_parallel.mpmd import makespan_s, schedule_name
from hyper_parallel.planner.request import PlanRequest

ONCE: Final = ("data-parallel reduction", "gradient norm", "optimizer", COPIES, "every step")
"""Terms that come once per step, after the last microbatch."""
MOST_ACTIONS: Final = 20_000
"""Computations that one simulation may have; longer steps are simulated for fewer microbatches and continued."""
LONGEST_S: Final = 1e8
"""Seconds of a step, three years, beyond which its schedule is not simulated: nanoseconds would exceed 64 bits."""
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


def with_stage_memory(request: PlanRequest, priced: PricedStrategy) -> PricedStrategy:
    """Return a priced pipeline with the peak memory of the stages that it has.

    The search, which knows no stages, cuts layers by FLOPs for memory; the stages are cut by seconds, or given. What
    lies in host memory stays as it was priced.
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
    again = s.recompute_layers if s.recompute != "none" else None
    held = memory_terms(Setting(request.numbers, request.machine, w, candidate), again, ranks)
    return replace(priced, memory=tuple(t.at(0) for t in held if t.bytes[0] > 0.0))


def price(request: PlanRequest, strategy: Strategy, workload: Workload) -> PricedStrategy:
    """Terms, stages and simulated schedule of one legal strategy with resolved batch numbers.

    With recomputation of some layers, time and memory lie between those of none and all. What the simulated schedule
    takes longer than the closed form (uneven layers, full links) is a term of its own; where it takes less, the closed
    form stands, so that the search, which knows only the closed form, never misses a better strategy.
    """
    again, share = strategy.recompute_layers, 1.0
    candidate = Candidates.of(replace(strategy, recompute_layers=None), workload)
    setting = plain = Setting(request.numbers, request.machine, workload, candidate)
    scores = score(setting)
    cost, memory = scores.cost_at(0), scores.memory_at(0)
    layers = -(-request.model.num_layers // strategy.pp)
    kept = _one(kept_bytes(setting))
    if strategy.recompute != "none" and again is not None:
        share, plain = again / layers, setting.under(recompute=np.zeros(1))
        kept = (1.0 - share) * _one(kept_bytes(plain)) + share * kept
        cost = _mixed_time(score(plain), scores, share)
        held = memory_terms(setting, again)
        memory = put_away(tuple(t.at(0) for t in held if t.bytes[0] > 0.0), cost)
    sends = next(t for t in scores.time if t.name == "pipeline sends")
    costs = _layer_seconds(request, setting, plain, share)
    stages = _stages(strategy, workload, cost, costs, _one(sends.inputs["send_s"]), layers * kept)
    priced = PricedStrategy(strategy, workload, cost, memory, stages)
    closed = sum(t.seconds for t in cost if t.name not in (*ONCE, "stragglers"))
    if strategy.pp == 1 or closed > LONGEST_S:
        return priced
    longer = pipeline_s(priced, request.machine.paces(strategy.pp)) - closed
    if longer <= max(0.0, WORTH * priced.step_s):
        return priced
    told = "simulated schedule - its closed form: uneven layers, full links"
    more = CostTerm("schedule", longer, told, {"stages": float(len(stages))}, "event simulation")
    return replace(priced, cost=(*cost, more))


def _one(column: ArrayLike) -> float:
    """The value of the only candidate."""
    return float(np.ravel(column)[0])


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


def _layer_seconds(
    request: PlanRequest, setting: Setting, plain: Setting, share: float
) -> tuple[list[tuple[float, ...]], float, float]:
    """Seconds of one microbatch: of every decoder layer, of the head, and exposed traffic outside of the layers.

    Those of a layer are its forward, both halves of its backward, and what is exposed beside each direction. A share
    of the layers is recomputed as in `setting`, the others as in `plain`.
    """
    known: dict[int, tuple[float, ...]] = {}
    head = outside = 0.0
    for layers, numbers in request.layer_kinds:
        parts = []
        for chosen in (plain,) if plain is setting else (plain, setting):
            prices = LayerPrices.of(replace(chosen, n=numbers))
            w, c = prices.work, prices.comm
            head, outside = _one(prices.head), _one(c.outside)
            values = (
                w.forward + w.launch / 3.0,
                w.backward - w.matmul + w.recompute + w.launch / 3.0,
                w.matmul + w.launch / 3.0,
                (c.tp + c.cp + c.ep + c.fsdp) / 2.0,
            )
            parts.append(np.array([_one(v) for v in values]))
        mixed = parts[0] if len(parts) == 1 else (1.0 - share) * parts[0] + share * parts[1]
        known.update(dict.fromkeys(layers, tuple(mixed.tolist())))
    return [known[layer] for layer in sorted(known)], head, outside


def _stages(
    strategy: Strategy,
    workload: Workload,
    cost: tuple[CostTerm, ...],
    seconds: tuple[list[tuple[float, ...]], float, float],
    send_s: float,
    activation_bytes: float,
) -> tuple[Stage, ...]:
    """The stages, cut so that the slowest is as fast as it can be; of `_layer_seconds` and what a rank keeps."""
    terms = {t.name: t.seconds for t in cost}
    share, count = 1.0 / strategy.virtual_stages, strategy.pp * strategy.virtual_stages
    added = sum(terms.get(n, 0.0) for n in ("gradient accumulation", "host work of axes"))
    added = added / (workload.accumulation_steps or 1)
    reduce_s = terms.pop("data-parallel reduction", 0.0)
    update_s = sum(terms.get(n, 0.0) for n in (*ONCE, "stragglers"))
    layers, head, outside = seconds
    totals = [forward + inputs + weights + out + out for forward, inputs, weights, out in layers]
    cut = strategy.stage_layers or partition(totals, count, last=head)
    per_layer = activation_bytes / max(1.0, len(layers) / strategy.pp)
    ranges = [range(end - size, end) for end, size in zip(accumulate(cut), cut, strict=True)]
    again: set[int] = set()
    if strategy.recompute != "none":  # whole or selective
        for rank in range(strategy.pp):
            own = strategy.stages_of(rank) if strategy.pp > 1 else (0,)
            again |= replace(strategy, recompute="full").recomputed([ranges[s] for s in own])
    stages = []
    for index, mine in enumerate(ranges):
        columns = zip(*(layers[layer] for layer in mine), strict=True)
        forward, inputs, weights, exposed = (sum(column) for column in columns)
        extra = head / 3.0 if index == count - 1 else 0.0
        exposed = exposed + outside * share / 2.0
        times = StageCost(
            forward_s=forward + extra,
            input_grad_s=inputs + extra,
            weight_grad_s=weights + extra + added * share,
            send_forward_s=send_s if index < count - 1 else 0.0,
            send_backward_s=send_s if index else 0.0,
            activation_bytes=round(per_layer * len(mine)),
            exposed_forward_s=exposed,
            exposed_backward_s=exposed,
            reduce_grad_s=reduce_s * share,
            update_s=update_s * share,
        )
        stages.append(Stage(mine.start, len(mine), len(again.intersection(mine)), times))
    return tuple(stages)


def partition(costs: Sequence[float], parts: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Contiguous parts of at least one element, so that the greatest sum is as small as it can be.

    Args:
        costs: Cost of every element, in order.
        parts: How many parts, at most as many as elements.
        last: Extra cost of the last part.

    Returns:
        Number of elements of every part. Of the cuts with the least greatest sum the one that fills from the end, so
        that the first stages, which hold most activations, are light.

    Cost: the sums of all runs are the only values the greatest sum can have; a binary search over them, each tried
        greedily: O(n^2 log n) to sort, O(n log n) to search. Exact for contiguous parts.
    """
    n = len(costs)
    prefix = np.array([0.0, *accumulate(costs)])
    sums = prefix[None, :] - prefix[:, None]
    upper = np.triu_indices(n + 1, 1)
    values = np.sort(np.concatenate([sums[upper], prefix[n] - prefix[:n] + last]))

    def cut(limit: float) -> list[int] | None:
        found, end = [], n
        for part in range(parts, 0, -1):
            room = limit - (last if part == parts else 0.0)
            start = end - 1
            while start > part - 1 and prefix[end] - prefix[start - 1] <= room * (1 + 1e-12):
                start -= 1
            if start < part - 1 or prefix[end] - prefix[start] > room * (1 + 1e-12):
                return None
            found.append(end - start)
            end = start
        return found[::-1] if end == 0 else None

    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if cut(float(values[middle])) is None:
            low = middle + 1
        else:
            high = middle
    best = cut(float(values[low]))
    assert best is not None, "one part can hold everything that is left"
    return tuple(best)
