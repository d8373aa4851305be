"""One decoder layer and one microbatch on one rank: seconds of compute and of exposed communication, as arrays.

Letters: T tokens of the microbatch in a tensor-parallel group, P tensor-parallel ranks, d FSDP ranks
(dp_shard x cp), b bytes of the compute format; h, k, f, V as in `ModelNumbers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.ir import Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]

KERNELS_FORWARD = 30
KERNELS_BACKWARD = 55


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one layer and microbatch on one rank.

    Attributes:
        matmul: Projections, feed-forward part and experts, forward; backward is twice that.
        attention: Scores and their product with the values, forward; backward is 2.5 times that.
        elementwise: Writing what is kept for backward once.
        launch_forward: Launches that do not hide behind the forward.
        launch_backward: The same for the backward.
        saved_bytes: Bytes kept for backward.
    """

    matmul: Array
    attention: Array
    elementwise: Array
    launch_forward: Array
    launch_backward: Array
    saved_bytes: Array

    @property
    def forward(self) -> Array:
        """Work of the forward, launches apart."""
        return self.matmul + self.attention + 2.0 * self.elementwise

    @property
    def backward(self) -> Array:
        """Work of the backward, launches apart."""
        return 2.0 * self.matmul + 2.5 * self.attention + 3.0 * self.elementwise


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds of one layer and microbatch on one rank.

    Attributes:
        tp: All gathers and scatters of sequence parallelism; never hidden.
        tp_gather: One of them.
        cp: Key-value ring beyond the attention it hides behind.
        cp_ring: One round of it.
        ep: Dispatch and combine, forward and backward; never hidden.
        ep_exchange: One of them.
        fsdp: Parameter gathers and gradient scatters beyond the layer they hide behind.
        fsdp_gather: One gather of the layer's parameters.
        fsdp_scatter: One scatter of its gradients.
        outside: Embedding and head, gathered and scattered once; never hidden.
    """

    tp: Array
    tp_gather: Array
    cp: Array
    cp_ring: Array
    ep: Array
    ep_exchange: Array
    fsdp: Array
    fsdp_gather: Array
    fsdp_scatter: Array
    outside: Array


def tokens_of(workload: Workload, c: Candidates) -> Array:
    """T: tokens of one microbatch on the ranks of one tensor-parallel group."""
    return c.microbatch * workload.seq_len / c.cp


def matmul_seconds(machine: Machine, weights: float, rows: Array, columns: Array) -> Array:
    """Seconds of a matmul of `rows` tokens with `weights` elements whose narrow side has `columns`.

    The reached share of the peak is e0 * rows / (rows + r0) * columns / (columns + r0).
    """
    e = machine.efficiency
    share = e.matmul * rows / (rows + e.saturation) * columns / (columns + e.saturation)
    return 2.0 * rows * weights / (machine.peak_flops * share)


def layer_compute(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Compute:
    """Compute of one layer."""
    e, tokens = machine.efficiency, tokens_of(workload, c)
    matmul = (
        matmul_seconds(machine, n.attention_weights, tokens, n.q_width / c.tp)
        + matmul_seconds(machine, n.mlp_weights, tokens, max(n.mlp_width, 1.0) / c.tp)
    ) / c.tp
    if n.experts:
        # Tokens spread evenly; with ep an expert sees those of all ranks that share it, and is not cut by tp.
        rows = tokens * n.experts_per_token / n.experts * c.ep
        columns = n.expert_width / np.where(c.ep > 1, 1.0, c.tp)
        per_row = matmul_seconds(machine, 1.0, rows, columns) / rows
        matmul = matmul + tokens / c.tp * n.active_expert_weights * per_row
    flops = n.attention_flops(workload.seq_len)
    attention = tokens / c.tp * flops / machine.attention_flops
    saved = saved_elements(n) * DTYPE_BYTES[workload.compute_dtype] * tokens / c.tp
    elementwise = saved / (machine.memory_bytes_s * e.elementwise)
    work = Compute(matmul, attention, elementwise, 0.0 * tokens, 0.0 * tokens, saved)

    def waiting(seconds: Array, kernels: int) -> Array:
        launches = np.full_like(seconds, kernels * e.kernel_s)
        return np.maximum(0.0, launches - seconds) if e.launch_hidden else launches

    return Compute(
        matmul,
        attention,
        elementwise,
        waiting(work.forward, KERNELS_FORWARD),
        waiting(work.backward, KERNELS_BACKWARD),
        saved,
    )


def layer_communication(
    n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates, work: Compute
) -> Communication:
    """Communication of one layer, as far as it does not hide behind its compute.

    Tensor parallelism: 4 gathers or scatters of T h elements forward and 4 backward (gathered inputs are kept), half
    of that for layers whose experts are spread by ep instead. Source: Korthikanti et al. 2022, section 4.2.2.
    """
    e, tokens, one = machine.efficiency, tokens_of(workload, c), np.ones_like(c.tp)
    width = float(DTYPE_BYTES[workload.compute_dtype])
    reduce_width = float(DTYPE_BYTES[workload.reduce_dtype])
    again = c.recompute

    gather = machine.ring_seconds(tokens * n.hidden * width, c.tp, one)
    pairs = 2.0 - np.where(c.ep > 1, n.moe_share, 0.0)
    tp = (4.0 + 2.0 * again) * pairs * gather

    ring = machine.ring_seconds(2.0 * n.k_width / c.tp * tokens * c.cp * width, c.cp, c.tp)
    cp_forward = np.maximum(0.0, ring - e.overlap * work.attention)
    cp_backward = np.maximum(0.0, 2.0 * ring - e.overlap * 2.5 * work.attention)
    cp = (1.0 + again) * cp_forward + cp_backward

    routed = tokens / c.tp * n.experts_per_token * n.hidden * width
    exchange = np.where(c.ep > 1, machine.all_to_all_seconds(routed, c.ep, one), 0.0)

    group = c.dp_shard * c.cp
    split = np.where(c.ep > 1, c.ep, c.tp)
    experts = n.expert_weights / split

    def traffic(dense: Array, expert: Array | float, element_bytes: float) -> Array:
        of_experts = machine.ring_seconds(expert * element_bytes * one, group * c.tp / split, split)
        together = machine.ring_seconds(dense * element_bytes, group, c.tp)
        return together + (of_experts if n.experts else 0.0)

    dense = (n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights
    parameters, gradients = traffic(dense, experts, width), traffic(dense, experts, reduce_width)
    forward = np.maximum(0.0, parameters - e.overlap * work.forward)
    backward = np.maximum(0.0, c.reshard * parameters + gradients - e.overlap * work.backward)
    vocabulary = (n.embedding_weights + n.head_params) / c.tp
    outside = machine.ring_seconds(vocabulary * (width + reduce_width), group, c.tp)
    return Communication(
        tp=tp,
        tp_gather=gather,
        cp=cp,
        cp_ring=ring,
        ep=(4.0 + 2.0 * again) * exchange,
        ep_exchange=exchange,
        fsdp=forward + backward,
        fsdp_gather=parameters,
        fsdp_scatter=gradients,
        outside=outside,
    )


def saved_elements(numbers: ModelNumbers) -> float:
    """Elements per token that one layer keeps for backward without recomputation, without tensor parallelism.

    4h for the inputs of the two norms and of the two column matmuls, twice the query width for queries and attention
    output, keys and values, and the feed-forward part. With all query heads as wide as h it is 6h + 2k + 3f.

    Source: Korthikanti et al. 2022, section 4.1, with flash attention and a gated feed-forward part.
    """
    n = numbers
    return (
        4.0 * n.hidden
        + 2.0 * n.q_width
        + 2.0 * n.k_width
        + n.mlp_saved_width
        + n.expert_saved_width
    )


def saved_on_rank(numbers: ModelNumbers, c: Candidates) -> Array:
    """Elements per token that one layer keeps on a tensor-parallel rank: the share of a P-th, gathered inputs whole.

    The gathered inputs of the two column matmuls are kept, which saves two gathers in backward.
    """
    whole = saved_elements(numbers) / c.tp
    return whole + 2.0 * numbers.hidden * (1.0 - 1.0 / c.tp)


def stage_elements(numbers: ModelNumbers, c: Candidates) -> Array:
    """Parameter elements on the fullest device, after pp, tp, ep and FSDP over dp_shard x cp."""
    n = numbers
    group = c.dp_shard * c.cp
    dense = ((n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights) / group
    # Without ep the experts are cut by tp, with it by ep and the ranks that ep leaves: the same share.
    experts = n.expert_weights / (group * c.tp)
    return np.ceil(n.layers / c.pp) * (dense + experts) + outside_elements(n, c) / c.tp / group


def outside_elements(numbers: ModelNumbers, c: Candidates) -> Array:
    """Elements of embedding and head in the stage that holds more of them, before tp and FSDP."""
    n = numbers
    largest = max(n.embedding_weights, n.head_weights)
    return np.where(c.pp > 1, largest, n.embedding_weights + n.head_params) * 1.0
