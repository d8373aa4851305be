"""Where a model is cut into pipeline stages, what one pipeline rank holds, and what its backward recomputes.

The pace of a pipeline is that of its slowest stage, so the cut minimises the largest stage cost, and among the cuts
that do, the sum of squares, which evens out the rest. Costs are training FLOPs of one token: matmul weights and causal
attention of every layer, the output projection on the last stage. The embedding lookup multiplies nothing and counts
nothing, as in `ModelSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
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

    @cache
    def largest(start: int, stage: int) -> int:
        """Least cost of the most expensive stage from here on."""
        if stage == stages:
            return 0
        stops = ends(start, stage)
        return min(max(cost(start, s, stage), largest(s, stage + 1)) for s in stops)

    limit = largest(0, 0)

    @cache
    def squares(start: int, stage: int) -> tuple[float, int]:
        """Least sum of squares from here on, no stage above the limit, and where this stage stops."""
        if stage == stages:
            return 0, count
        costs_to = {s: cost(start, s, stage) for s in ends(start, stage)}
        options = ((c**2 + squares(s, stage + 1)[0], s) for s, c in costs_to.items() if c <= limit)
        return min(options, default=(math.inf, count))

    layers, start = [], 0
    for stage in range(stages):
        stop = squares(start, stage)[1]
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


def rank_model(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> ModelSpec:
    """The part of a model that a pipeline rank holds, as a model.

    Blocks keep the layers of the rank's stages. The embedding is on the first stage, final norm and head on the last;
    there a head that shares the embedding's weight holds it under the embedding's name.
    """
    if strategy.pp == 1:
        return model
    layers = {i for stage in _stages(model, strategy, seq_len, pp_rank) for i in stage}
    own = strategy.stages_of(pp_rank)
    first, last = 0 in own, strategy.stages - 1 in own
    blocks = []
    for block in model.blocks:
        if block.layers:
            kept = tuple(i for i in block.layers if i in layers)
            blocks += [replace(block, layers=kept)] if kept else []
        elif block.name == "embedding":
            blocks += [block] if first else []
        elif last:
            blocks.append(block if first else _untied(block, model))
    tied = model.tied_embeddings and first and last
    return replace(model, blocks=tuple(blocks), tied_embeddings=tied)


def recomputed_layers(
    model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int
) -> frozenset[int]:
    """Decoder layers of a pipeline rank that backward recomputes; arguments as of `rank_model`."""
    if strategy.pp == 1:
        return strategy.recomputed([range(model.num_layers)])
    return strategy.recomputed(_stages(model, strategy, seq_len, pp_rank))


def split_recomputed(
    blocks: Iterable[Block], recomputed: frozenset[int]
) -> Iterator[tuple[Block, bool]]:
    """Every block, and whether backward recomputes it; a block with layers of both kinds comes twice."""
    for block in blocks:
        redone = tuple(i for i in block.layers if i in recomputed)
        kept = tuple(i for i in block.layers if i not in recomputed)
        if redone:
            yield replace(block, layers=redone), True
        if kept or not block.layers:
            yield replace(block, layers=kept), False


def _stages(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> list[range]:
    """Layers of each stage of a pipeline rank."""
    per_stage = stage_layers(model, strategy, seq_len)
    ends = [sum(per_stage[:s]) for s in range(len(per_stage) + 1)]
    return [range(ends[s], ends[s + 1]) for s in strategy.stages_of(pp_rank)]


def _untied(block: Block, model: ModelSpec) -> Block:
    """A head apart from the embedding: a shared weight is its own, by the name of the first holder."""
    params = {p.name: p for b in model.blocks for p in b.params}
    return replace(
        block,
        params=tuple(
            replace(params[p.tied_to], dims=p.dims) if p.tied_to else p for p in block.params
        ),
    )
