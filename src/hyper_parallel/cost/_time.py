"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

The seconds are those of `_step`. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel.cost._budget import copy_load
from hyper_parallel.cost._candidates import Array, shape_of
from hyper_parallel.cost._copies import COPIES, FORMULA, SOURCE
from hyper_parallel.cost._setting import Setting
from hyper_parallel.cost._step import LayerPrices, Pace, Rest
from hyper_parallel.ir import CostTerm


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


def time_terms(s: Setting) -> tuple[TimeTerm, ...]:
    """All terms of the step time; their sum is the prediction."""
    n, c, machine, m = s.n, s.c, s.machine, s.c.accumulation
    card, stack, dtype = machine.card, machine.stack, machine.matmul_dtype
    prices = LayerPrices.of(s)
    work, comm, pace = prices.work, prices.comm, Pace.of(s, prices)
    stages, layers = pace.stages, pace.stages.layers
    rest = Rest.of(s, prices, layers)
    all_layers, once = m * layers, rest.once
    weights = n.attention_weights + n.mlp_weights + n.active_expert_weights
    of: dict[str, Array | float] = {"T": s.tokens, "m": m, "l": layers, "P": c.tp}
    terms = (
        TimeTerm(
            "matmul", all_layers * 3.0 * work.matmul,
            "m l 6 T W / P / (peak * share), stretched by (1 + s/M)(1 + s/N)(1 + s/K) for each matmul M x N x K",
            card.source(f"matmul.{dtype}"),
            {**of, "W": weights, "peak_flops": machine.matmul_peak, "s": machine.saturation,
             "share": card.share("matmul", dtype)},
        ),
        TimeTerm(
            "attention", all_layers * (work.attention + work.attention_backward),
            "m l 3.5 T A / P / reached FLOP/s, A causal FLOPs per token forward; the share falls with short sequences "
            "and narrow heads",
            f"Dao 2023 (FlashAttention-2), section 3; {card.source('attention.bfloat16')}",
            {**of, "A": n.attention_flops(s.workload.seq_len), "reached_flops": machine.attention_flops,
             "flash": stack.flash},
        ),
        TimeTerm(
            "element-wise", all_layers * (work.elementwise + work.elementwise_backward),
            "m l passes * saved bytes / memory bandwidth", f"{stack.source('passes')}; {card.source('elementwise')}",
            {**of, "saved_bytes": work.saved_bytes, "passes": stack.passes, "memory_bytes_s": machine.passing_bytes_s},
        ),
        TimeTerm(
            "casts", all_layers * (work.quantize + work.quantize_backward),
            "m l bytes per cast element * T (inputs + output gradients of the matmuls) / P / memory bandwidth",
            stack.source(f"quantize_bytes.{dtype}"), {**of, "bytes": stack.quantize_bytes.get(dtype, 0.0)},
        ),
        TimeTerm(
            "head and loss", m * prices.head * stages.head,
            "m (6 T h V / P / (peak * share) + 24 bytes per logit / memory bandwidth)",
            card.source("matmul.bfloat16"), {**of, "V": float(n.vocab)},
        ),
        TimeTerm(
            "recompute", all_layers * work.recompute, "m l what recomputation redoes of the forward",
            f"Chen et al. 2016, section 3; {stack.source('selective_matmul')}", of,
        ),
        TimeTerm(
            "kernel launches", all_layers * work.launch,
            "m l launches * seconds each, as far as they do not hide behind the work, and host work of expert layers",
            f"{card.source('kernel_s')}; {stack.source('moe_host_s')}",
            {**of, "launches": stack.kernels_forward + stack.kernels_backward, "kernel_s": card.kernel_s},
        ),
        TimeTerm(
            "host work of axes", rest.host,
            "m l seconds of each axis that is used; replicas: l; pipeline: m per rank; experts: their layers",
            stack.source("host_s.dp_shard"), of,
        ),
        TimeTerm(
            "gradient accumulation", rest.accumulated,
            "m 8 bytes per parameter of the rank: a float32 sum is read and written, as far as products do not hide it",
            card.source("saturation"), {"m": m, "elements": rest.elements},
        ),
        TimeTerm(
            "tp communication", all_layers * comm.tp,
            "m l gathers and scatters of the blocks' shapes (1-D: 8, recompute 12, of T h elements) beyond the share "
            "that hides behind matmuls", f"Korthikanti et al. 2022, section 4.2.2; {stack.source('overlap_tp')}",
            {**of, "x": c.tp_x, "y": c.tp_y, "layer_s": comm.tp_whole, "hidden_share": stack.overlap_tp},
        ),
        TimeTerm(
            "cp communication", all_layers * comm.cp,
            "m l key-value ring of 2 k T cp / P elements, twice backward, beyond the attention; in full: head "
            "exchanges, keys and values that are gathered instead",
            f"Liu et al. 2023 (ring attention), section 3; {stack.source('overlap_cp')}",
            {**of, "cp": c.cp, "ulysses": c.cp_ulysses, "layer_s": comm.cp_whole},
        ),
        TimeTerm(
            "ep communication", all_layers * pace.ep,
            "m l 4 (recompute: 6) all-to-alls of T / P * experts per token * h elements beyond the share that hides",
            f"Lepikhin et al. 2020 (GShard), section 3; {stack.source('overlap_ep')}",
            {**of, "ep": c.ep, "exchange_s": comm.ep_exchange, "hidden_share": pace.ep_hidden},
        ),
        TimeTerm(
            "fsdp communication", rest.fsdp,
            "m l gathers (forward; ZeRO-3: backward) and a scatter beyond the layer they hide behind; "
            "embedding and head never hide",
            f"Rajbhandari et al. 2020 (ZeRO), section 7; {stack.source('overlap_dp')}",
            {**of, "d": s.shards, "gather_s": comm.fsdp_gather, "scatter_s": comm.fsdp_scatter,
             "overlap": stack.overlap_dp},
        ),
        TimeTerm(
            "data-parallel reduction", rest.tail,
            "gradients summed and parameters gathered once per step, beyond the last microbatch's backward; those that "
            "a pipeline keeps sharded in full",
            f"ring collectives, Patarasuk and Yuan 2009; {stack.source('overlap_dp')}",
            {"r": c.dp_replicate, "d": s.shards, "scatter_s": once.scatter, "gather_s": once.gather,
             "first_s": once.first, "late_s": once.late},
        ),
        TimeTerm(
            "pipeline bubble", pace.bubble,
            "filling and draining: (sum over stages - slowest) * the schedule's factor",
            "Narayanan et al. 2021, section 2.2; Qi et al. 2023 (zero bubble)",
            {"p": c.pp, "v": c.vpp, "schedule": c.schedule, "microbatch_s": stages.slowest},
        ),
        TimeTerm(
            "pipeline sends", pace.sends, "2 (m v + p - 1) sends of T h / P elements that nothing hides",
            f"Narayanan et al. 2021, section 4.1; {stack.source('overlap_pp')}",
            {"m": m, "p": c.pp, "v": c.vpp, "send_s": pace.hop},
        ),
        TimeTerm(
            "gradient norm", rest.norm, "an all-reduce of one number over all ranks", "latency of the tiers",
            {"ranks": c.world_size},
        ),
        TimeTerm(
            "optimizer", rest.optimizer,
            "bytes of gradients, states and parameters that AdamW reads and writes / memory bandwidth",
            card.source("stream"), {"bytes": rest.moved, "memory_bytes_s": machine.stream_bytes_s},
        ),
        TimeTerm("every step", np.full(1, rest.every), "data, logging, host", stack.source("step_s")),
    )  # fmt: skip
    total, shape = sum((t.seconds for t in terms), np.zeros(1)), shape_of(c)
    late = TimeTerm(
        "stragglers", rest.noise * total, "share per doubling of the devices * the rest", stack.source("straggle"),
        {"devices": c.world_size},
    )  # fmt: skip
    copies: tuple[TimeTerm, ...] = ()
    if (c.offload > 0).any():
        load = copy_load(s, prices, pace, rest)
        copies = (TimeTerm(COPIES, load.best()[1], FORMULA, SOURCE, load.inputs()),)
    return tuple(
        replace(t, seconds=np.broadcast_to(t.seconds, shape)) for t in (*terms, late, *copies)
    )
