"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. Letters: T tokens of one microbatch on a rank before tensor parallelism, P tensor-parallel
ranks, d FSDP ranks (dp_shard x cp), m microbatches, p stages, l layers of the fullest stage, b bytes of the compute
format; h, k, f, V as in `ModelNumbers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.ir import CostTerm, Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]

KERNELS_FORWARD = 30
KERNELS_BACKWARD = 55
"""Operators of one decoder layer of an unfused transformer; counted with a profiler on a Llama layer."""


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One cause of step time over all candidates."""

    name: str
    seconds: Array
    formula: str
    source: str
    inputs: dict[str, Array | float] = field(default_factory=dict)

    def at(self, index: int) -> CostTerm:
        """The term of one candidate."""
        shape = self.seconds.shape
        inputs = {k: float(np.broadcast_to(v, shape)[index]) for k, v in self.inputs.items()}
        return CostTerm(self.name, float(self.seconds[index]), self.formula, inputs, self.source)


def time_terms(
    numbers: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> tuple[TimeTerm, ...]:
    """All terms of the step time; their sum is the prediction.

    Args:
        numbers: The model.
        machine: The device and its links.
        workload: Sequence length and number formats; the batch numbers come from the candidates.
        c: Candidates.
    """
    e, n = machine.efficiency, numbers
    width = float(DTYPE_BYTES[workload.compute_dtype])
    reduce_width = float(DTYPE_BYTES[workload.reduce_dtype])
    param_width = float(DTYPE_BYTES[workload.param_dtype])
    tokens = c.microbatch * workload.seq_len / c.cp
    steps = c.accumulation
    layers = np.ceil(n.layers / c.pp)
    # The last stage holds the fewest layers but also the head: whichever is slower sets the pace.
    last_layers = np.maximum(n.layers - layers * (c.pp - 1), 0)
    peak = machine.peak_flops

    def matmul_seconds(weights: float, rows: Array, columns: Array) -> Array:
        half = e.saturation
        share = e.matmul * rows / (rows + half) * columns / (columns + half)
        return 2.0 * rows * weights / (peak * share)

    one = np.ones_like(c.tp)
    expert_rows = tokens * n.experts_per_token / max(1, n.experts) * np.maximum(c.ep, 1)
    expert_split = np.where(c.ep > 1, 1.0, c.tp)
    # Matmuls of one layer in forward, on one rank.
    dense = (
        matmul_seconds(n.attention_weights, tokens, n.q_width / c.tp)
        + matmul_seconds(n.mlp_weights, tokens, max(n.mlp_width, 1.0) / c.tp)
    ) / c.tp
    routed = np.zeros_like(tokens)
    if n.experts:
        per_expert = n.active_expert_weights / max(n.experts_per_token, 1e-9)
        share = expert_rows / np.maximum(tokens * n.experts_per_token, 1e-9)
        routed = (
            matmul_seconds(per_expert, expert_rows, n.expert_width / expert_split) / share / c.tp
        )
    matmul = dense + routed
    score_flops = n.attention_flops(workload.seq_len)
    attention = tokens / c.tp * score_flops / (peak * e.attention)
    saved_bytes = saved_elements(n) * width * tokens / c.tp
    stream = machine.memory_bytes_s * e.memory
    elementwise = saved_bytes / stream
    launches = e.kernel_s * one

    def waiting(work: Array, kernels: int) -> Array:
        return np.maximum(0.0, kernels * launches - work) if e.launch_hidden else kernels * launches

    forward = matmul + attention + 2.0 * elementwise
    backward = 2.0 * matmul + 2.5 * attention + 3.0 * elementwise
    launch_forward = waiting(forward, KERNELS_FORWARD)
    launch_backward = waiting(backward, KERNELS_BACKWARD)

    # Communication of one layer and microbatch.
    gather = machine.ring_seconds(tokens * n.hidden * width, c.tp, one)
    pairs = 2.0 - np.where(c.ep > 1, n.moe_share, 0.0)
    tp_forward, tp_backward = 2.0 * pairs * gather, 3.0 * pairs * gather
    kv_bytes = 2.0 * n.k_width / c.tp * tokens * c.cp * width
    ring = machine.ring_seconds(kv_bytes, c.cp, c.tp)
    cp_forward = np.maximum(0.0, ring - e.overlap * attention)
    cp_backward = np.maximum(0.0, 2.0 * ring - e.overlap * 2.5 * attention)
    routed_bytes = tokens / c.tp * n.experts_per_token * n.hidden * width
    exchange = np.where(c.ep > 1, machine.all_to_all_seconds(routed_bytes, c.ep, one), 0.0)
    dense_group = c.dp_shard * c.cp
    expert_group = np.where(c.ep > 1, dense_group * c.tp / c.ep, dense_group)
    expert_stride = np.where(c.ep > 1, c.ep, c.tp)

    def shard_traffic(dense_elements: Array, expert_elements: Array, element_bytes: float) -> Array:
        return machine.ring_seconds(
            dense_elements * element_bytes, dense_group, c.tp
        ) + machine.ring_seconds(expert_elements * element_bytes, expert_group, expert_stride)

    layer_dense = (n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights
    layer_expert = n.expert_weights / np.where(c.ep > 1, c.ep, c.tp)
    parameters = shard_traffic(layer_dense, layer_expert, width)
    gradients = shard_traffic(layer_dense, layer_expert, reduce_width)
    fsdp_forward = np.maximum(0.0, parameters - e.overlap * forward)
    fsdp_backward = np.maximum(0.0, c.reshard * parameters + gradients - e.overlap * backward)
    fsdp_layer = fsdp_forward + fsdp_backward
    vocabulary = (n.embedding_weights + n.head_params) / c.tp
    fsdp_outside = np.where(
        dense_group > 1,
        shard_traffic(vocabulary, 0.0 * one, width) + shard_traffic(vocabulary, 0.0 * one, reduce_width),
        0.0,
    )

    again = c.recompute
    head_matmul = 3.0 * matmul_seconds(n.head_weights, tokens, n.vocab / c.tp) / c.tp
    logits = tokens * n.vocab / c.tp
    head = head_matmul + logits * 6.0 * max(width, 4.0) / stream

    layer_terms = {
        "matmul": 3.0 * matmul,
        "attention": 3.5 * attention,
        "element-wise": 5.0 * elementwise,
        "recompute": again * (forward + launch_forward),
        "launch": launch_forward + launch_backward,
        "tp": tp_forward + tp_backward + again * tp_forward,
        "cp": cp_forward + cp_backward + again * cp_forward,
        "ep": (4.0 + 2.0 * again) * exchange,
        "fsdp": fsdp_layer,
    }
    per_layer = sum(layer_terms.values(), np.zeros_like(tokens))
    with_head = np.where(c.pp > 1, last_layers * per_layer + head >= layers * per_layer, True)
    stage_layers = np.where(with_head, np.where(c.pp > 1, last_layers, layers), layers)
    head_here = np.where(with_head, 1.0, 0.0)
    once = stage_layers * steps
    microbatch_s = stage_layers * per_layer + head_here * head + fsdp_outside

    hidden_bytes = tokens * n.hidden / c.tp * width
    # A send to the next stage: half of a ring over two ranks of the same traffic.
    hop = machine.ring_seconds(2.0 * hidden_bytes, np.where(c.pp > 1, 2.0, 1.0), _inner(c))
    shard_elements = stage_elements(n, c)
    replicas = c.dp_replicate
    replica_bytes = shard_elements * reduce_width
    reduce_replicas = 2.0 * machine.ring_seconds(
        replica_bytes, replicas, c.dp_shard * c.cp * c.tp
    )
    world = c.pp * c.dp_replicate * c.dp_shard * c.cp * c.tp
    norm = 2.0 * machine.ring_seconds(8.0 * one, world, one)
    optimizer = shard_elements * 7.0 * param_width / stream
    source = e.source
    megatron = "Korthikanti et al. 2022, section 4.2.2 (sequence parallelism), re-gather in backward"
    inputs: dict[str, Array | float] = {"T": tokens, "m": steps, "l": stage_layers, "P": c.tp}
    return (
        TimeTerm("matmul", once * layer_terms["matmul"],
                 "m l 6 T W / P / (peak * efficiency); W matrix elements a token visits in a layer",
                 f"peak of the device card; efficiency: {source}",
                 {**inputs, "W": n.attention_weights + n.mlp_weights + n.active_expert_weights,
                  "peak_flops": peak, "efficiency": e.matmul}),
        TimeTerm("attention", once * layer_terms["attention"],
                 "m l 3.5 T A / P / (peak * efficiency); A causal FLOPs per token, backward 2.5 x forward",
                 f"Dao 2023 (FlashAttention-2), section 3; efficiency: {source}",
                 {**inputs, "A": score_flops, "efficiency": e.attention}),
        TimeTerm("element-wise", once * layer_terms["element-wise"],
                 "m l 5 saved_bytes / (memory bandwidth * efficiency): written and read once, three times in backward",
                 f"memory bandwidth of the device card; efficiency: {source}",
                 {**inputs, "saved_bytes": saved_bytes, "memory_bytes_s": machine.memory_bytes_s}),
        TimeTerm("head and loss", steps * head_here * head,
                 "m (6 T h V / P / (peak * efficiency) + 6 passes over T V / P logits)",
                 f"device card; {source}", {**inputs, "V": float(n.vocab)}),
        TimeTerm("recompute", once * layer_terms["recompute"],
                 "one more forward of every layer", "Chen et al. 2016", inputs),
        TimeTerm("kernel launches", once * layer_terms["launch"],
                 "m l kernels * seconds per launch, as far as they do not hide behind the work",
                 source, {**inputs, "kernels": float(KERNELS_FORWARD + KERNELS_BACKWARD),
                          "kernel_s": e.kernel_s}),
        TimeTerm("tp communication", once * layer_terms["tp"],
                 "m l (10, recompute 14) gathers or scatters of T h b, (P-1)/P on the wire each", megatron,
                 {**inputs, "h": float(n.hidden), "gather_s": gather}),
        TimeTerm("cp communication", once * layer_terms["cp"],
                 "m l exposed key-value ring: (cp-1)/cp of 2 k T cp b / P forward, twice backward",
                 "Liu et al. 2023 (ring attention), section 3", {**inputs, "cp": c.cp, "ring_s": ring}),
        TimeTerm("ep communication", once * layer_terms["ep"],
                 "m l 4 all-to-alls of T / P * experts per token * h b", "Lepikhin et al. 2020 (GShard), section 3",
                 {**inputs, "ep": c.ep, "exchange_s": exchange}),
        TimeTerm("fsdp communication", once * layer_terms["fsdp"] + steps * fsdp_outside,
                 "m l (all-gather forward and, when resharded, backward, and reduce-scatter) beyond the layer they "
                 "hide behind, and the embedding and head unhidden",
                 "Rajbhandari et al. 2020 (ZeRO), section 7; prefetch of one layer",
                 {**inputs, "d": dense_group, "gather_s": parameters, "scatter_s": gradients,
                  "overlap": e.overlap}),
        TimeTerm("replica all-reduce", steps * reduce_replicas,
                 "m 2 (r-1)/r of the gradient shard over the replicas", "ring all-reduce, Patarasuk and Yuan 2009",
                 {"r": replicas, "shard_bytes": replica_bytes}),
        TimeTerm("pipeline bubble", (c.pp - 1.0) * microbatch_s,
                 "(p-1) microbatch times of the slowest stage", "Narayanan et al. 2021, section 2.2 (1F1B)",
                 {"p": c.pp, "microbatch_s": microbatch_s}),
        TimeTerm("pipeline sends", np.where(c.pp > 1, 2.0 * (steps + c.pp - 1.0) * hop, 0.0),
                 "2 (m+p-1) sends of T h b / P", "Narayanan et al. 2021, section 3.2",
                 {"p": c.pp, "hop_s": hop}),
        TimeTerm("gradient norm", norm, "one all-reduce of a scalar over all ranks", "latency of the tiers",
                 {"ranks": world}),
        TimeTerm("optimizer", optimizer,
                 "7 passes over the shard (read p, g, two moments; write p, two moments) / memory bandwidth",
                 f"Kingma and Ba 2015; efficiency: {source}", {"elements": shard_elements}),
    )  # fmt: skip


def saved_elements(numbers: ModelNumbers) -> float:
    """Elements per token that one layer keeps for backward without recomputation, over all tensor-parallel ranks.

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


def stage_elements(numbers: ModelNumbers, c: Candidates) -> Array:
    """Parameter elements on the fullest device, after pp, tp, ep and FSDP."""
    n = numbers
    layers = np.ceil(n.layers / c.pp)
    group = c.dp_shard * c.cp
    dense = layers * ((n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights) / group
    # Without ep the experts are split over tp, with it over ep and the ranks that ep leaves: the same share.
    experts = layers * n.expert_weights / (group * c.tp)
    outside = np.where(
        c.pp > 1,
        np.maximum(n.embedding_weights, n.head_weights),
        n.embedding_weights + n.head_params,
    )
    return dense + experts + outside / c.tp / group


def _inner(c: Candidates) -> Array:
    """Ranks of one stage, the distance between neighbours on the pipeline axis."""
    return c.dp_replicate * c.dp_shard * c.cp * c.tp
