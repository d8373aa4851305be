"""Step time: one term per cause, each an array over candidates with its formula, inputs and source.

Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from hyper_parallel.cost._budget import away_from, copy_load
from hyper_parallel.cost._candidates import Array, Candidates, shape_of
from hyper_parallel.cost._communication import exposed, hop_seconds, step_tail, tensor_hops
from hyper_parallel.cost._copies import COPIES, FORMULA, SOURCE, put_away
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import SpaceTerm, memory_terms
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._phases import moved_bytes, stage_elements
from hyper_parallel.cost._setting import Setting
from hyper_parallel.cost._step import BlockPrices, Step
from hyper_parallel.cost.pipeline import bubble_seconds
from hyper_parallel.ir import AXES, CostTerm, MemoryTerm, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

_FORMULAS: Final = {
    "matmul": "m l 6 T W / P / (peak * share), stretched by (1 + s/M)(1 + s/N)(1 + s/K) for each matmul M x N x K",
    "attention": "m l 3.5 T A / P / reached FLOP/s, A causal FLOPs per token forward; the share falls with short "
    "sequences and narrow heads",
    "element-wise": "m l passes * saved bytes / memory bandwidth",
    "casts": "m l bytes per cast element * T (inputs + output gradients of the matmuls) / P / memory bandwidth",
    "head and loss": "m (6 T h V / P / (peak * share) + 24 bytes per logit / memory bandwidth)",
    "recompute": "m l what recomputation redoes of the forward",
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
    """One cause of step time over all candidates."""

    name: str
    seconds: Array
    source: str
    inputs: Inputs = field(default_factory=dict)

    @property
    def formula(self) -> str:
        """The formula in words and symbols."""
        return _FORMULAS[self.name]

    def at(self, index: int) -> CostTerm:
        """The term of one candidate."""
        shape = self.seconds.shape
        inputs = {k: float(np.broadcast_to(v, shape)[index]) for k, v in self.inputs.items()}
        return CostTerm(self.name, float(self.seconds[index]), self.formula, inputs, self.source)


def time_terms(s: Setting, blocks: BlockPrices | None = None) -> tuple[TimeTerm, ...]:
    """All terms of the step time; their sum is the prediction."""
    step, stack, c = Step.of(s, blocks), s.machine.stack, s.c
    terms = [*paced_terms(s, step), *rest_terms(s, step)]
    total = sum((t.seconds for t in terms), np.zeros(1))
    noise = stack.straggle * np.log2(np.maximum(c.world_size, 1.0))
    devices: Inputs = {"devices": c.world_size}
    terms.append(TimeTerm("stragglers", noise * total, stack.source("straggle"), devices))
    if (c.offload > 0).any():
        optimizer = next(t.seconds for t in terms if t.name == "optimizer")
        load = copy_load(s, step, optimizer)
        terms.append(TimeTerm(COPIES, load.best()[1], SOURCE, load.inputs()))
    named, shape = {t.name: t for t in terms}, shape_of(c)
    ordered = (named[name] for name in _FORMULAS if name in named)
    return tuple(replace(t, seconds=np.broadcast_to(t.seconds, shape)) for t in ordered)


def step_seconds(
    s: Setting, parts: Literal["all", "pace"] = "all", blocks: BlockPrices | None = None
) -> Array:
    """The sum of the time terms.

    Args:
        s: What is priced, columns of one length.
        parts: `pace` leaves out what the sharing of states adds and what comes once per step.
        blocks: Prices of their blocks when they are known.
    """
    terms = time_terms(s, blocks) if parts == "all" else paced_terms(s, Step.of(s, blocks))
    return np.broadcast_to(sum((t.seconds for t in terms), np.zeros(1)), shape_of(s.c))


def paced_terms(s: Setting, step: Step) -> list[TimeTerm]:
    """The terms of microbatches that go through the stages, without what the sharing of states adds."""
    n, c, machine, m, stages = s.n, s.c, s.machine, s.c.accumulation, step.stages
    card, stack, dtype = machine.card, machine.stack, machine.matmul_dtype
    work, comm = step.prices.work, step.prices.comm
    layers = stages.layers
    each = m * layers
    weights = n.attention_weights + n.mlp_weights + n.active_expert_weights
    of: Inputs = {"T": s.tokens, "m": m, "l": layers, "P": c.tp}
    bubble = sends = hop = np.zeros(1)
    if (c.pp > 1).any():
        traffic = (comm.tp + step.ep + comm.cp) / 2.0
        bubble = bubble_seconds(
            c, stages.others + (c.pp - 1.0) * comm.outside, work.forward + work.launch / 3.0 + traffic,
            work.backward + work.recompute + work.launch / 1.5 + traffic, work.matmul, machine.pace,
        )  # fmt: skip
        hop = hop_seconds(s)
        sends = 2.0 * (m * c.vpp + c.pp - 1.0) * hop * (1.0 - stack.overlap_pp)
    return [
        TimeTerm(
            "matmul", each * 3.0 * work.matmul, card.source(f"matmul.{dtype}"),
            {**of, "W": weights, "peak_flops": machine.matmul_peak, "s": machine.saturation,
             "share": card.share("matmul", dtype)},
        ),
        TimeTerm(
            "attention", each * (work.attention + work.attention_backward),
            f"Dao 2023 (FlashAttention-2), section 3; {card.source('attention.bfloat16')}",
            {**of, "A": n.attention_flops(s.workload.seq_len), "reached_flops": machine.attention_flops,
             "flash": stack.flash},
        ),
        TimeTerm(
            "element-wise", each * (work.elementwise + work.elementwise_backward),
            f"{stack.source('passes')}; {card.source('elementwise')}",
            {**of, "saved_bytes": work.saved_bytes, "passes": stack.passes, "memory_bytes_s": machine.passing_bytes_s},
        ),
        TimeTerm(
            "casts", each * (work.quantize + work.quantize_backward), stack.source(f"quantize_bytes.{dtype}"),
            {**of, "bytes": stack.quantize_bytes.get(dtype, 0.0)},
        ),
        TimeTerm(
            "head and loss", m * step.prices.head * stages.head, card.source("matmul.bfloat16"),
            {**of, "V": float(n.vocab)},
        ),
        TimeTerm(
            "recompute", each * work.recompute, f"Chen et al. 2016, section 3; {stack.source('selective_matmul')}", of
        ),
        TimeTerm(
            "kernel launches", each * work.launch, f"{card.source('kernel_s')}; {stack.source('moe_host_s')}",
            {**of, "launches": stack.kernels_forward + stack.kernels_backward, "kernel_s": card.kernel_s},
        ),
        TimeTerm(
            "tp communication", each * comm.tp,
            f"Korthikanti et al. 2022, section 4.2.2; {stack.source('overlap_tp')}",
            {**of, "x": c.tp_x, "y": c.tp_y, "layer_s": comm.tp_whole, "hidden_share": stack.overlap_tp},
        ),
        TimeTerm(
            "cp communication", each * comm.cp,
            f"Liu et al. 2023 (ring attention), section 3; {stack.source('overlap_cp')}",
            {**of, "cp": c.cp, "ulysses": c.cp_ulysses, "layer_s": comm.cp_whole},
        ),
        TimeTerm(
            "ep communication", each * step.ep,
            f"Lepikhin et al. 2020 (GShard), section 3; {stack.source('overlap_ep')}",
            {**of, "ep": c.ep, "exchange_s": comm.ep / (4.0 + 2.0 * s.full), "hidden_share": step.ep_hidden},
        ),
        TimeTerm(
            "pipeline bubble", bubble, "Narayanan et al. 2021, section 2.2; Qi et al. 2023 (zero bubble)",
            {"p": c.pp, "v": c.vpp, "schedule": c.schedule, "microbatch_s": stages.slowest},
        ),
        TimeTerm(
            "pipeline sends", sends, f"Narayanan et al. 2021, section 4.1; {stack.source('overlap_pp')}",
            {"m": m, "p": c.pp, "v": c.vpp, "send_s": hop},
        ),
    ]  # fmt: skip


def rest_terms(s: Setting, step: Step) -> list[TimeTerm]:
    """The terms of sharing states, of what comes once per step, and of host work."""
    c, machine, m, layers = s.c, s.machine, s.c.accumulation, step.stages.layers
    card, stack = machine.card, machine.stack
    work, comm, overlap = step.prices.work, step.prices.comm, stack.overlap_dp
    once, last = step_tail(s), work.backward * layers + step.prices.head
    tail = exposed(once["scatter_s"], last, overlap) + once["late_s"]
    tail = tail + exposed(once["gather_s"], last / 2.0, overlap)
    tail = tail + exposed(once["first_s"], work.forward * layers, overlap) + tensor_hops(s)
    norm = machine.ring(*s.places.group(AXES)).seconds(np.full(1, 4.0))
    elements = stage_elements(s)
    moved = moved_bytes(s, elements)
    added = (m > 1) & ((c.zero < 2) | ((c.pp > 1) & (s.shards > 1)))
    sums = m * 8.0 * card.saturation * elements[0] / machine.stream_bytes_s
    return [
        TimeTerm(
            "host work of axes", machine.crowd * _host_work(s, layers), stack.source("host_s.dp_shard"),
            {"T": s.tokens, "m": m, "l": layers, "P": c.tp},
        ),
        TimeTerm(
            "gradient accumulation", np.where(added, sums, 0.0), card.source("saturation"),
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
            {"r": c.dp_replicate, "d": s.shards, **once},
        ),
        TimeTerm("gradient norm", 2.0 * norm, "latency of the tiers", {"ranks": c.world_size}),
        TimeTerm(
            "optimizer", moved / machine.stream_bytes_s, card.source("stream"),
            {"bytes": moved, "memory_bytes_s": machine.stream_bytes_s},
        ),
        TimeTerm("every step", np.full(1, stack.step_s), stack.source("step_s")),
    ]  # fmt: skip


def _host_work(s: Setting, layers: Array) -> Array:
    """Core seconds of a step that a rank spends on starting what the axes do, beyond the time on the links."""
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


@dataclass(frozen=True, slots=True)
class Scores:
    """Prices of many candidates."""

    time: tuple[TimeTerm, ...]  # terms of the step time
    memory: tuple[SpaceTerm, ...]  # terms of the peak memory, offloaded or not
    step_s: Array  # sum of the time terms
    memory_bytes: Array  # their bytes on the device: their sum, less what is away

    def cost_at(self, index: int) -> tuple[CostTerm, ...]:
        """Time terms of one candidate, those that are zero left out."""
        return tuple(t.at(index) for t in self.time if t.seconds[index] > 0.0 or _moves(t, index))

    def memory_at(self, index: int) -> tuple[MemoryTerm, ...]:
        """Memory terms of one candidate, those that are zero left out."""
        held = tuple(t.at(index) for t in self.memory if t.bytes[index] > 0.0)
        return put_away(held, self.cost_at(index))


def _moves(term: TimeTerm, index: int) -> bool:
    """Whether a term is that of copies, and there are any."""
    if term.name != COPIES:
        return False
    return any(np.ravel(term.inputs[n])[index] > 0.0 for n in ("need_bytes", "end_bytes"))


def score(s: Setting) -> Scores:
    """Price candidates, columns of one length or an open grid; nothing is checked for legality here."""
    time, memory = time_terms(s), memory_terms(s)
    held = away_from(sum((t.bytes for t in memory), np.zeros(1)), s)
    return Scores(time, memory, sum((t.seconds for t in time), np.zeros(1)), held)


def step_cost(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> tuple[CostTerm, ...]:
    """Terms of the step time of one strategy; their sum is the prediction.

    Args:
        model: The model.
        supernode: The machine.
        strategy: Degrees and choices, legal for the model.
        workload: Resolved batch numbers (`Workload.resolve`).
    """
    return _single(model, supernode, strategy, workload).cost_at(0)


def peak_memory(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> tuple[MemoryTerm, ...]:
    """Terms of the peak memory of the fullest device; arguments as for `step_cost`."""
    return _single(model, supernode, strategy, workload).memory_at(0)


def _single(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> Scores:
    machine = Machine.of(supernode, workload.compute_dtype)
    candidate = Candidates.of(strategy, workload)
    return score(Setting(ModelNumbers.of(model), machine, workload, candidate))
