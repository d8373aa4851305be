"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._budget import load_bytes, with_seconds
from hyper_parallel.cost._candidates import Candidates, shape_of
from hyper_parallel.cost._communication import (
    Communication,
    exposed,
    layer_communication,
    step_tail,
    tensor_hops,
)
from hyper_parallel.cost._copies import COPIES, FORMULA, SOURCE
from hyper_parallel.cost._layer import Compute, layer_compute, matmul_seconds, tokens_of
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._pipeline import bubble_seconds, lay_out
from hyper_parallel.cost._place import Places
from hyper_parallel.cost._states import outside_elements, stage_elements, state_bytes
from hyper_parallel.ir import CostTerm, Workload

Array = NDArray[np.float64]

LOGIT_BYTES = 24.0
"""Bytes moved per logit by the loss: written, cast to float32 (read 2, written 4), softmax and its gradient in place
(read and written twice), cast back."""


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


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """What depends on the layer's own choices only: work and communication of a layer, and the head.

    Attributes:
        work: Compute of a mean layer.
        comm: Communication of a mean layer.
        head: Seconds of the output projection and the loss of one microbatch.
    """

    work: Compute
    comm: Communication
    head: Array

    @classmethod
    def of(
        cls,
        numbers: ModelNumbers,
        machine: Machine,
        workload: Workload,
        c: Candidates,
        places: Places,
    ) -> LayerPrices:
        """Prices of candidates; only the columns of the layer are read, and the strides of its groups."""
        work = layer_compute(numbers, machine, workload, c)
        comm = layer_communication(numbers, machine, workload, c, places, work)
        return cls(work, comm, _head(numbers, machine, workload, c))

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch, forward and backward, without expert exchanges."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp

    def take(self, index: NDArray[np.intp]) -> LayerPrices:
        """The prices of the rows that an index lists."""

        def pick(value: Compute | Communication) -> dict[str, Array]:
            return {f.name: _rows(getattr(value, f.name), index) for f in fields(value)}

        work, comm = Compute(**pick(self.work)), Communication(**pick(self.comm))
        return LayerPrices(work, comm, _rows(self.head, index))


def _rows(value: Array, index: NDArray[np.intp]) -> Array:
    return value[index] if value.size > 1 else value


def _head(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Array:
    """Output projection in the compute dtype, forward and both gradients, and the loss."""
    tokens, vocab = tokens_of(workload, c), n.vocab / c.tp
    share = machine.card.share("matmul", machine.compute_dtype)
    # The head stays in the compute dtype where the layers use 8 or 4 bits.
    slower = machine.matmul_flops / (machine.peak_flops * share / machine.stack.compute)
    products = 3.0 * matmul_seconds(machine, tokens, vocab, n.hidden) * slower
    return products + LOGIT_BYTES * tokens * vocab / machine.passing_bytes_s


def _host_work(seconds: Mapping[str, float], c: Candidates, layers: Array) -> Array:
    """Core seconds of a step that a rank spends on starting what the axes do, beyond the time on the links."""
    total: Array = np.zeros(1)
    if not seconds:
        return total
    full = np.where(c.recompute > 1, 1.5, 1.0)
    kinds = {
        "dp_replicate": (c.dp_replicate > 1, layers),
        "dp_shard": (c.dp_shard * c.cp > 1, c.accumulation * layers),
        "cp": (c.cp - c.cp_ulysses > 0.5, c.accumulation * layers * full),
        "cp_ulysses": (c.cp_ulysses > 1, c.accumulation * layers * full),
        "tp_x": (c.tp > 1, c.accumulation * layers * full),
        "tp_y": (c.tp_y > 1, c.accumulation * layers * full),
        "pp": (c.pp > 1, c.accumulation * c.vpp),
    }
    for axis, (used, times) in kinds.items():
        total = total + np.where(used, times * seconds.get(axis, 0.0), 0.0)
    return total


def time_terms(
    numbers: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    prices: LayerPrices | None = None,
) -> tuple[TimeTerm, ...]:
    """All terms of the step time; their sum is the prediction.

    Args:
        numbers: The model.
        machine: The device and its links.
        workload: Sequence length and number formats; the batch numbers come from the candidates.
        c: Candidates.
        prices: Prices of the layers, when they are already known.
    """
    n, card, stack, m = numbers, machine.card, machine.stack, c.accumulation
    places = Places.of(c)
    prices = prices or LayerPrices.of(numbers, machine, workload, c, places)
    work, comm = prices.work, prices.comm
    tokens, width = tokens_of(workload, c), machine.width
    chunked = (c.pp > 1) & (c.vpp > 1)
    ep_hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
    ep = comm.ep * (1.0 - ep_hidden)
    even = bool(stack.even_stages)
    stages = lay_out(c, n.layers, prices.layer + ep, prices.head, even, machine.crowd)
    layers, all_layers = stages.layers, m * stages.layers
    bubble = bubble_seconds(
        c,
        stages.others + (c.pp - 1.0) * comm.outside,
        work.forward + work.launch / 3.0 + (comm.tp + ep + comm.cp) / 2.0,
        work.backward + work.recompute + work.launch / 1.5 + (comm.tp + ep + comm.cp) / 2.0,
        work.weight_gradient,
        machine.crowd,
    )

    boundary_bytes = tokens * n.hidden * width / c.tp
    # Sending to the next stage is what a gather over two ranks sends of twice the tensor.
    neighbours = (np.minimum(c.pp, 2.0), places.pp[1])
    hop = machine.ring_seconds(2.0 * boundary_bytes, neighbours)
    sends = 2.0 * (m * c.vpp + c.pp - 1.0) * hop * (1.0 - stack.overlap_pp)

    elements = stage_elements(n, c)
    once = step_tail(
        n, machine, workload, c, places, np.ceil(n.layers / c.pp), outside_elements(n, c)
    )
    last = work.backward * layers + prices.head
    tail = exposed(once.scatter, last, stack.overlap_dp) + once.late
    tail = tail + exposed(once.gather, last / 2.0, stack.overlap_dp)
    tail = tail + exposed(once.first, work.forward * layers, stack.overlap_dp)
    tail = tail + tensor_hops(machine, c, places, np.ceil(n.layers / c.pp))
    every = (places.pp, places.dp_replicate, places.dp_shard, places.cp, places.tp_x, places.tp_y)
    norm = 2.0 * machine.ring_seconds(np.full(1, 4.0), *every)
    moved = state_bytes(n, workload, c).optimizer_moved
    optimizer = moved / machine.stream_bytes_s
    accumulated = np.where(
        (m > 1) & ((c.zero < 2) | ((c.pp > 1) & (c.dp_shard * c.cp > 1))),
        m * 8.0 * card.saturation * elements.whole / machine.stream_bytes_s,
        0.0,
    )
    host = machine.crowd * _host_work(stack.host_s, c, layers)
    noise = stack.straggle * np.log2(np.maximum(c.world_size, 1.0))

    weights = n.attention_weights + n.mlp_weights + n.active_expert_weights
    of: dict[str, Array | float] = {"T": tokens, "m": m, "l": layers, "P": c.tp}
    dtype = machine.matmul_dtype
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
            {**of, "A": n.attention_flops(workload.seq_len), "reached_flops": machine.attention_flops,
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
            "host work of axes", host,
            "m l seconds of each axis that is used; replicas: l; pipeline: m per rank",
            stack.source("host_s.dp_shard"), of,
        ),
        TimeTerm(
            "gradient accumulation", accumulated,
            "m 8 bytes per parameter of the rank: a float32 sum is read and written, as far as products do not hide it",
            card.source("saturation"),
            {"m": m, "elements": elements.whole},
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
            "ep communication", all_layers * ep,
            "m l 4 (recompute: 6) all-to-alls of T / P * experts per token * h elements beyond the share that hides",
            f"Lepikhin et al. 2020 (GShard), section 3; {stack.source('overlap_ep')}",
            {**of, "ep": c.ep, "exchange_s": comm.ep_exchange, "hidden_share": ep_hidden},
        ),
        TimeTerm(
            "fsdp communication", all_layers * comm.fsdp + m * comm.outside,
            "m l gathers (forward; ZeRO-3: backward) and a scatter beyond the layer they hide behind; "
            "embedding and head never hide",
            f"Rajbhandari et al. 2020 (ZeRO), section 7; {stack.source('overlap_dp')}",
            {**of, "d": c.dp_shard * c.cp, "gather_s": comm.fsdp_gather, "scatter_s": comm.fsdp_scatter,
             "overlap": stack.overlap_dp},
        ),
        TimeTerm(
            "data-parallel reduction", tail,
            "gradients summed and parameters gathered once per step, beyond the last microbatch's backward; those that "
            "a pipeline keeps sharded in full",
            f"ring collectives, Patarasuk and Yuan 2009; {stack.source('overlap_dp')}",
            {"r": c.dp_replicate, "d": c.dp_shard * c.cp, "scatter_s": once.scatter, "gather_s": once.gather,
             "first_s": once.first,
             "late_s": once.late},
        ),
        TimeTerm(
            "pipeline bubble", bubble,
            "filling and draining: (sum over stages - slowest) * the schedule's factor",
            "Narayanan et al. 2021, section 2.2; Qi et al. 2023 (zero bubble)",
            {"p": c.pp, "v": c.vpp, "schedule": c.schedule, "microbatch_s": stages.slowest},
        ),
        TimeTerm(
            "pipeline sends", sends, "2 (m v + p - 1) sends of T h / P elements that nothing hides",
            f"Narayanan et al. 2021, section 4.1; {stack.source('overlap_pp')}",
            {"m": m, "p": c.pp, "v": c.vpp, "send_s": hop},
        ),
        TimeTerm(
            "gradient norm", norm, "an all-reduce of one number over all ranks", "latency of the tiers",
            {"ranks": c.world_size},
        ),
        TimeTerm(
            "optimizer", optimizer,
            "bytes of gradients, states and parameters that AdamW reads and writes / memory bandwidth",
            card.source("stream"), {"bytes": moved, "memory_bytes_s": machine.stream_bytes_s},
        ),
        TimeTerm(
            "every step", np.full(1, stack.step_s), "data, logging, host", stack.source("step_s")
        ),
    )  # fmt: skip
    total = sum((t.seconds for t in terms), np.zeros(1))
    shape = shape_of(c)
    late = TimeTerm(
        "stragglers", noise * total, "share per doubling of the devices * the rest", stack.source("straggle"),
        {"devices": c.world_size},
    )  # fmt: skip
    copies: tuple[TimeTerm, ...] = ()
    if (c.offload > 0).any():
        load = with_seconds(
            load_bytes(n, machine, workload, c), c, work, comm.tp + ep + comm.cp, comm.fsdp,
            prices.head * stages.head, layers, optimizer,
        )  # fmt: skip
        copies = (TimeTerm(COPIES, load.best()[1], FORMULA, SOURCE, load.inputs()),)
    return tuple(_spread(t, shape) for t in (*terms, late, *copies))


def _spread(term: TimeTerm, shape: tuple[int, ...]) -> TimeTerm:
    if term.seconds.shape == shape:
        return term
    return TimeTerm(
        term.name, np.broadcast_to(term.seconds, shape), term.formula, term.source, term.inputs
    )
