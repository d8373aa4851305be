"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._layer import (
    KERNELS_BACKWARD,
    KERNELS_FORWARD,
    layer_communication,
    layer_compute,
    matmul_seconds,
    stage_elements,
    tokens_of,
)
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.ir import CostTerm, Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]

LOGIT_PASSES = 6.0
OPTIMIZER_PASSES = 7.0


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
    n, e, m, one = numbers, machine.efficiency, c.accumulation, np.ones_like(c.tp)
    width = float(DTYPE_BYTES[workload.compute_dtype])
    passing = machine.memory_bytes_s * e.elementwise
    stream = machine.memory_bytes_s * e.stream
    tokens = tokens_of(workload, c)
    work = layer_compute(n, machine, workload, c)
    comm = layer_communication(n, machine, workload, c, work)
    recompute = c.recompute * (work.forward + work.launch_forward)
    launch = work.launch_forward + work.launch_backward
    layer = (
        work.forward + work.backward + recompute + launch + comm.tp + comm.cp + comm.ep + comm.fsdp
    )
    logits_bytes = tokens * n.vocab / c.tp * max(width, 4.0)
    head = (
        3.0 * matmul_seconds(machine, n.head_weights, tokens, n.vocab / c.tp) / c.tp
        + LOGIT_PASSES * logits_bytes / passing
    )
    # The last stage has the fewest layers but also the head: whichever stage is slower sets the pace.
    most = np.ceil(n.layers / c.pp)
    last = np.where(c.pp > 1, np.maximum(n.layers - most * (c.pp - 1), 0.0), most)
    with_head = (c.pp == 1) | (last * layer + head >= most * layer)
    layers = np.where(with_head, last, most)
    head = np.where(with_head, head, 0.0)
    stage = layers * layer + head + comm.outside
    all_layers = m * layers

    boundary_bytes = tokens * n.hidden * width / c.tp
    inner = c.dp_replicate * c.dp_shard * c.cp * c.tp
    # Sending to the next stage is what a gather over two ranks sends of twice the tensor.
    hop = machine.ring_seconds(2.0 * boundary_bytes, np.where(c.pp > 1, 2.0, 1.0), inner)
    elements = stage_elements(n, c)
    shard_bytes = elements * DTYPE_BYTES[workload.reduce_dtype]
    replicas = 2.0 * machine.ring_seconds(shard_bytes, c.dp_replicate, c.dp_shard * c.cp * c.tp)
    norm = 2.0 * machine.ring_seconds(4.0 * one, c.pp * inner, one)
    optimizer = OPTIMIZER_PASSES * elements * DTYPE_BYTES[workload.param_dtype] / stream

    weights = n.attention_weights + n.mlp_weights + n.active_expert_weights
    of: dict[str, Array | float] = {"T": tokens, "m": m, "l": layers, "P": c.tp}
    card = f"device card; {e.source}"
    return (
        TimeTerm(
            "matmul", all_layers * 3.0 * work.matmul,
            "m l 6 T W / P / (peak * efficiency), W matrix elements a token meets in a layer", card,
            {**of, "W": weights, "peak_flops": machine.peak_flops, "efficiency": e.matmul},
        ),
        TimeTerm(
            "attention", all_layers * 3.5 * work.attention,
            "m l 3.5 T A / P / reached FLOP/s, A causal FLOPs per token forward",
            f"Dao 2023 (FlashAttention-2), section 3; {card}",
            {**of, "A": n.attention_flops(workload.seq_len), "reached_flops": machine.attention_flops},
        ),
        TimeTerm(
            "element-wise", all_layers * 5.0 * work.elementwise,
            "m l 5 saved bytes / memory bandwidth: written, read, and three times in backward", card,
            {**of, "saved_bytes": work.saved_bytes, "memory_bytes_s": passing},
        ),
        TimeTerm(
            "head and loss", m * head,
            "m (6 T h V / P / (peak * efficiency) + 6 passes over the logits)", card,
            {**of, "V": float(n.vocab)},
        ),
        TimeTerm(
            "recompute", all_layers * recompute, "m l one more forward", "Chen et al. 2016, section 3", of
        ),
        TimeTerm(
            "kernel launches", all_layers * launch,
            "m l launches * seconds each, as far as they do not hide behind the work", e.source,
            {**of, "launches": float(KERNELS_FORWARD + KERNELS_BACKWARD), "kernel_s": e.kernel_s},
        ),
        TimeTerm(
            "tp communication", all_layers * comm.tp,
            "m l 8 (recompute: 12) gathers or scatters of T h elements",
            "Korthikanti et al. 2022, section 4.2.2", {**of, "gather_s": comm.tp_gather},
        ),
        TimeTerm(
            "cp communication", all_layers * comm.cp,
            "m l key-value ring of 2 k T cp / P elements, twice backward, beyond the attention",
            "Liu et al. 2023 (ring attention), section 3", {**of, "cp": c.cp, "ring_s": comm.cp_ring},
        ),
        TimeTerm(
            "ep communication", all_layers * comm.ep,
            "m l 4 (recompute: 6) all-to-alls of T / P * experts per token * h elements",
            "Lepikhin et al. 2020 (GShard), section 3", {**of, "ep": c.ep, "exchange_s": comm.ep_exchange},
        ),
        TimeTerm(
            "fsdp communication", all_layers * comm.fsdp + m * comm.outside,
            "m l gathers (forward, resharded: backward) and a scatter beyond the layer they hide behind; "
            "embedding and head never hide",
            "Rajbhandari et al. 2020 (ZeRO), section 7",
            {**of, "d": c.dp_shard * c.cp, "gather_s": comm.fsdp_gather, "scatter_s": comm.fsdp_scatter,
             "overlap": e.overlap},
        ),
        TimeTerm(
            "replica all-reduce", replicas, "2 (r-1)/r of the gradient shard, once per step",
            "ring all-reduce, Patarasuk and Yuan 2009", {"r": c.dp_replicate, "bytes": shard_bytes},
        ),
        TimeTerm(
            "pipeline bubble", (c.pp - 1.0) * stage, "(p-1) microbatches of the slowest stage",
            "Narayanan et al. 2021, section 2.2", {"p": c.pp, "microbatch_s": stage},
        ),
        TimeTerm(
            "pipeline sends", 2.0 * (m + c.pp - 1.0) * hop, "2 (m+p-1) sends of T h / P elements",
            "Narayanan et al. 2021, section 4.1", {"m": m, "p": c.pp, "send_s": hop},
        ),
        TimeTerm(
            "gradient norm", norm, "an all-reduce of one number over all ranks", "latency of the tiers",
            {"ranks": c.pp * inner},
        ),
        TimeTerm(
            "optimizer", optimizer,
            "7 passes over the shard (AdamW reads 4 and writes 3 tensors) / memory bandwidth", card,
            {"elements": elements, "memory_bytes_s": stream},
        ),
    )  # fmt: skip
