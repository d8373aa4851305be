"""Communication of experts by formula: token dispatch, and FSDP of expert parameters over `edp`.

Per layer of experts and microbatch, with ep ranks, E experts, D hidden size, c bytes of the compute format, and s rows
sent to and r rows received from other ranks:

    counts       8 E (ep-1)/ep      one all-to-all of one number per expert, forward
    dispatch     s D c              forward; r D c of gradients backward
    combine      r D c              forward; s D c of gradients backward

A row is a token on its way to one expert, so s = T k (1 - 1/ep) when T tokens choose k experts evenly. What is routed
is known only while training: `Rows` takes the numbers that really occurred, and without them s = r = the even share,
rounded down. Recompute makes counts, dispatch and combine again in backward.

Source: Lepikhin et al. 2020, GShard, section 2.2 (dispatch and combine as all-to-all); Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.cost._pipeline_bytes import in_halves
from hyper_parallel.cost._ring import ring_bytes
from hyper_parallel.ir import Collective, Layout, Strategy, Workload
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.units import DTYPE_BYTES

COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows one rank exchanged with other ranks in one layer and step, over all microbatches, forward only.

    Attributes:
        sent: Rows to experts on other ranks.
        received: Rows for experts of this rank.
    """

    sent: int
    received: int


def on_expert_mesh(layout: Layout) -> bool:
    """Whether expert parallelism cuts a parameter."""
    return "ep" in layout.sharding_axes


def expert_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    rows: Mapping[int, Rows] | None,
    recomputed: frozenset[int],
) -> Iterator[Collective]:
    """Collectives of one optimizer step that expert parallelism adds.

    Args:
        model: The model.
        layouts: Layout of every parameter.
        strategy: Degrees of the axes.
        workload: Batch numbers resolved, and number formats.
        rows: What was routed, by layer; None: every expert gets the same number of tokens.
        recomputed: Layers that backward makes again.
    """
    if strategy.ep == 1:
        return
    for block in model.blocks:
        params = [p for p in block.params if p.name in layouts and on_expert_mesh(layouts[p.name])]
        if params:
            yield from _sharded(block, params, layouts, strategy, workload)
    for block, again in in_halves(model.blocks, recomputed):
        if block.mlp and block.mlp.num_experts:
            yield from _dispatch(model, block, strategy, workload, rows, 2 if again else 1)


def _dispatch(
    model: ModelSpec,
    block: Block,
    strategy: Strategy,
    workload: Workload,
    rows: Mapping[int, Rows] | None,
    made: int,
) -> Iterator[Collective]:
    assert block.mlp is not None
    times = workload.accumulation_steps or 1
    calls = block.count * times
    if rows is None:
        tokens = -(-(workload.microbatch or 1) * workload.seq_len // (strategy.cp * strategy.tp))
        routed = block.count * tokens * block.mlp.experts_per_token
        moved = 2 * times * (routed * (strategy.ep - 1) // strategy.ep)
    else:
        moved = sum(rows[i].sent + rows[i].received for i in block.layers)
    row_bytes = model.hidden_size * DTYPE_BYTES[workload.compute_dtype]
    axes = strategy.spanning_axes(("ep",))
    counts = ring_bytes("all_to_all", COUNT_BYTES * block.mlp.num_experts, strategy.ep)
    yield Collective("all_to_all", axes, "expert row counts", calls * made, calls * counts * made)
    yield Collective(
        "all_to_all", axes, "expert dispatch and combine", 2 * (made + 1) * calls,
        (made + 1) * moved * row_bytes,
    )  # fmt: skip


def _sharded(
    block: Block,
    params: list[ParamSpec],
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
) -> Iterator[Collective]:
    """FSDP over edp, a group of its own for every layer."""
    mesh = strategy.expert_mesh()
    edp = mesh.degree("edp")
    elements = edp * sum(math.prod(layouts[p.name].max_local_shape(p.shape, mesh)) for p in params)
    times = 1 if strategy.reduces_once else workload.accumulation_steps or 1
    gathers = times
    if strategy.frees_gathered:
        gathers = 2 * (workload.accumulation_steps or 1)
    axes = strategy.spanning_axes(("edp",))
    sizes = {
        "all_gather": elements * DTYPE_BYTES[workload.compute_dtype],
        "reduce_scatter": elements * DTYPE_BYTES[workload.reduce_dtype],
    }
    calls = {"all_gather": block.count * gathers, "reduce_scatter": block.count * times}
    purposes = {"all_gather": "expert parameters", "reduce_scatter": "expert gradients"}
    if edp > 1:
        for kind, size in sizes.items():
            sent = calls[kind] * ring_bytes(kind, size, edp)
            yield Collective(kind, axes, purposes[kind], calls[kind], sent)
    if strategy.dp_replicate > 1:
        size = elements // edp * DTYPE_BYTES[workload.reduce_dtype]
        sent = block.count * ring_bytes("all_reduce", size, strategy.dp_replicate)
        yield Collective("all_reduce", ("dp_replicate",), "replica gradients", block.count, sent)
