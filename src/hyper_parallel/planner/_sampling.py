"""Seconds and bytes of sampling the completions of a step, in one layout.

The passes are those that `plan_generation` prices. Two things differ: a rank takes its completions in turns, as many at
a time as it has slots, and weights are kept in the format of the parameters, so that a pass casts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.cost._passes import pass_seconds
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner._generation import (
    held_bytes,
    kinds_of,
    laid_out,
    local_bytes,
    setting_of,
)
from hyper_parallel.planner._request import PlanRequest
from hyper_parallel.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Sampling:
    """What sampling a step takes on a rank."""

    seconds: float
    weight_bytes: int
    beside_bytes: int  # keys and values in the slots, and what a pass needs

    @property
    def memory_bytes(self) -> int:
        """Peak of a rank that holds nothing else."""
        return self.weight_bytes + self.beside_bytes


def sampling_of(
    r: PlanRequest, strategy: Strategy, work: GenerateWorkload, slots: int
) -> Sampling | str:
    """What a layout takes to sample, or why it is not priced.

    Args:
        r: Model, machine and formats.
        strategy: Degrees of dp_replicate, dp_shard, tp_x and ep.
        work: Completions of the step over all ranks, and their lengths.
        slots: Completions that a data share samples at a time.
    """
    sizes = local_bytes(r, replace(strategy, dp_replicate=1))
    if isinstance(sizes, str):
        return sizes
    layout = laid_out(r, work, strategy, sizes)
    turns = -(-layout.needed // slots)
    prefill, decode = (
        sum(float(np.ravel(seconds)[0]) for seconds in terms.values())
        for terms in pass_seconds(setting_of(r, [layout], float(slots)), [*kinds_of(r)], work)
    )
    fixed, each, _ = held_bytes(r, work, [layout])
    weights = int(np.max(layout.weights))
    w, cast_s, cast_bytes = r.workload, 0.0, 0.0
    if w.compute_dtype != w.param_dtype:
        kept, made = DTYPE_BYTES[w.param_dtype], DTYPE_BYTES[w.compute_dtype]
        cast_s = weights / kept * (kept + made) / r.machine.passing_bytes_s
        if strategy.dp_shard == 1:  # else these are the gathered ones
            # The layer that works, the next one, and what is outside of the layers.
            s = setting_of(r, [layout])
            inside = 2.0 * (s.dense() + s.experts()) + s.outside / s.c.tp
            cast_bytes = float(np.ravel(inside)[0]) * made
    passes = work.prompt_passes + work.new_tokens - 1
    seconds = turns * (prefill + (work.new_tokens - 1) * decode + passes * cast_s)
    beside = slots * int(np.max(layout.cache)) + fixed[0] + slots * each[0] + cast_bytes
    return Sampling(seconds, weights, int(beside))
