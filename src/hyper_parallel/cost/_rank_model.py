"""What one pipeline rank holds of a model, and which of its layers backward recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hyper_parallel.cost._stages import stage_layers
from hyper_parallel.ir import Strategy
from hyper_parallel.model import Block, ModelSpec


def rank_model(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> ModelSpec:
    """The part of a model that a pipeline rank holds, as a model.

    Blocks keep the layers of the rank's stages. The embedding is on the first stage, final norm and head on the last;
    there a head that shares the embedding's weight holds it under the embedding's name.

    Args:
        model: The whole model.
        strategy: Stages and where they lie.
        seq_len: Tokens per sequence, for a cut by cost.
        pp_rank: The pipeline rank.
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
