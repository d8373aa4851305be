"""Split of a model into pipeline stages, the part of one pipeline rank, and the layers that its backward recomputes.

The slowest stage limits a pipeline, so the split minimizes the largest stage cost, and among the optimal splits the sum
of squares, which balances the rest. Costs are training FLOPs of one token: matmul weights and causal attention of every
layer, the output projection on the last stage. The embedding lookup has no FLOPs, as in `ModelSpec`.
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
    """Return layers of each stage, at least one each, that minimize the cost of the most expensive stage.

    Exact, by dynamic programming over (layer, stage): first the least maximum, then the least sum of squares under it.
    Ties prefer fewer layers in the earlier stages, which hold the most activations.

    Args:
        costs: Cost of every layer, first layer first; whole numbers, so that the result does not depend on rounding.
        stages: Number of stages.
        first: Cost added to the first stage, for modules before the layers.
        last: Cost added to the last stage, for modules after the layers.

    Raises:
        NotDivisible: HP203 for more stages than layers.
    """
    count = len(costs)
    _check_stage_count(stages, count)
    prefix = [0, *accumulate(costs)]

    def cost(start: int, stop: int, stage: int) -> int:
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return prefix[stop] - prefix[start] + extra

    def ends(start: int, stage: int) -> range:
        """Return the possible ends of a stage that begins at `start`, with a layer for every later stage."""
        later_stages = stages - 1 - stage
        return (
            range(count, count + 1)
            if later_stages == 0
            else range(start + 1, count - later_stages + 1)
        )

    @cache
    def largest(start: int, stage: int) -> int:
        """Return the least cost of the most expensive stage from this one on."""
        if stage == stages:
            return 0
        stops = ends(start, stage)
        return min(max(cost(start, s, stage), largest(s, stage + 1)) for s in stops)

    limit = largest(0, 0)

    @cache
    def squares(start: int, stage: int) -> tuple[float, int]:
        """Return the least sum of squares from this stage on, no stage above the limit, and the end of this stage."""
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


def _check_stage_count(stages: int, layers: int) -> None:
    """Raise NotDivisible (HP203) for more stages than layers."""
    if not 1 <= stages <= layers:
        raise NotDivisible(
            "a pipeline has more stages than the model has layers",
            got=f"{stages} stages, {layers} layers",
            allowed=f"1 to {layers} stages",
            changes={"parallel.pp": layers, "parallel.virtual_stages": 1},
        )


@lru_cache(maxsize=256)
def stage_layers(model: ModelSpec, strategy: Strategy, seq_len: int) -> tuple[int, ...]:
    """Return decoder layers of each (virtual) stage: those of the strategy, else split by cost.

    Args:
        model: The model.
        strategy: Stages, and `stage_layers` if explicit.
        seq_len: Tokens per sequence, for the cost of attention.

    Raises:
        NotDivisible: HP203 for more stages than layers, or explicit numbers that do not add up to the layers.
    """
    if strategy.stage_layers:
        check_stage_layers(strategy, model.num_layers)
        return strategy.stage_layers
    blocks = [model.block_of(layer) for layer in range(model.num_layers)]
    outside = [b for b in model.blocks if not b.layers]
    head = sum(6 * b.num_matmul_params for b in outside if b.name == "head")
    return cut_layers([_layer_flops(b, seq_len) for b in blocks], strategy.stages, last=head)


def check_stage_layers(strategy: Strategy, layers: int) -> None:
    """Raise an error if the explicit split does not match a model of `layers` layers.

    Raises:
        NotDivisible: HP203 with a split that matches.
    """
    stages, explicit = strategy.stages, strategy.stage_layers
    if explicit and (len(explicit) != stages or sum(explicit) != layers or min(explicit) < 1):
        near = cut_layers([1] * layers, stages) if stages <= layers else ()
        raise NotDivisible(
            "`stage_layers` must give every stage at least one layer and every layer one stage",
            where="parallel.stage_layers",
            got=f"{list(explicit)}: {len(explicit)} stages, {sum(explicit)} layers",
            allowed=f"{stages} numbers that add up to {layers}",
            changes={"parallel.stage_layers": near} if near else None,
        )


def _layer_flops(block: Block, seq_len: int) -> int:
    """Return training FLOPs of one token in a layer."""
    attention = block.attention
    scores = attention.forward_flops_per_token(seq_len, causal=True) if attention else 0.0
    return 6 * block.num_matmul_params + round(3 * scores)


def rank_model(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> ModelSpec:
    """Return the part of a model on a pipeline rank, as a model.

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
            plain_layers = tuple(i for i in block.layers if i in layers)
            blocks += [replace(block, layers=plain_layers)] if plain_layers else []
        elif block.name == "embedding":
            blocks += [block] if first else []
        elif last:
            blocks.append(block if first else _untied(block, model))
    tied = model.tied_embeddings and first and last
    return replace(model, blocks=tuple(blocks), tied_embeddings=tied)


def recomputed_layers(
    model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int
) -> frozenset[int]:
    """Return decoder layers of a pipeline rank that backward recomputes; arguments as of `rank_model`."""
    if strategy.pp == 1:
        return strategy.recomputed([range(model.num_layers)])
    return strategy.recomputed(_stages(model, strategy, seq_len, pp_rank))


def split_recomputed(
    blocks: Iterable[Block], recomputed: frozenset[int]
) -> Iterator[tuple[Block, bool]]:
    """Yield every block, and whether backward recomputes it; a block with layers of both kinds is split in two."""
    for block in blocks:
        redone_layers = tuple(i for i in block.layers if i in recomputed)
        plain_layers = tuple(i for i in block.layers if i not in recomputed)
        if redone_layers:
            yield replace(block, layers=redone_layers), True
        if plain_layers or not block.layers:
            yield replace(block, layers=plain_layers), False


def _stages(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> list[range]:
    """Return layers of each stage of a pipeline rank."""
    per_stage = stage_layers(model, strategy, seq_len)
    ends = [sum(per_stage[:s]) for s in range(len(per_stage) + 1)]
    return [range(ends[s], ends[s + 1]) for s in strategy.stages_of(pp_rank)]


def _untied(block: Block, model: ModelSpec) -> Block:
    """Return a head separate from the embedding: it owns a shared weight, by the name of its first owner."""
    params = {p.name: p for b in model.blocks for p in b.params}
    return replace(
        block,
        params=tuple(
            replace(params[p.tied_to], dims=p.dims) if p.tied_to else p for p in block.params
        ),
    )
