"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from hyper_parallel.cost._candidates import Array, shape_of
from hyper_parallel.cost._communication import exposed, hop_seconds, per_tensor_latency_s, step_tail
from hyper_parallel.cost._offload_copies import COPIES, FORMULA, SOURCE
from hyper_parallel.cost._offload_demand import timed_offload_demand
from hyper_parallel.cost._phases import optimizer_traffic, stage_elements
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost._step import BlockPrices, Step
from hyper_parallel.cost.pipeline import bubble_seconds
from hyper_parallel.ir import AXES, CostTerm

_FORMULAS: Final = {
    "matmul": "m l 6 T W / P / (peak * share), stretched by (1 + s/M)(1 + s/N)(1 + s/K) for each matmul M x N x K",
    "attention": "m l 3.5 T A / P / reached FLOP/s, A causal FLOPs per token forward; the share falls with short "
    "sequences and narrow heads",
    "element-wise": "m l passes * saved bytes / memory bandwidth",
    "casts": "m l bytes per cast element * T (inputs + output gradients of the matmuls) / P / memory bandwidth",
    "head and loss": "m (6 T h V / P / (peak * share) + 24 bytes per logit / memory bandwidth)",
    "recompute": "m l recomputed forward",
    "kernel launches": "m l launches * seconds each, as far as they do not hide behind the work, and host work of "
    "expert layers",
    "host work of axes": "m l seconds of each axis that is used; replicas: l; pipeline: m per rank; experts: their "
    "layers",
    "gradient accumulation": "m 8 bytes per parameter of the rank: a float32 sum is read and written, as far as "
    "products do not hide it",
    "tp communication": "m l gathers and scatters of the blocks' shapes (1-D: 8, recompute 12, of T h elements) beyond "
    "the share that hides behind matmuls",
    "cp communication": "m l key-value ring of 2 k T cp / P elements, twice backward, beyond the attention; in full: "
    "head exchanges, keys and values that are gathered instead",
    "ep communication": "m l 4 (recompute: 6) all-to-alls of T / P * experts per token * h elements beyond the share "
    "that hides",
    "fsdp communication": "m l gathers (forward; ZeRO-3: backward) and a scatter beyond the layer they hide behind; "
    "embedding and head never hide",
    "data-parallel reduction": "gradients summed and parameters gathered once per step, beyond the last microbatch's "
    "backward; those that a pipeline keeps sharded in full",
    "pipeline bubble": "filling and draining: (sum over stages - slowest) * the schedule's factor",
    "pipeline sends": "2 (m v + p - 1) sends of T h / P elements that nothing hides",
    "gradient norm": "an all-reduce of one number over all ranks",
    "optimizer": "bytes of gradients, states and parameters that AdamW reads and writes / memory bandwidth",
    "every step": "data, logging, host",
    "stragglers": "share per doubling of the devices * the rest",
    COPIES: FORMULA,
}
"""Formula of every term, in the order in which terms are listed."""

Inputs = dict[str, Array | float]


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """Cause of step time over all candidates."""

    name: str
    seconds: Array
    source: str
    inputs: Inputs = field(default_factory=dict)

    @property
    def formula(self) -> str:
        """Formula in words and symbols."""
        return _FORMULAS[self.name]

    def term_of(self, index: int) -> CostTerm:
        """Return the term of one candidate."""
        shape = self.seconds.shape
        inputs = {k: float(np.broadcast_to(v, shape)[index]) for k, v in self.inputs.items()}
        return CostTerm(self.name, float(self.seconds[index]), self.formula, inputs, self.source)


def time_terms(s: PricingCase, blocks: BlockPrices | None = None) -> tuple[TimeTerm, ...]:
    """Return all terms of the step time; their sum is the prediction."""
    step, stack, c = Step.of(s, blocks), s.machine.stack, s.c
    terms = [*microbatch_terms(s, step), *step_terms(s, step)]
    total = sum((t.seconds for t in terms), np.zeros(1))
    noise = stack.straggle * np.log2(np.maximum(c.world_size, 1.0))
    devices: Inputs = {"devices": c.world_size}
    terms.append(TimeTerm("stragglers", noise * total, stack.source("straggle"), devices))
    if (c.offload > 0).any():
        optimizer = next(t.seconds for t in terms if t.name == "optimizer")
        demand = timed_offload_demand(s, step, optimizer)
        terms.append(TimeTerm(COPIES, demand.cheapest()[1], SOURCE, demand.inputs()))
    named, shape = {t.name: t for t in terms}, shape_of(c)
    ordered = (named[name] for name in _FORMULAS if name in named)
    return tuple(replace(t, seconds=np.broadcast_to(t.seconds, shape)) for t in ordered)


def step_seconds(
    s: PricingCase, parts: Literal["all", "pace"] = "all", blocks: BlockPrices | None = None
) -> Array:
    """Return the sum of the time terms.

    Args:
        s: Pricing case, columns of one length.
        parts: `pace` omits costs of sharded states and costs that occur once per step.
        blocks: Block prices, if already computed.
    """
    terms = time_terms(s, blocks) if parts == "all" else microbatch_terms(s, Step.of(s, blocks))
    return np.broadcast_to(sum((t.seconds for t in terms), np.zeros(1)), shape_of(s.c))


def microbatch_terms(s: PricingCase, step: Step) -> list[TimeTerm]:
    """Return the terms of microbatches that pass through the stages, without costs of sharded states."""
    n, c, machine, m, stages = s.n, s.c, s.machine, s.c.accumulation, step.stages
    card, stack, dtype = machine.card, machine.stack, machine.matmul_dtype
    work, comm = step.prices.work, step.prices.comm
    layers = stages.layers
    layer_passes = m * layers
    weights = n.attention_weights + n.mlp_weights + n.active_expert_weights
    common: Inputs = {"T": s.tokens, "m": m, "l": layers, "P": c.tp}
    return [
        TimeTerm(
            "matmul", layer_passes * 3.0 * work.matmul, card.source(f"matmul.{dtype}"),
            {**common, "W": weights, "peak_flops": machine.matmul_peak, "s": machine.saturation,
             "share": card.share("matmul", dtype)},
        ),
        TimeTerm(
            "attention", layer_passes * (work.attention + work.attention_backward),
            f"Dao 2023 (FlashAttention-2), section 3; {card.source('attention.bfloat16')}",
            {**common, "A": n.attention_flops(s.workload.seq_len), "reached_flops": machine.attention_flops,
             "flash": stack.flash},
        ),
        TimeTerm(
            "element-wise", layer_passes * (work.elementwise + work.elementwise_backward),
            f"{stack.source('passes')}; {card.source('elementwise')}",
            {**common, "saved_bytes": work.saved_bytes, "passes": stack.passes,
             "memory_bytes_s": machine.passing_bytes_s},
        ),
        TimeTerm(
            "casts", layer_passes * (work.quantize + work.quantize_backward), stack.source(f"quantize_bytes.{dtype}"),
            {**common, "bytes": stack.quantize_bytes.get(dtype, 0.0)},
        ),
        TimeTerm(
            "head and loss", m * step.prices.head * stages.head, card.source("matmul.bfloat16"),
            {**common, "V": float(n.vocab)},
        ),
        TimeTerm(
            "recompute", layer_passes * work.recompute,
            f"Chen et al. 2016, section 3; {stack.source('selective_matmul')}", common,
        ),
        TimeTerm(
            "kernel launches", layer_passes * work.launch, f"{card.source('kernel_s')}; {stack.source('moe_host_s')}",
            {**common, "launches": stack.kernels_forward + stack.kernels_backward, "kernel_s": card.kernel_s},
        ),
        TimeTerm(
            "tp communication", layer_passes * comm.tp,
            f"Korthikanti et al. 2022, section 4.2.2; {stack.source('overlap_tp')}",
            {**common, "x": c.tp_x, "y": c.tp_y, "layer_s": comm.tp_whole, "hidden_share": stack.overlap_tp},
        ),
        TimeTerm(
            "cp communication", layer_passes * comm.cp,
            f"Liu et al. 2023 (ring attention), section 3; {stack.source('overlap_cp')}",
            {**common, "cp": c.cp, "ulysses": c.cp_ulysses, "layer_s": comm.cp_whole},
        ),
        TimeTerm(
            "ep communication", layer_passes * step.ep,
            f"Lepikhin et al. 2020 (GShard), section 3; {stack.source('overlap_ep')}",
            {**common, "ep": c.ep, "exchange_s": comm.ep / (4.0 + 2.0 * s.full), "hidden_share": step.ep_hidden},
        ),
        *_pipeline_terms(s, step),
    ]  # fmt: skip


def _pipeline_terms(s: PricingCase, step: Step) -> list[TimeTerm]:
    """Return the terms of pipelines: the bubble, and sends between stages."""
    c, machine, m, stages = s.c, s.machine, s.c.accumulation, step.stages
    stack, work, comm = machine.stack, step.prices.work, step.prices.comm
    bubble = sends = hop = np.zeros(1)
    if (c.pp > 1).any():
        traffic = (comm.tp + step.ep + comm.cp) / 2.0
        bubble = bubble_seconds(
            c, stages.remaining_s + (c.pp - 1.0) * comm.outside, work.forward + work.launch / 3.0 + traffic,
            work.backward + work.recompute + work.launch / 1.5 + traffic, work.matmul, machine.pace,
        )  # fmt: skip
        hop = hop_seconds(s)
        sends = 2.0 * (m * c.vpp + c.pp - 1.0) * hop * (1.0 - stack.overlap_pp)
    return [
        TimeTerm(
            "pipeline bubble", bubble, "Narayanan et al. 2021, section 2.2; Qi et al. 2023 (zero bubble)",
            {"p": c.pp, "v": c.vpp, "schedule": c.schedule, "microbatch_s": stages.slowest},
        ),
        TimeTerm(
            "pipeline sends", sends, f"Narayanan et al. 2021, section 4.1; {stack.source('overlap_pp')}",
            {"m": m, "p": c.pp, "v": c.vpp, "send_s": hop},
        ),
    ]  # fmt: skip


def step_terms(s: PricingCase, step: Step) -> list[TimeTerm]:
    """Return the terms of sharded states, of costs once per step, and of host work."""
    c, machine, m, layers = s.c, s.machine, s.c.accumulation, step.stages.layers
    card, stack = machine.card, machine.stack
    work, comm, overlap = step.prices.work, step.prices.comm, stack.overlap_dp
    tail_parts, last = step_tail(s), work.backward * layers + step.prices.head
    tail = exposed(tail_parts["scatter_s"], last, overlap) + tail_parts["late_s"]
    tail = tail + exposed(tail_parts["gather_s"], last / 2.0, overlap)
    tail = (
        tail
        + exposed(tail_parts["first_s"], work.forward * layers, overlap)
        + per_tensor_latency_s(s)
    )
    norm = machine.ring(*s.places.group(AXES)).seconds(np.full(1, 4.0))
    elements = stage_elements(s)
    optimizer_bytes = optimizer_traffic(s, elements)
    accumulates = (m > 1) & ((c.zero < 2) | ((c.pp > 1) & (s.shards > 1)))
    accumulation_s = m * 8.0 * card.saturation * elements[0] / machine.stream_bytes_s
    return [
        TimeTerm(
            "host work of axes", machine.ranks_per_core * _host_work(s, layers), stack.source("host_s.dp_shard"),
            {"T": s.tokens, "m": m, "l": layers, "P": c.tp},
        ),
        TimeTerm(
            "gradient accumulation", np.where(accumulates, accumulation_s, 0.0), card.source("saturation"),
            {"m": m, "elements": elements[0]},
        ),
        TimeTerm(
            "fsdp communication", m * (layers * comm.fsdp + comm.outside),
            f"Rajbhandari et al. 2020 (ZeRO), section 7; {stack.source('overlap_dp')}",
            {"T": s.tokens, "m": m, "l": layers, "P": c.tp, "d": s.shards, "gather_s": comm.fsdp_gather,
             "scatter_s": comm.fsdp_scatter, "overlap": overlap},
        ),
        TimeTerm(
            "data-parallel reduction", tail,
            f"ring collectives, Patarasuk and Yuan 2009; {stack.source('overlap_dp')}",
            {"r": c.dp_replicate, "d": s.shards, **tail_parts},
        ),
        TimeTerm("gradient norm", 2.0 * norm, "latency of the tiers", {"ranks": c.world_size}),
        TimeTerm(
            "optimizer", optimizer_bytes / machine.stream_bytes_s, card.source("stream"),
            {"bytes": optimizer_bytes, "memory_bytes_s": machine.stream_bytes_s},
        ),
        TimeTerm("every step", np.full(1, stack.step_s), stack.source("step_s")),
    ]  # fmt: skip


def _host_work(s: PricingCase, layers: Array) -> Array:
    """Return core seconds per step that a rank spends on launches of the axes' work, beyond time on the links."""
    c, seconds = s.c, s.machine.stack.host_s
    total: Array = np.zeros(1)
    if not seconds:
        return total
    all_layers = c.accumulation * layers
    redone = all_layers * np.where(c.recompute > 1, 1.5, 1.0)
    kinds = {
        "dp_replicate": (c.dp_replicate > 1, layers),
        "dp_shard": (s.shards > 1, all_layers),
        "cp": (c.cp - c.cp_ulysses > 0.5, redone),
        "cp_ulysses": (c.cp_ulysses > 1, redone),
        "tp_x": (c.tp > 1, redone),
        "tp_y": (c.tp_y > 1, redone),
        "ep": (c.ep > 1, redone * s.n.moe_share),
        "pp": (c.pp > 1, c.accumulation * c.vpp),
    }
    for axis, (used, times) in kinds.items():
        total = total + np.where(used, times * seconds.get(axis, 0.0), 0.0)
    return total
