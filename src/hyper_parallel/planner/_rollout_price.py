"""Seconds and bytes of sampling the completions of a step, in one layout.

The passes are those of `plan_generation`, with two differences. A rank samples its completions in rounds of one per
slot. Weights are stored in the parameter format, so every pass casts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.cost.generation_passes import pass_seconds
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner._generation_layouts import (
    StagedLayout,
    cut_into_stages,
    layer_kinds_of,
    local_bytes,
    pass_memory,
    pricing_case,
)
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class RolloutPrice:
    """Seconds and bytes of sampling on a rank."""

    seconds: float
    weight_bytes: int
    working_bytes: int  # keys and values in the slots, and memory of a pass

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of a rank that only samples."""
        return self.weight_bytes + self.working_bytes


def rollout_prices(
    r: PlanRequest,
    strategies: Sequence[Strategy],
    work: GenerateWorkload,
    slots: int,
    cache: dict[Strategy, dict[str, int] | str],
) -> list[RolloutPrice | str]:
    """Return the prices of sampling in some layouts, or the reasons why they have none.

    Args:
        r: Model, machine and formats.
        strategies: Degrees of dp_replicate, dp_shard, tp_x and ep.
        work: Completions of the step over all ranks, and their lengths.
        slots: Completions that a data share samples at a time.
        cache: Bytes of parameters by layout of one replica; new layouts are added.
    """
    prices: dict[Strategy, RolloutPrice | str] = {}
    layouts = []
    for s in strategies:
        single_replica = replace(s, dp_replicate=1)
        if single_replica not in cache:
            cache[single_replica] = local_bytes(r, single_replica)
        sizes = cache[single_replica]
        if isinstance(sizes, str):
            prices[s] = sizes
        else:
            layouts.append(cut_into_stages(r, work, s, sizes))
    if layouts:
        priced = zip(layouts, _priced(r, layouts, work, slots), strict=True)
        prices |= {x.strategy: sampling for x, sampling in priced}
    return [prices[s] for s in strategies]


def _priced(
    r: PlanRequest, layouts: Sequence[StagedLayout], work: GenerateWorkload, slots: int
) -> Iterator[RolloutPrice]:
    """Yield the price of every layout."""
    case, w, num_layouts = pricing_case(r, layouts, float(slots)), r.workload, len(layouts)
    prefill, decode = (
        sum((np.broadcast_to(v, num_layouts) for v in terms.values()), np.zeros(num_layouts))
        for terms in pass_seconds(case, [*layer_kinds_of(r)], work)
    )
    fixed, per_sequence, _ = pass_memory(r, work, layouts)
    passes = work.prompt_passes + work.new_tokens - 1
    stored_width, compute_width = DTYPE_BYTES[w.param_dtype], DTYPE_BYTES[w.compute_dtype]
    # Cast weights of the current and the next layer, embedding and head; gathered weights are in `fixed`.
    inside = 2.0 * (case.dense() + case.experts()) + case.ends(case.outside)
    casts = float(stored_width != compute_width)
    cast = compute_width * np.where(case.c.dp_shard > 1, 0.0, inside) * casts
    cast = np.broadcast_to(cast, num_layouts)
    for i, x in enumerate(layouts):
        weights = int(np.max(x.weights))
        moved_bytes = weights / stored_width * (stored_width + compute_width)
        cast_s = moved_bytes / r.machine.passing_bytes_s * casts
        round_s = prefill[i] + (work.new_tokens - 1) * decode[i] + passes * cast_s
        working = slots * int(np.max(x.cache)) + fixed[i] + slots * per_sequence[i] + cast[i]
        yield RolloutPrice(float(-(-x.needed // slots) * round_s), weights, int(working))
