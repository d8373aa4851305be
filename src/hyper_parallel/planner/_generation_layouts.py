"""Layouts that generation runs in: all of some devices, their weights and cache by stage, and what a pass holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates, Setting
from hyper_parallel.cost.generation_passes import LayerKind, cache_bytes, pass_bytes
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner.pricing import partition
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.strategy_space import divisors
from hyper_parallel.units import DTYPE_BYTES

LAID_OUT: Final = ("pp", "dp_replicate", "dp_shard", "tp_x", "ep")
"""Axes of such a layout."""


@dataclass(frozen=True, slots=True)
class GenerationCut:
    """A layout with its stages."""

    strategy: Strategy
    needed: int  # slots that all prompts need at once
    weights: NDArray[np.int64]  # [pp] bytes of a rank
    cache: NDArray[np.int64]  # [pp] bytes of a sequence on a rank


def strategies_of(r: PlanRequest) -> Iterator[Strategy]:
    """Every choice of degrees."""
    devices, experts = r.num_devices, r.experts or 1
    for pp in (d for d in divisors(devices) if d <= r.model.num_layers):
        for tp in divisors(devices // pp):
            for shard in divisors(devices // pp // tp):
                for ep in (e for e in divisors(shard * tp) if experts % e == 0):
                    replicas = devices // pp // tp // shard
                    yield Strategy(pp=pp, tp_x=tp, dp_shard=shard, dp_replicate=replicas, ep=ep)


def local_bytes(r: PlanRequest, s: Strategy) -> dict[str, int] | str:
    """Bytes of every parameter on a rank by name, or why it is not priced; stages and replicas do not matter."""
    try:
        shards = r.shard(s)
    except HyperParallelError as error:
        return error.what
    if shards.whole_stream:
        return "tensor parallelism leaves its attention whole"
    sizes, width = {}, DTYPE_BYTES[r.workload.param_dtype]
    for p in (p for b in r.model.blocks for p in b.params):
        layout = shards.layouts[p.name]
        sizes[p.name] = width * int(np.prod(layout.max_local_shape(p.shape, s.mesh_of(layout))))
    return sizes


def laid_out(
    r: PlanRequest, work: GenerateWorkload, s: Strategy, sizes: dict[str, int]
) -> GenerationCut:
    """A layout with its stages cut so that the fullest rank holds as little as it can."""
    needed, dtype = -(-work.prompts // s.dp), r.workload.compute_dtype
    weights, cache = np.zeros((2, r.model.num_layers), dtype=np.int64)
    for block in r.model.blocks:
        # A head that shares the embedding's weight has its own on another stage.
        own = sum(sizes[p.name] for p in block.params if s.pp > 1 or not p.tied_to)
        place = [*block.layers] or [0 if block.name == "embedding" else -1]
        weights[place] += own
        if block.attention is not None:
            cache[place] = cache_bytes(block.attention, s.tp, work, dtype)
    cut = s.stage_layers or partition((weights + needed * cache).tolist(), s.pp)
    starts = [0, *accumulate(cut)][:-1]
    held = (np.add.reduceat(weights, starts), np.add.reduceat(cache, starts))
    return GenerationCut(replace(s, stage_layers=cut if s.pp > 1 else ()), needed, *held)


def setting_of(r: PlanRequest, layouts: Sequence[GenerationCut], slots: Any = 1) -> Setting:
    """Layouts as columns, with so many sequences of a data share at a time."""
    columns = {name: [getattr(x.strategy, name) for x in layouts] for name in LAID_OUT}
    return Setting(
        r.numbers, r.machine, r.workload, Candidates.of_columns(**columns, microbatch=slots)
    )


def kinds_of(r: PlanRequest) -> Iterator[LayerKind]:
    """The layers of the model, by kind."""
    for layers, numbers in r.layer_kinds:
        params = r.model.block_of(layers[0]).params
        latent = (p.shape for p in params if p.name.endswith("kv_b_proj.weight"))
        yield len(layers), numbers, next(latent, None)


def held_bytes(
    r: PlanRequest, work: GenerateWorkload, layouts: Sequence[GenerationCut]
) -> tuple[NDArray[np.float64], ...]:
    """Bytes beside weights and cache, in all and for each sequence, and the most sequences of a data share that fit."""
    both = pass_bytes(setting_of(r, layouts), work)
    fixed, each = (np.broadcast_to(b, len(layouts)) for b in both)
    rows, capacity = zip(layouts, fixed, each, strict=True), r.machine.memory_bytes
    most = [np.min((capacity - x.weights - f) // (x.cache + e)) for x, f, e in rows]
    return fixed, each, np.array(most)
