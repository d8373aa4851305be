"""Predicted step time of candidate strategies, as one term per cause, with formula, inputs and source of each term.

The step time is the sum of the slowest pipeline stage's time for m microbatches, the time of pipeline fill and drain,
and the time of work that a step does once, such as the optimizer. Letters are as in `_layer`; in addition, m is the
number of microbatches, p of pipeline ranks, v of virtual stages per rank, and l of layers on the slowest rank. `score`
returns the terms of the step time together with the terms of the peak memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

import numpy as np

from hyper_parallel.cost._communication import (
    BlockCommunication,
    Communication,
    block_communication,
    exposed,
    hop_seconds,
    layer_communication,
    per_tensor_latency_s,
    step_tail,
)
from hyper_parallel.cost._layer import Compute, layer_compute, matmul_seconds
from hyper_parallel.cost._memory import SpaceTerm, memory_terms, offload_demand, resident_bytes
from hyper_parallel.cost._offload_copies import COPIES, FORMULA, SOURCE, OffloadDemand, move_to_host
from hyper_parallel.cost._phases import optimizer_traffic, stage_elements
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.candidates import (
    Array,
    StageSplit,
    bubble_seconds,
    shape_of,
    split_layers_closed_form,
)
from hyper_parallel.cost.overlap import with_overlap
from hyper_parallel.ir import AXES, CostTerm, MemoryTerm

LOGIT_BYTES = 24.0
"""Bytes that the loss reads and writes per logit.

A logit of 2 bytes is written (2), cast to float32 (2 read, 4 written), and read and written by the softmax (8) and by
its gradient (8), which is computed in place. The cast of the gradient is not counted.
"""


@dataclass(frozen=True, slots=True)
class BlockPrices:
    """Seconds of an average layer and of the head that depend neither on the pipeline nor on data parallelism.

    Candidates that differ only in these choices share them if links are equally fast between all ranks.
    """

    work: Compute  # compute of an average layer
    comm: BlockCommunication  # communication of an average layer, without data parallelism and experts
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: PricingCase) -> BlockPrices:
        """Return the seconds for all candidates, as arrays that broadcast to the shape of their columns."""
        work = layer_compute(s)
        return cls(work, block_communication(s, work), _head(s))

    def take(self, shape: tuple[int, ...], index: Any) -> BlockPrices:
        """Return the seconds of the candidates at `index`; `shape` is the broadcast shape of all candidates."""

        def part_at(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return np.broadcast_to(part, shape)[index]
            return replace(part, **{f.name: part_at(getattr(part, f.name)) for f in fields(part)})

        return BlockPrices(part_at(self.work), part_at(self.comm), part_at(self.head))


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """Seconds of compute and communication of an average layer, and of the head."""

    work: Compute  # compute of an average layer
    comm: Communication  # communication of an average layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: PricingCase, blocks: BlockPrices | None = None) -> LayerPrices:
        """Return the seconds for all candidates; `blocks` is the result of `BlockPrices.of` if already computed."""
        blocks = blocks or BlockPrices.of(s)
        comm = layer_communication(s, blocks.work, blocks.comm)
        return cls(blocks.work, with_overlap(s, blocks.work, comm), blocks.head)

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch with exposed communication, but without expert all-to-alls."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp


def _head(s: PricingCase) -> Array:
    """Return seconds of the output projection (forward and both gradients) and the loss of one microbatch.

    A head that tensor parallelism cannot shard processes the tokens of its rank, or those of all ranks if the residual
    stream is replicated.
    """
    machine, vocab = s.machine, s.n.vocab / s.vocabulary_ranks
    tokens = s.tokens * s.vocabulary_ranks / s.logit_ranks
    share = machine.card.share("matmul", machine.compute_dtype)
    # The head uses the compute dtype even if the layers use 8 or 4 bits.
    slower = machine.matmul_flops / (machine.peak_flops * share / machine.stack.compute)
    products = 3.0 * matmul_seconds(machine, tokens, vocab, s.n.hidden) * slower
    return products + LOGIT_BYTES * tokens * vocab / machine.passing_bytes_s


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of the layers of all candidates, and their split into pipeline stages."""

    prices: LayerPrices
    ep: Array  # exposed expert all-to-alls of one layer and microbatch
    ep_hidden: Array  # hidden fraction of the expert all-to-alls; 0 if `with_overlap` has subtracted hidden seconds
    stages: StageSplit

    @classmethod
    def of(cls, s: PricingCase, blocks: BlockPrices | None = None) -> Step:
        """Return the seconds of the layers and their split into stages; arguments as for `LayerPrices.of`."""
        prices, stack = LayerPrices.of(s, blocks), s.machine.stack
        chunked = (s.c.pp > 1) & (s.c.vpp > 1)
        hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
        if s.c.any_overlap:  # the simulation in `with_overlap` has already subtracted hidden time
            hidden = np.where((s.c.halves == 1) & (s.c.ep_chunks == 1), hidden, 0.0)
        ep = prices.comm.ep * (1.0 - hidden)
        stages = split_layers_closed_form(
            s.c, s.n.layers, prices.layer + ep, prices.head, bool(stack.even_stages), s.machine.pace
        )
        return cls(prices, ep, hidden, stages)


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
    "host work of axes": "m l seconds of each axis that is used; replicas: l; pipeline: m v; experts: their layers",
    "gradient accumulation": "m 8 bytes per parameter of the rank / memory bandwidth * the card's saturation: a "
    "float32 sum is read and written, in part while matmuls run",
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
"""Formula of each time term by name, in the order in which terms are listed."""

Inputs = dict[str, Array | float]


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """Term of the predicted step time, named by its cause, as an array over candidates."""

    name: str
    seconds: Array
    source: str
    inputs: Inputs = field(default_factory=dict)

    @property
    def formula(self) -> str:
        """Formula of the term in words and symbols."""
        return _FORMULAS[self.name]

    def term_of(self, index: int) -> CostTerm:
        """Return the term of one candidate, with its inputs, formula and source."""
        shape = self.seconds.shape
        inputs = {k: float(np.broadcast_to(v, shape)[index]) for k, v in self.inputs.items()}
        return CostTerm(self.name, float(self.seconds[index]), self.formula, inputs, self.source)


def time_terms(s: PricingCase, blocks: BlockPrices | None = None) -> tuple[TimeTerm, ...]:
    """Return all terms of the step time; their sum is the predicted time of a step in seconds."""
    step, stack, c = Step.of(s, blocks), s.machine.stack, s.c
    terms = [*microbatch_terms(s, step), *step_terms(s, step)]
    total = sum((t.seconds for t in terms), np.zeros(1))
    noise = stack.straggle * np.log2(np.maximum(c.world_size, 1.0))
    devices: Inputs = {"devices": c.world_size}
    terms.append(TimeTerm("stragglers", noise * total, stack.source("straggle"), devices))
    if (c.offload > 0).any():
        optimizer = next(t.seconds for t in terms if t.name == "optimizer")
        demand = _timed_offload_demand(s, step, optimizer)
        terms.append(TimeTerm(COPIES, demand.cheapest()[1], SOURCE, demand.inputs()))
    named, shape = {t.name: t for t in terms}, shape_of(c)
    ordered = (named[name] for name in _FORMULAS if name in named)
    return tuple(replace(t, seconds=np.broadcast_to(t.seconds, shape)) for t in ordered)


def step_seconds(s: PricingCase, parts: Literal["all", "pace"] = "all", blocks: BlockPrices | None = None) -> Array:
    """Return the seconds of a step, or with `pace` for `parts` those of `microbatch_terms`.

    Columns of `s` must have one length. `blocks` is the result of `BlockPrices.of`, if already computed.
    """
    terms = time_terms(s, blocks) if parts == "all" else microbatch_terms(s, Step.of(s, blocks))
    return np.broadcast_to(sum((t.seconds for t in terms), np.zeros(1)), shape_of(s.c))


def microbatch_terms(s: PricingCase, step: Step) -> list[TimeTerm]:
    """Return the terms of layers, head and pipeline for all microbatches, without the term of FSDP collectives."""
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
            f"Dao 2023 (FlashAttention-2), section 3; {card.source(f'attention.{machine.compute_dtype}')}",
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
            "head and loss", m * step.prices.head * stages.head,
            card.source(f"matmul.{machine.compute_dtype}"), {**common, "V": float(n.vocab)},
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
    c, machine, m, stages = s.c, s.machine, s.c.accumulation, step.stages
    stack, work, comm = machine.stack, step.prices.work, step.prices.comm
    bubble = sends = hop = np.zeros(1)
    if (c.pp > 1).any():
        traffic = (comm.tp + step.ep + comm.cp) / 2.0
        bubble = bubble_seconds(
            c, stages.remaining_s + (c.pp - 1.0) * comm.outside, work.launched_forward + traffic,
            work.launched_backward + traffic, work.matmul, machine.pace,
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
    """Return the terms of data-parallel collectives, gradient accumulation, host work, and work once per step."""
    c, machine, m, layers = s.c, s.machine, s.c.accumulation, step.stages.layers
    card, stack = machine.card, machine.stack
    work, comm, overlap = step.prices.work, step.prices.comm, stack.overlap_dp
    tail_parts, last = step_tail(s), work.backward * layers + step.prices.head
    tail = exposed(tail_parts["scatter_s"], last, overlap) + tail_parts["late_s"]
    tail = tail + exposed(tail_parts["gather_s"], last / 2.0, overlap)
    tail = tail + exposed(tail_parts["first_s"], work.forward * layers, overlap)
    tail = tail + per_tensor_latency_s(s)
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
    """Return the CPU seconds per step that parallel axes add on a rank.

    Full recomputation adds half of the work of cp, tp and ep.
    """
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


def _timed_offload_demand(s: PricingCase, step: Step, optimizer_s: Array) -> OffloadDemand:
    """Return `offload_demand` with the seconds of the work that copies may overlap."""
    demand, work, comm = offload_demand(s), step.prices.work, step.prices.comm
    layers, head = step.stages.layers, step.prices.head * step.stages.head
    exposed, none = comm.tp + step.ep + comm.cp, 0.0 * demand.need_bytes
    half = (exposed + comm.fsdp) / 2.0
    forward = layers * (work.launched_forward + half) + head / 3.0
    backward = layers * (work.launched_backward + half) + head / 1.5
    products = work.matmul + work.quantize + work.launch / 3.0 + exposed / 2.0
    alternates = demand.alternating > 0
    return replace(
        demand,
        passing_s=layers * work.elementwise + none,
        products_s=layers * products + none,
        forward_s=np.where(alternates, forward, forward + backward),
        backward_s=np.where(alternates, backward, forward + backward),
        update_s=optimizer_s + none,
    )


@dataclass(frozen=True, slots=True)
class Scores:
    """Predicted step time and peak memory of many candidates, by term."""

    time: tuple[TimeTerm, ...]  # terms of the step time
    memory: tuple[SpaceTerm, ...]  # terms of the peak memory, offloaded bytes included
    step_s: Array  # sum of the time terms
    memory_bytes: Array  # sum of the memory terms without offloaded bytes

    def cost_at(self, index: int) -> tuple[CostTerm, ...]:
        """Return the nonzero time terms of one candidate, and the term of offload copies if it offloads bytes."""
        return tuple(t.term_of(index) for t in self.time if t.seconds[index] > 0.0 or _is_copies(t, index))

    def memory_at(self, index: int) -> tuple[MemoryTerm, ...]:
        """Return the nonzero memory terms of one candidate, with offloaded bytes in host memory."""
        terms = tuple(t.term_of(index) for t in self.memory if t.bytes[index] > 0.0)
        return move_to_host(terms, self.cost_at(index))


def _is_copies(term: TimeTerm, index: int) -> bool:
    """Return whether a term is that of offload copies and the candidate at `index` offloads bytes."""
    if term.name != COPIES:
        return False
    return any(np.ravel(term.inputs[n])[index] > 0.0 for n in ("need_bytes", "end_bytes"))


def score(s: PricingCase) -> Scores:
    """Return the predicted step time and peak memory of all candidates; legality is not checked."""
    time, memory = time_terms(s), memory_terms(s)
    resident = resident_bytes(sum((t.bytes for t in memory), np.zeros(1)), s)
    return Scores(time, memory, sum((t.seconds for t in time), np.zeros(1)), resident)
