"""Where a model is cut into pipeline stages: decoder layers per stage, by cost.

The pace of a pipeline is that of its slowest stage, so the cut minimises the largest stage cost, and among the cuts
that do, the sum of squares, which evens out the rest. Costs are training FLOPs of one token: matmul weights and causal
attention of every layer, the output projection on the last stage. The embedding lookup multiplies nothing and counts
nothing, as in `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hyper_parallel.errors import NotDivisible
from hyper_parallel.ir import Strategy
from hyper_parallel.model import Block, ModelSpec


def cut_layers(costs: Sequence[int], stages: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Layers of each stage, at least one each, so that the most expensive stage is as cheap as possible.

    Exact, by dynamic programming over (layer, stage): first the least maximum, then the least sum of squares under it;
    of equal cuts the one with fewer layers in the earlier stages, which hold the most activations.

    Args:
        costs: Cost of every layer, first layer first; whole numbers, so that the result does not depend on rounding.
        stages: Number of stages.
        first: Cost added to the first stage, for what stands before the layers.
        last: Cost added to the last stage, for what stands after them.

    Raises:
        NotDivisible: HP203 for more stages than layers.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise NotDivisible(
            "a pipeline has more stages than the model has layers",
            got=f"{stages} stages, {count} layers",
            allowed=f"1 to {count} stages",
            changes={"parallel.pp": count, "parallel.virtual_stages": 1},
        )
    before = [0, *accumulate(costs)]

    def cost(start: int, stop: int, stage: int) -> int:
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return before[stop] - before[start] + extra

    def ends(start: int, stage: int) -> range:
        """Where a stage that begins at `start` may stop, so that every later stage has a layer."""
        left = stages - 1 - stage
        return range(count, count + 1) if left == 0 else range(start + 1, count - left + 1)

    largest = [0] * (count + 1)
    for stage in reversed(range(stages)):
        largest = [
            min(
                (
                    max(cost(start, stop, stage), largest[stop] if stage < stages - 1 else 0)
                    for stop in ends(start, stage)
                ),
                default=0,
            )
            if start < count
            else 0
            for start in range(count + 1)
        ]
    limit = largest[0]
    infinite = (stages + 1) * (limit + 1) ** 2
    # squares[stage][start]: least sum of squares of the stages from `stage` on, the first of which begins at `start`.
    squares: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for stage in reversed(range(stages)):
        for start in range(count):
            options = [
                (
                    cost(start, stop, stage) ** 2
                    + (squares[stage + 1][stop][0] if stage < stages - 1 else 0),
                    stop,
                )
                for stop in ends(start, stage)
                if cost(start, stop, stage) <= limit
            ]
            squares[stage].append(min(options, default=(infinite, count)))
    layers, start = [], 0
    for stage in range(stages):
        stop = squares[stage][start][1]
        layers.append(stop - start)
        start = stop
    return tuple(layers)


@lru_cache(maxsize=256)
def stage_layers(model: ModelSpec, strategy: Strategy, seq_len: int) -> tuple[int, ...]:
    """Decoder layers of each (virtual) stage: those of the strategy, else cut by cost.

    Args:
        model: The model.
        strategy: Stages, and `stage_layers` when the cut is given.
        seq_len: Tokens per sequence, for the cost of attention.

    Raises:
        NotDivisible: HP203 for more stages than layers, or given numbers that do not add up to the layers.
    """
    if strategy.stage_layers:
        check_stage_layers(strategy, model.num_layers)
        return strategy.stage_layers
    blocks = [model.block_of(layer) for layer in range(model.num_layers)]
    outside = [b for b in model.blocks if not b.layers]
    head = sum(6 * b.num_matmul_params for b in outside if b.name == "head")
    return cut_layers([_layer_flops(b, seq_len) for b in blocks], strategy.stages, last=head)


def check_stage_layers(strategy: Strategy, layers: int) -> None:
    """Raise when the given cut does not fit a model of so many layers.

    Raises:
        NotDivisible: HP203 with a cut that does.
    """
    stages, given = strategy.stages, strategy.stage_layers
    if given and (len(given) != stages or sum(given) != layers or min(given) < 1):
        near = cut_layers([1] * layers, stages) if stages <= layers else ()
        raise NotDivisible(
            "`stage_layers` must give every stage at least one layer and every layer one stage",
            where="parallel.stage_layers",
            got=f"{list(given)}: {len(given)} stages, {sum(given)} layers",
            allowed=f"{stages} numbers that add up to {layers}",
            changes={"parallel.stage_layers": near} if near else None,
        )


def _layer_flops(block: Block, seq_len: int) -> int:
    attention = block.attention
    scores = attention.forward_flops_per_token(seq_len, causal=True) if attention else 0.0
    return 6 * block.num_matmul_params + round(3 * scores)
