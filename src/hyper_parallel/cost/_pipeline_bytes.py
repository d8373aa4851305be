"""What one pipeline rank holds of a model, and what it sends to the ranks of other stages, by formula.

With T tokens of a microbatch on a data- and context-parallel rank, D hidden size, t = tp, m microbatches, c bytes of
the compute format, a rank sends for each of its stages, where the neighbouring stage lies on another rank:

    to the next stage       m * ceil(T / t) * D * c     activations
    to the stage before     m * ceil(T / t) * D * c     their gradients

A weight that embedding and head share, on two ranks, is exchanged once per step: its local gradient.
Source: Narayanan et al. 2021, section 4.1 (scatter/gather: every tensor-parallel rank sends its part only).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hyper_parallel.cost._stages import stage_layers
from hyper_parallel.ir import Layout, SequenceCut, Strategy, Workload
from hyper_parallel.model import Block, ModelSpec
from hyper_parallel.units import DTYPE_BYTES

PP = "pp"


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
    per_stage = stage_layers(model, strategy, seq_len)
    own = strategy.stages_of(pp_rank)
    layers = {layer for s in own for layer in range(sum(per_stage[:s]), sum(per_stage[: s + 1]))}
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
    return replace(
        model, blocks=tuple(blocks), tied_embeddings=model.tied_embeddings and first and last
    )


def recomputed_layers(
    model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int
) -> frozenset[int]:
    """Decoder layers of a pipeline rank that are made again in backward; arguments as of `rank_model`."""
    whole = (model.num_layers,)
    per_stage = stage_layers(model, strategy, seq_len) if strategy.pp > 1 else whole
    first = [sum(per_stage[:s]) for s in range(len(per_stage))]
    own = strategy.stages_of(pp_rank) if strategy.pp > 1 else (0,)
    return strategy.recomputed([range(first[s], first[s] + per_stage[s]) for s in own])


def in_halves(blocks: Iterable[Block], recomputed: frozenset[int]) -> Iterator[tuple[Block, bool]]:
    """Every block, and whether backward makes it again; a block of which it makes some layers again comes twice."""
    for block in blocks:
        again = tuple(i for i in block.layers if i in recomputed)
        once = tuple(i for i in block.layers if i not in recomputed)
        if again:
            yield replace(block, layers=again), True
        if once or not block.layers:
            yield replace(block, layers=once), False


def _untied(block: Block, model: ModelSpec) -> Block:
    """A head apart from the embedding: a shared weight is its own, by the name of the first holder."""
    params = {p.name: p for b in model.blocks for p in b.params}
    return replace(
        block,
        params=tuple(
            replace(params[p.tied_to], dims=p.dims) if p.tied_to else p for p in block.params
        ),
    )


def pipeline_sends(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    pp_rank: int,
) -> Iterator[tuple[str, int, int]]:
    """What a rank sends to other pipeline ranks in a step: purpose, number of messages, bytes of each.

    Args:
        model: The whole model.
        layouts: Layout of every parameter.
        strategy: Degrees of the axes.
        workload: Batch numbers resolved, and number formats.
        pp_rank: The pipeline rank.
    """
    if strategy.pp == 1:
        return
    rank_of = {s: r for r in range(strategy.pp) for s in strategy.stages_of(r)}
    times = workload.accumulation_steps or 1
    cut = SequenceCut.of(workload.seq_len, strategy.cp, strategy.cp_kind, strategy.cp_ulysses)
    tokens = (workload.microbatch or 1) * cut.local
    rows = -(-tokens // strategy.tp)
    if strategy.tp_y > 1 and strategy.attention_shape == "weight":  # sequences are cut over y first
        span = -(-cut.local // strategy.tp_y)
        rows = -(-(workload.microbatch or 1) * span // strategy.tp_x)
    piece = rows * model.hidden_size * DTYPE_BYTES[workload.compute_dtype]
    own = strategy.stages_of(pp_rank)
    onward = sum(rank_of.get(s + 1, pp_rank) != pp_rank for s in own)
    back = sum(rank_of.get(s - 1, pp_rank) != pp_rank for s in own)
    yield "pipeline activations", onward * times, piece
    yield "pipeline gradients", back * times, piece
    ends = {rank_of[0], rank_of[strategy.stages - 1]}
    if len(ends) == 2 and pp_rank in ends:
        mesh, shared = strategy.mesh(), 0
        for block in model.blocks:
            for param in block.params:
                if param.tied_to and not block.layers:
                    rows = 1
                    for size in layouts[param.tied_to].max_local_shape(param.shape, mesh):
                        rows *= size
                    shared += rows
        yield "shared weight", 1, shared * DTYPE_BYTES[workload.param_dtype]
