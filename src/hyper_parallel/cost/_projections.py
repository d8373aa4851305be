"""Communication inside the regions of tensor parallelism: packed projections, and norms over all heads.

T tokens of one microbatch on one context-parallel rank, c bytes of the compute format, w = max(c, 4); per layer,
forward, backward and recompute:

    packed columns      T c times the rows that this rank computes and others work on; backward the other way round
    norms over heads    all-reduce of T w for query and for key
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hyper_parallel.cost._pipeline_bytes import in_halves
from hyper_parallel.cost._ring import ring_bytes
from hyper_parallel.cost._tensor2d_bytes import piece_tokens
from hyper_parallel.ir import (
    Collective,
    Layout,
    Part,
    SequenceCut,
    Strategy,
    Workload,
    exchanged_rows,
    gate_up_parts,
    qkv_parts,
)
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.units import DTYPE_BYTES

TP = "tp_x"


def projection_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    recomputed: frozenset[int],
) -> Iterator[Collective]:
    """Collectives of one step on the rank at coordinate 0; arguments as of `step_collectives`, and what is redone."""
    degree = strategy.tp
    if degree == 1:
        return
    axes = tuple(axis for axis in (TP, "tp_y") if strategy.degrees()[axis] > 1)
    cut = SequenceCut.of(workload.seq_len, strategy.cp, strategy.cp_kind, strategy.cp_ulysses)
    tokens = (workload.microbatch or 1) * cut.local
    # Between blocks of two axes tokens are a padded list, which an MLP of all ranks works on as it is.
    listed = degree * piece_tokens(strategy, workload.microbatch or 1, cut.local)
    width = DTYPE_BYTES[workload.compute_dtype]
    for block, again in in_halves(model.decoder_blocks, recomputed):
        forwards = 2 if again else 1
        times = block.count * (workload.accumulation_steps or 1)
        for param in block.params:
            layout = layouts[param.name]
            parts = _stacked(param, block)
            if parts and TP in layout.axes[0] and layout.parts_of(0) == 1:
                others = range(1, degree)
                sent = sum(exchanged_rows(parts, degree, 0, t) for t in others)
                back = sum(exchanged_rows(parts, degree, s, 0) for s in others)
                rows = listed if strategy.tp_y > 1 and param.dims[0] == "gate_up" else tokens
                bytes_ = times * (forwards * sent + back) * rows * width
                yield Collective(
                    "all_to_all", axes, "packed columns", times * (forwards + 1), bytes_
                )
            elif param.name.endswith("_norm.weight") and param.dims[0] in ("heads", "kv_heads"):
                count = times * (forwards + 1)
                bytes_ = count * ring_bytes("all_reduce", tokens * max(4, width), degree)
                yield Collective("all_reduce", axes, "norms over heads", count, bytes_)


def _stacked(param: ParamSpec, block: Block) -> tuple[Part, ...]:
    """The projections that a matrix stacks; () for one projection, and for experts."""
    if len(param.shape) != 2:
        return ()
    if param.dims[0] == "gate_up":
        return gate_up_parts(param.shape[0])
    if param.dims[0] == "qkv" and block.attention is not None:
        attention = block.attention
        return qkv_parts(attention.num_heads, attention.num_kv_heads, attention.qk_head_dim)
    return ()
