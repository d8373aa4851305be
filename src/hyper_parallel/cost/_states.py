"""Parameters, gradients and optimizer states of a rank, as arrays over candidates.

ZeRO 2 and 3 as FSDP2 does it: parameters, gradients and optimizer states are shards in the parameter format. ZeRO 0
and 1 as Megatron does it: parameters in the compute format, float32 gradients, and a float32 copy and two moments in
the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.ir import Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameter elements on the fullest rank."""

    whole: Array  # after pp, tp and ep, before data sharding
    sharded: Array  # the share of one data-parallel rank under full sharding


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what lives through the whole step, and what the optimizer moves."""

    parameters: Array
    gradients: Array
    optimizer: Array
    optimizer_moved: Array


def outside_elements(numbers: ModelNumbers, c: Candidates) -> Array:
    """Elements of embedding and head in the stage that holds more of them, before tp and data sharding."""
    n = numbers
    largest = max(n.embedding_weights, n.head_weights)
    return np.where(c.pp > 1, largest, n.embedding_weights + n.head_params) * 1.0


def stage_elements(
    numbers: ModelNumbers, c: Candidates, layers: Array | None = None, outside: Array | None = None
) -> Elements:
    """Parameter elements of a rank.

    Args:
        numbers: The model.
        c: Candidates.
        layers: Layers of its stage; None: ceil(L / p).
        outside: Elements of embedding and head in its stage; None: the larger of them.
    """
    n, group = numbers, c.dp_shard * c.cp
    layers = np.ceil(n.layers / c.pp) if layers is None else layers
    outside = outside_elements(n, c) if outside is None else outside
    dense = layers * ((n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights)
    dense = dense + outside / c.tp
    experts = layers * n.expert_weights / (c.ep * c.etp)
    # The ranks that hold the same experts: what ep and the cut of an expert leave of dp_shard x cp x tp.
    share = np.maximum(1.0, group * c.tp / (c.ep * c.etp))
    return Elements(dense + experts, dense / group + experts / share)


def state_bytes(
    numbers: ModelNumbers, workload: Workload, c: Candidates, elements: Elements | None = None
) -> States:
    """Parameters, gradients and optimizer states of a rank, the fullest when its elements are not given.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.
    """
    param, compute = widths(workload)
    e = elements or stage_elements(numbers, c)
    master = param if param != compute else 0.0
    mine = np.where(c.zero > 0, e.sharded, e.whole)
    fully = c.zero > 1
    parameters = np.where(fully, e.sharded * param, e.whole * compute)
    gradients = np.where(fully, e.sharded, e.whole) * param
    states = mine * (2.0 * param + np.where(fully, 0.0, master))
    # AdamW reads gradient, parameter and two moments and writes three of them; a copy in the compute format is written.
    moved = mine * (7.0 * param + np.where(fully, 0.0, compute))
    return States(parameters, gradients, states, moved)


def widths(workload: Workload) -> tuple[float, float]:
    """Bytes of a parameter and of an activation."""
    return float(DTYPE_BYTES[workload.param_dtype]), float(DTYPE_BYTES[workload.compute_dtype])
