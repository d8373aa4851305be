"""Seconds and bytes of sampling the completions of a step, in one layout.

The passes are those that `plan_generation` prices. Two things differ: a rank takes its completions in turns, as many at
a time as it has slots, and weights are kept in the format of the parameters, so that a pass casts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.cost.generation_passes import pass_seconds
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner._generation_layouts import (
    GenerationCut,
    held_bytes,
    kinds_of,
    laid_out,
    local_bytes,
    setting_of,
)
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class RolloutPrice:
    """What sampling a step takes on a rank."""

    seconds: float
    weight_bytes: int
    beside_bytes: int  # keys and values in the slots, and what a pass needs

    @property
    def memory_bytes(self) -> int:
        """Peak of a rank that holds nothing else."""
        return self.weight_bytes + self.beside_bytes


def rollout_prices(
    r: PlanRequest,
    strategies: Sequence[Strategy],
    work: GenerateWorkload,
    slots: int,
    known: dict[Strategy, dict[str, int] | str],
) -> list[RolloutPrice | str]:
    """What layouts take to sample, or why they are not priced.

    Args:
        r: Model, machine and formats.
        strategies: Degrees of dp_replicate, dp_shard, tp_x and ep.
        work: Completions of the step over all ranks, and their lengths.
        slots: Completions that a data share samples at a time.
        known: Bytes of parameters by layout of one replica, which are kept here.
    """
    found: dict[Strategy, RolloutPrice | str] = {}
    layouts = []
    for s in strategies:
        one = replace(s, dp_replicate=1)
        if one not in known:
            known[one] = local_bytes(r, one)
        sizes = known[one]
        if isinstance(sizes, str):
            found[s] = sizes
        else:
            layouts.append(laid_out(r, work, s, sizes))
    if layouts:
        priced = zip(layouts, _priced(r, layouts, work, slots), strict=True)
        found |= {x.strategy: sampling for x, sampling in priced}
    return [found[s] for s in strategies]


def _priced(
    r: PlanRequest, layouts: Sequence[GenerationCut], work: GenerateWorkload, slots: int
) -> Iterator[RolloutPrice]:
    setting, w, many = setting_of(r, layouts, float(slots)), r.workload, len(layouts)
    prefill, decode = (
        sum((np.broadcast_to(v, many) for v in terms.values()), np.zeros(many))
        for terms in pass_seconds(setting, [*kinds_of(r)], work)
    )
    fixed, each, _ = held_bytes(r, work, layouts)
    passes = work.prompt_passes + work.new_tokens - 1
    kept, made = DTYPE_BYTES[w.param_dtype], DTYPE_BYTES[w.compute_dtype]
    # Of cast weights the layer that works, the next one and what is outside; gathered ones are in `fixed`.
    inside = 2.0 * (setting.dense() + setting.experts()) + setting.ends(setting.outside)
    cast = made * np.where(setting.c.dp_shard > 1, 0.0, inside) * (kept != made)
    cast = np.broadcast_to(cast, many)
    for i, x in enumerate(layouts):
        weights = int(np.max(x.weights))
        cast_s = weights / kept * (kept + made) / r.machine.passing_bytes_s * (kept != made)
        one = prefill[i] + (work.new_tokens - 1) * decode[i] + passes * cast_s
        beside = slots * int(np.max(x.cache)) + fixed[i] + slots * each[i] + cast[i]
        yield RolloutPrice(float(-(-x.needed // slots) * one), weights, int(beside))
