"""Layouts for generation: degrees over all devices, bytes of weights and cache by stage, and memory of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates, PricingCase
from hyper_parallel.cost.generation_passes import LayerKind, cache_bytes, pass_bytes
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner.pricing import partition
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.units import DTYPE_BYTES, divisors

LAYOUT_AXES: Final = ("pp", "dp_replicate", "dp_shard", "tp_x", "ep")
"""Mesh axes that a generation layout may use."""


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """Generation layout split into pipeline stages, with the weight and cache bytes of each stage."""

    strategy: Strategy
    needed: int  # prompts of one data-parallel rank; with at least as many slots, no prompt waits
    weights: NDArray[np.int64]  # [pp] bytes of the weights on a rank
    cache: NDArray[np.int64]  # [pp] bytes of the keys and values of one sequence on a rank


def layout_candidates(r: PlanRequest) -> Iterator[Strategy]:
    """Yield every strategy whose degrees of `LAYOUT_AXES` multiply to the number of devices."""
    devices, experts = r.num_devices, r.experts or 1
    for pp in (d for d in divisors(devices) if d <= r.model.num_layers):
        for tp in divisors(devices // pp):
            for shard in divisors(devices // pp // tp):
                for ep in (e for e in divisors(shard * tp) if experts % e == 0):
                    replicas = devices // pp // tp // shard
                    yield Strategy(pp=pp, tp_x=tp, dp_shard=shard, dp_replicate=replicas, ep=ep)


def local_bytes(r: PlanRequest, s: Strategy) -> dict[str, int] | str:
    """Return a dict from parameter name to its bytes on a rank, or the reason why generation cannot be priced.

    The degrees `pp` and `dp_replicate` do not change the result.
    """
    try:
        shards = r.shard(s)
    except HyperParallelError as error:
        return error.what
    if shards.whole_stream:
        return "tensor parallelism cannot shard its attention"
    sizes, width = {}, DTYPE_BYTES[r.workload.param_dtype]
    for p in (p for b in r.model.blocks for p in b.params):
        layout = shards.layouts[p.name]
        sizes[p.name] = width * int(np.prod(layout.max_local_shape(p.shape, s.mesh_of(layout))))
    return sizes


def cut_into_stages(
    r: PlanRequest, work: GenerateWorkload, s: Strategy, sizes: dict[str, int]
) -> StagedLayout:
    """Return the layout with pipeline stages that minimize the bytes of the fullest rank.

    `sizes` is the result of `local_bytes`. An explicit split in `s.stage_layers` is kept.
    """
    needed, dtype = -(-work.prompts // s.dp), r.workload.compute_dtype
    weights, cache = np.zeros((2, r.model.num_layers), dtype=np.int64)
    for block in r.model.blocks:
        # A tied head has its own copy of the weight if it is on another stage.
        own = sum(sizes[p.name] for p in block.params if s.pp > 1 or not p.tied_to)
        place = [*block.layers] or [0 if block.name == "embedding" else -1]
        weights[place] += own
        if block.attention is not None:
            cache[place] = cache_bytes(block.attention, s.tp, work, dtype)
    cut = s.stage_layers or partition((weights + needed * cache).tolist(), s.pp)
    starts = [0, *accumulate(cut)][:-1]
    stage_bytes = (np.add.reduceat(weights, starts), np.add.reduceat(cache, starts))
    return StagedLayout(replace(s, stage_layers=cut if s.pp > 1 else ()), needed, *stage_bytes)


def pricing_case(r: PlanRequest, layouts: Sequence[StagedLayout], slots: Any = 1) -> PricingCase:
    """Return the pricing case of the layouts, with `slots` sequences at a time per data-parallel rank."""
    columns = {name: [getattr(x.strategy, name) for x in layouts] for name in LAYOUT_AXES}
    return PricingCase(
        r.numbers, r.machine, r.workload, Candidates.of_columns(**columns, microbatch=slots)
    )


def layer_kinds_of(r: PlanRequest) -> Iterator[LayerKind]:
    """Yield one `LayerKind` per group of equal layers of the model."""
    for layers, numbers in r.layer_kinds:
        params = r.model.block_of(layers[0]).params
        latent = (p.shape for p in params if p.name.endswith("kv_b_proj.weight"))
        yield len(layers), numbers, next(latent, None)


def pass_memory(
    r: PlanRequest, work: GenerateWorkload, layouts: Sequence[StagedLayout]
) -> tuple[NDArray[np.float64], ...]:
    """Return the memory of a forward pass and the batch that fits, as three arrays with one entry per layout.

    Returns:
        Bytes other than weights and cache that do not depend on the batch, such bytes per sequence, and the number of
        sequences that fit on a data-parallel rank.
    """
    terms = pass_bytes(pricing_case(r, layouts), work)
    fixed, per_sequence = (np.broadcast_to(b, len(layouts)) for b in terms)
    rows, capacity = zip(layouts, fixed, per_sequence, strict=True), r.machine.memory_bytes
    max_sequences = [np.min((capacity - x.weights - f) // (x.cache + e)) for x, f, e in rows]
    return fixed, per_sequence, np.array(max_sequences)
