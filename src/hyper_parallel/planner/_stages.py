"""Stages of one strategy: which layers lie on which virtual stage, and what a microbatch costs there.

The search prices a pipeline as equal (mean) layers. Here the layers are the model's own: every kind (dense, experts,
sliding attention) has its price, the cut that makes the slowest stage fastest is exact, and the schedule is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hyper_parallel.cost import Candidates, LayerPrices, Setting
from hyper_parallel.ir import Stage, StageCost, Strategy, Workload
from hyper_parallel.planner._request import PlanRequest


@dataclass(frozen=True, slots=True)
class _LayerCost:
    """Seconds of one layer and microbatch."""

    forward: float
    input_grad: float
    weight_grad: float
    exposed_forward: float
    exposed_backward: float

    @property
    def total(self) -> float:
        return (
            self.forward
            + self.input_grad
            + self.weight_grad
            + self.exposed_forward
            + self.exposed_backward
        )


def make_stages(
    request: PlanRequest,
    workload: Workload,
    strategy: Strategy,
    *,
    accumulate_s: float,
    reduce_s: float,
    update_s: float,
    send_s: float,
    activation_bytes: float,
) -> tuple[Stage, ...]:
    """The stages of a strategy, cut so that the slowest is as fast as it can be.

    Args:
        request: Model and machine.
        workload: Resolved batch numbers.
        strategy: Degrees and choices; its `stage_layers`, when given, are kept.
        accumulate_s: Seconds of adding the gradients of one microbatch to the sum on a rank, and of host work.
        reduce_s: Seconds of the data-parallel reduction of a rank at the end of the step.
        update_s: Seconds of norm and optimizer of a rank.
        send_s: Seconds on the link between two stages, one way.
        activation_bytes: What one microbatch keeps on a rank, all its layers.
    """
    count = strategy.pp * strategy.virtual_stages
    costs, head, outside = _layer_costs(request, workload, strategy)
    totals = [c.total for c in costs]
    cut = strategy.stage_layers or partition(totals, count, last=head)
    per_layer = activation_bytes / max(1.0, len(costs) / strategy.pp)
    again = _recomputed(strategy, cut)
    stages, first = [], 0
    for index, layers in enumerate(cut):
        mine = costs[first : first + layers]
        extra = head if index == count - 1 else 0.0
        share = 1.0 / strategy.virtual_stages
        cost = StageCost(
            forward_s=sum(c.forward for c in mine) + extra / 3.0,
            input_grad_s=sum(c.input_grad for c in mine) + extra / 3.0,
            weight_grad_s=sum(c.weight_grad for c in mine) + extra / 3.0 + accumulate_s * share,
            send_forward_s=send_s if index < count - 1 else 0.0,
            send_backward_s=send_s if index else 0.0,
            activation_bytes=round(per_layer * layers),
            exposed_forward_s=sum(c.exposed_forward for c in mine) + outside * share / 2.0,
            exposed_backward_s=sum(c.exposed_backward for c in mine) + outside * share / 2.0,
            reduce_grad_s=reduce_s * share,
            update_s=update_s * share,
        )
        stages.append(Stage(first, layers, again[index], cost))
        first += layers
    return tuple(stages)


def _recomputed(strategy: Strategy, cut: Sequence[int]) -> list[int]:
    """Layers of every stage that recomputation, whole or selective, applies to."""
    if strategy.recompute == "none":
        return [0] * len(cut)
    ends = [*accumulate(cut)]
    stages = [range(end - layers, end) for end, layers in zip(ends, cut, strict=True)]
    again: set[int] = set()
    for rank in range(strategy.pp):
        own = strategy.stages_of(rank) if strategy.pp > 1 else (0,)
        again |= replace(strategy, recompute="full").recomputed([stages[s] for s in own])
    return [len(again.intersection(stage)) for stage in stages]


def _layer_costs(
    request: PlanRequest, workload: Workload, strategy: Strategy
) -> tuple[list[_LayerCost], float, float]:
    """Cost of every decoder layer in order; seconds of the head; exposed traffic of what lies outside the layers."""
    share = 1.0
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        share = strategy.recompute_layers / -(-request.model.num_layers // strategy.pp)
    plain = replace(strategy, recompute="none", recompute_layers=None)
    known: dict[int, _LayerCost] = {}
    head = outside = 0.0
    for layers, numbers in request.layer_kinds:
        parts = []
        for chosen in dict.fromkeys((plain, replace(strategy, recompute_layers=None))):
            candidate = Candidates.of(chosen, workload)
            prices = LayerPrices.of(Setting(numbers, request.machine, workload, candidate))
            w, c = prices.work, prices.comm
            head, outside = (float(np.ravel(v)[0]) for v in (prices.head, c.outside))
            values = (
                w.forward + w.launch / 3.0,
                w.backward - w.matmul + w.recompute + w.launch / 3.0,
                w.matmul + w.launch / 3.0,
                (c.tp + c.cp + c.ep + c.fsdp) / 2.0,
            )
            parts.append(np.array([float(np.ravel(v)[0]) for v in values]))
        mixed = parts[0] if len(parts) == 1 else (1.0 - share) * parts[0] + share * parts[1]
        forward, inputs, weights, exposed = mixed.tolist()
        cost = _LayerCost(forward, inputs, weights, exposed, exposed)
        known.update(dict.fromkeys(layers, cost))
    return [known[layer] for layer in sorted(known)], head, outside


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
