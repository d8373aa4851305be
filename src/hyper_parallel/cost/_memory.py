"""Peak memory of the fullest device as one term per cause, each an array over candidates; and inputs of offload.

With ZeRO-2 and ZeRO-3, matmuls read copies of the parameters in the compute format. ZeRO-3 gathers the copies of a few
layers at a time, ZeRO-2 those of all layers. With `phased` on the stack's card, the peak of ZeRO-2 and ZeRO-3 is that
of the fullest phase of a step, see `_phases`. Otherwise the maxima of all terms are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._offload_copies import OffloadDemand
from hyper_parallel.cost._phases import (
    FORMULAS,
    LayerMemory,
    Parts,
    persistent_bytes,
    phases,
    stage_elements,
    state_bytes,
    transient_bytes,
)
from hyper_parallel.cost._pricing_case import PricingCase, positions
from hyper_parallel.cost.candidates import (
    FULL_EXCEPT_LAST,
    SCHEDULES,
    Array,
    Candidates,
    in_flight,
    shape_of,
    split_layers_closed_form,
)
from hyper_parallel.ir import GRADIENT_PIECES, MemoryTerm

_TIE = 1e-9  # tolerance for rounding, in layers
# Number of last layers of a stage that are not recomputed: their recomputed activations would add to the peak
_NOT_RECOMPUTED = 2.0


@dataclass(frozen=True, slots=True)
class RankStages:
    """Pipeline stages of one rank."""

    numbers: ModelNumbers  # sizes of a model with only the layers of the rank
    first: bool  # whether the rank has the first stage, with the embedding
    last: bool  # whether the rank has the last stage, with the head


@dataclass(frozen=True, slots=True)
class SpaceTerm:
    """Term of the predicted peak memory, named by its cause, as an array over candidates."""

    name: str
    bytes: Array
    formula: str

    def term_of(self, index: int) -> MemoryTerm:
        """Return the term of one candidate, in whole bytes of device memory."""
        return MemoryTerm(self.name, "hbm", int(np.ceil(self.bytes[index])), self.formula)


def activation_bytes(s: PricingCase) -> Array:
    """Return the bytes that one average layer and microbatch saves for backward, without full recomputation.

    A dense layer saves b T ((4h + 2q + 2k + 3f) / P + 2h (1 - 1/P)) bytes, with letters as in `_layer` and query width
    q. The second summand, gathered inputs, is 0 if inputs are re-gathered without full recomputation. Experts,
    statistics of fused attention and tensors of unfused operators are added. Dropout saves two masks of h bytes per
    token. Without sequence parallelism, every rank saves both masks and 4h elements per token unsharded. Without fused
    attention, scores take (2b + 1) A S / P bytes per token, for A heads and S tokens per sequence; 0 with selective
    recomputation. With `eager` on the stack's card, the bytes are scaled to a measurement of the model, if any.

    Source: Korthikanti et al. 2022, section 4 and equation 2, generalised to narrow keys and gated widths.
    """
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    dense = n.saved_elements * width + stack.dropout * 2.0 * n.hidden
    uncut, whole = n.whole_bytes(s.uncut, width, stack.eager), 0.0
    if stack.eager and n.measured is not None:
        uncut = min(n.whole_share * n.predicted_bytes * width / 2.0, dense + n.eager_bytes(width))
    if not stack.sequence_parallel and not s.uncut.stream:
        # Inputs of both norms and both column matmuls, and a dropout mask per block.
        whole = 4.0 * n.hidden * width + stack.dropout * 2.0 * n.hidden
    # Backward does not need the experts' outputs, which element-wise kernels also write.
    experts = (n.expert_saved_width - n.experts_per_token * n.hidden) * width * stack.imbalance
    gathered = 2.0 * n.hidden * width * (1.0 - 1.0 / c.tp)
    kept_share = stack.keep_gathered * np.where(c.recompute > 1, 1.0, 1.0 - c.regather)
    extra = kept_share * stack.sequence_parallel * gathered * (1.0 - s.uncut.stream * s.keeps_whole)
    total = (dense - whole - uncut + stack.eager * n.eager_bytes(width)) / c.tp + whole
    total = total + uncut * s.over_tp(1.0)
    if stack.eager:
        total = (total + n.latent_bytes(width)) * n.measured_ratio
        if n.measured is not None:  # measurements exclude experts
            whole_copies = s.over_tp(s.uncut.stream) - n.measured_ratio / c.tp
            total = total + n.expert_copies * width * whole_copies
    total = total + extra + experts * s.over_tp(s.uncut.stream)
    if not stack.flash:
        # Selective recomputation drops the scores.
        per_token = (2.0 * width + 1.0) * n.num_heads * s.workload.seq_len
        scores = per_token * s.over_tp(s.uncut.attention)
        total = total + np.where(c.recompute == 1, 0.0, scores)
    if stack.eager:
        eager_bytes = n.repeated_elements(s.workload.seq_len) * width + s.scores
        total = total + np.where(c.cp > 1, 0.0, eager_bytes * s.over_tp(s.uncut.attention))
    # Log-sum-exp of fused attention, float32.
    statistics = 4.0 * n.num_heads * s.over_tp(s.uncut.attention) if stack.flash else 0.0
    if stack.eager:
        scores = n.unfused_scores(s.workload.seq_len) * s.over_tp(s.uncut.attention)
        total = total + np.where(c.cp > 1, 0.0, scores)
    return s.tokens * stack.kept * (total + statistics)


def kept_bytes(s: PricingCase, one_layer: Array | None = None) -> Array:
    """Return the bytes that one average layer and microbatch keeps for backward, given the candidate's recomputation.

    `one_layer` is the result of `activation_bytes`, if already computed.
    """
    if one_layer is None:
        one_layer = activation_bytes(s)
    c, stack = s.c, s.machine.stack
    boundary = s.n.hidden * s.machine.width * s.tokens
    boundary = boundary * (s.over_tp(s.uncut.stream) if stack.sequence_parallel else 1.0)
    selective = np.where(c.recompute == 1, stack.selective_kept, 1.0)
    return np.where(c.recompute > 1, boundary, selective * one_layer)


def memory_terms(
    s: PricingCase, num_recomputed: int | None = None, stages: Sequence[RankStages] = ()
) -> tuple[SpaceTerm, ...]:
    """Return all terms of the peak memory of the fullest device; their sum is the predicted peak.

    With `phased` on the stack's card and ZeRO-2 or ZeRO-3, the terms are those of the fullest phase of a step.
    Otherwise the terms are assumed to have their maxima at the same time.

    Args:
        s: Pricing case.
        num_recomputed: Number of layers per rank that `recompute` applies to; None: all. The bytes of every phase are
            interpolated between no and all layers, so another phase may become the fullest.
        stages: Stages of every pipeline rank, in order; (): equal layers, with `phased` split over the stages by FLOPs.
    """
    c, card = s.c, s.machine.card
    if num_recomputed is None:
        parts = memory_parts(s, stages)
    else:
        share = num_recomputed / s.layers
        partial = (c.recompute > 1) & (num_recomputed <= s.layers - _NOT_RECOMPUTED * c.vpp)
        kinds = np.where(partial, FULL_EXCEPT_LAST, c.recompute)
        plain = memory_parts(s.with_columns(recompute=0.0 * c.recompute), stages)
        recomputed = memory_parts(s.with_columns(recompute=kinds), stages)
        states = ("parameters", "optimizer states")
        parts = [
            {k: v if k in states else (1.0 - share) * v + share * b[k] for k, v in a.items()}
            for a, b in zip(plain, recomputed, strict=True)
        ]
    _, phase = fullest_phase(total_bytes(parts, s), shape_of(c))
    at_peak = {name: select_phase([part[name] for part in parts], phase) for name in FORMULAS}
    terms = [SpaceTerm(name, at_peak[name], formula) for name, formula in FORMULAS.items()]
    context = np.full(phase.shape, card.context_bytes)
    return (
        *terms,
        SpaceTerm("device context", context, "driver context, communicators and workspaces"),
        SpaceTerm(
            "fragmentation", card.fragmentation * transient_bytes(at_peak),
            f"{card.fragmentation:.0%} of transient bytes: all except states and context",
        ),
    )  # fmt: skip


def min_recompute_layers(s: PricingCase, kind: int, capacity_bytes: float) -> tuple[Array, Array]:
    """Return the least number (1 or more) of recomputed layers per rank with which the step fits, and its peak bytes.

    The bytes of every phase are linear in the number of recomputed layers, and all phases must fit. If the step does
    not fit with any number, the result is the number of all layers.

    Args:
        s: Pricing case, columns of one length; `recompute` is not read.
        kind: Kind of recomputation, an index into `RECOMPUTE`.
        capacity_bytes: Maximum peak bytes.
    """
    c, layers = s.c, s.layers
    kinds = (0, kind, FULL_EXCEPT_LAST) if kind > 1 else (0, kind)
    end = s.with_columns(recompute=np.array(kinds, dtype=np.float64)[:, None])
    totals = [np.broadcast_to(t, shape_of(end.c)) for t in total_bytes(memory_parts(end), end)]
    plain, whole, *except_last = zip(*totals, strict=True)
    needed, peak = layers, np.max(whole, axis=0)
    limits = (layers - 1.0, layers - _NOT_RECOMPUTED * c.vpp)
    for alternative, limit in zip((whole, *except_last), limits, strict=False):
        num_layers, largest = np.ones(1), np.full(1, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for a, b in zip(plain, alternative, strict=True):
                fit = np.ceil((a - capacity_bytes) / (a - b) * layers - _TIE)
                fit = np.where(a > b, fit, np.inf)
                num_layers = np.maximum(num_layers, np.where(a <= capacity_bytes, 1.0, fit))
            if kind > 1 and alternative is whole:
                num_layers = np.maximum(num_layers, layers - _NOT_RECOMPUTED * c.vpp + 1.0)
            for a, b in zip(plain, alternative, strict=True):
                largest = np.fmax(largest, a - num_layers / layers * (a - b))
        fits = num_layers <= limit
        needed, peak = np.where(fits, num_layers, needed), np.where(fits, largest, peak)
    return needed, peak


def with_choices(s: PricingCase, choices: Sequence[tuple[int, int]]) -> PricingCase:
    """Return a case with each candidate repeated for every (`regather`, `recompute`) pair in `choices`.

    Columns of the result broadcast to [choices, candidates]; columns of `s` must have one length.
    """
    # Columns that no choice changes are computed once per row.
    rows = {n: np.atleast_2d(getattr(s.c, n)) for n in Candidates.__slots__}
    regather, recompute = np.array(choices, dtype=np.float64).T[:, :, None]
    return s.with_columns(**{**rows, "regather": regather, "recompute": recompute})


def memory_key(columns: Mapping[str, Array], seq_len: int, whole_stream: bool = False) -> list[Array]:
    """Return columns that, with `regather` and `recompute`, determine the peak bytes of a candidate.

    `whole_stream` states whether tensor parallelism replicates the residual stream, see `Uncut.stream`.
    """
    c = columns
    named = (
        "pp", "vpp", "schedule", "dp_shard", "cp", "microbatch", "accumulation", "zero", "offload",
    )  # fmt: skip
    several = [c["ep"], *(c.get(name, np.ones_like(c["pp"])) for name in ("dp_replicate", "halves"))]
    several += [c["tp_y"]] if whole_stream else []
    counts = [c["tp_x"] * c["tp_y"], c["ep"] * c["etp"], *(np.minimum(x, 2.0) for x in several)]
    padded = positions(c["cp"], c.get("cp_ulysses", 1.0), seq_len)
    return [*(c[name] for name in named if name in c), *counts, padded]


def fullest_phase(totals: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, NDArray[np.intp]]:
    """Return, per candidate, the maximum of `totals` over the phases, and the index of the first phase with it."""
    shape = np.broadcast_shapes(totals[0].shape, shape)
    best, phase = np.broadcast_to(totals[0], shape), np.zeros(shape, dtype=np.intp)
    for index, total in enumerate(totals[1:], 1):
        better = total > best
        best, phase = np.where(better, total, best), np.where(better, index, phase)
    return best, phase


def select_phase(values: Sequence[Array], phase: NDArray[np.intp]) -> Array:
    """Return, per candidate, `values[phase]`: the value in the phase with that index."""
    parts = np.broadcast_to(values[0], phase.shape)
    for index, value in enumerate(values[1:], 1):
        parts = np.where(phase == index, value, parts)
    return parts


def total_bytes(parts: Sequence[Parts], s: PricingCase) -> list[Array]:
    """Return the total bytes of each entry of `memory_parts`; -inf for candidates to which the entry does not apply."""
    card = s.machine.card
    totals = [transient_bytes(p) * (1.0 + card.fragmentation) + persistent_bytes(p) + card.context_bytes for p in parts]
    if len(parts) > 1:
        sharded = (s.c.zero > 1) & s.machine.stack.is_own_runtime
        if not sharded.all():
            first, *phased_totals = totals
            totals = [np.where(sharded, -np.inf, first)]
            totals += [np.where(sharded, total, -np.inf) for total in phased_totals]
    return totals


def memory_parts(s: PricingCase, stages: Sequence[RankStages] = ()) -> list[Parts]:
    """Return the bytes by term at each time that may have the peak.

    The first entry has the maxima of all terms, for candidates without phases; it is omitted if all candidates have
    phases. If the stack is `phased`, the phases follow: those of every pipeline rank in `stages` (see `memory_terms`),
    or of the first and the last stage if `stages` is empty.
    """
    c, layer = s.c, _layer_memory(s)
    parts: list[Parts] = []
    if s.machine.stack.is_own_runtime and bool((c.zero > 1).any()):
        parts = _rank_phases(s, stages) if stages else _critical_stages(s, layer)
        if bool((c.zero > 1).all()):
            return parts
    logits, saved = s.logits, s.layers * in_flight(c) * layer.saved
    # In a pipeline the first stage has the most activations, the last one the logits: take the fuller stage.
    last_saved = s.layers * layer.saved * in_flight(c, c.pp - 1)
    head_fuller = (c.pp > 1) & (last_saved + logits > saved)
    saved = np.where(head_fuller, last_saved, saved)
    logits = np.where((c.pp > 1) & ~head_fuller, 0.0, logits)
    return [_summed_parts(s, layer, saved, logits), *parts]


def _layer_memory(s: PricingCase) -> LayerMemory:
    n, c = s.n, s.c
    one_layer = activation_bytes(s)
    saved = kept_bytes(s, one_layer)
    exchange = combine = np.zeros(1)
    if n.experts:
        routed = n.routed_experts_per_token * n.hidden * s.machine.width
        routed_bytes = 2.0 * s.tokens / c.tp * (routed * s.machine.stack.imbalance)
        exchange = np.where(c.ep > 1, routed_bytes, 0.0)
        # Rows of one layer in float32, before and after weighting, plus the experts' outputs and their cast.
        combine = routed_bytes * (4.0 / s.machine.width + 1.0) * n.wide_combine
    scale = s.tokens * s.machine.width / 2.0 * s.over_tp(n.whole_share)
    fully = (c.recompute > 1) & (c.recompute < FULL_EXCEPT_LAST)
    recomputed = np.where(fully, one_layer + scale * n.fullest_bytes, 0.0)
    freed = np.where(c.recompute < FULL_EXCEPT_LAST, saved, one_layer)
    whole = (c.recompute < 1) | (c.recompute >= FULL_EXCEPT_LAST)
    freed = np.maximum(freed + np.where(whole & (c.pp <= 1), scale * n.last_bytes, 0.0), 0.0)
    return LayerMemory(saved, freed, recomputed, exchange, combine)


def _rank_phases(s: PricingCase, stages: Sequence[RankStages]) -> list[Parts]:
    """Return the bytes by term in the phases of every pipeline rank, with the sizes of its own layers."""
    n, parts = s.n, list[Parts]()
    for rank, stage in enumerate(stages):
        own = replace(s, n=stage.numbers)
        outside = n.embedding_weights * stage.first
        outside += (n.head_params if stage.first else n.head_weights) * stage.last
        logits = own.logits if stage.last else np.zeros(1)
        layers, elements = np.full(1, float(stage.numbers.layers)), np.full(1, float(outside))
        parts += phases(own, _layer_memory(own), layers, elements, in_flight(s.c, rank), logits)
    return parts


def _critical_stages(s: PricingCase, layer: LayerMemory) -> list[Parts]:
    """Return the bytes by term in the phases of the first and the last stage, which are assumed to have the peak.

    The first stage has the embedding and the most microbatches in flight, the last one the head.
    """
    n, c, single_stage = s.n, s.c, s.c.pp <= 1
    flops = 6.0 * (n.attention_weights + n.mlp_weights + n.active_expert_weights)
    flops = flops + 3.0 * n.attention_flops(s.workload.seq_len)
    even, head = bool(s.machine.stack.even_stages), np.full(1, 6.0 * n.head_weights)
    cut = split_layers_closed_form(c, n.layers, np.full(1, flops), head, even)
    # Every stage has at least one layer.
    last = np.where(single_stage, n.layers, np.maximum(cut.last, 1.0))
    first = np.ceil((n.layers - last) / np.maximum(c.pp - 1.0, 1.0))
    first = np.where(single_stage, n.layers, first)
    all_elements = float(n.embedding_weights + n.head_params)
    embedding = np.where(single_stage, all_elements, n.embedding_weights)
    output = np.where(single_stage, all_elements, n.head_weights)
    parts = phases(s, layer, first, embedding, in_flight(c), np.where(single_stage, s.logits, 0.0))
    if single_stage.all():  # the last stage is the first
        return list(parts)
    num_in_flight = in_flight(c, c.pp - 1)
    return [*parts, *phases(s, layer, last, output, num_in_flight, s.logits)]


def _summed_parts(s: PricingCase, layer: LayerMemory, saved: Array, logits: Array) -> Parts:
    """Return the maximum bytes of every term over the step."""
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    elements, mean_layer, vocabulary = stage_elements(s), s.dense() + s.experts(), s.ends(s.outside)
    states = state_bytes(s, elements)
    if stack.vocabulary_groups > 1:
        larger = max(n.embedding_weights, n.head_weights)
        vocabulary = np.minimum(vocabulary, larger / s.vocabulary_ranks)
    # Half-batches are in two layers while a third one is prefetched.
    most_gathered = np.where(c.halves > 1, 3.0, 2.0)
    gathered_layers = np.where(c.zero > 2, np.minimum(most_gathered, s.layers), s.layers)
    reduced = np.where(s.sharded, s.reduce_width + width, width)
    reduced, trained = reduced * s.workload.trained, s.workload.trained
    second_copy = trained * stack.gradient_copy_bytes * np.where(c.zero < 2, elements[0], 0.0)
    return states | {
        "gradients": states["gradients"] + second_copy,
        "gathered parameters": np.where(s.copies, (gathered_layers * mean_layer + vocabulary) * width, 0.0),
        "gradient buffers": np.where(s.copies, np.maximum(mean_layer, vocabulary) * reduced, 0.0),
        "activations": saved + layer.recomputed,
        # The backward of one layer has the gradient of a gathered input.
        "work space": np.where(c.tp > 1, s.tokens * n.hidden * width, 0.0),
        "exchange buffers": layer.exchange,
        "logits": logits,
    }


def offloaded_bytes(s: PricingCase, choices: Sequence[tuple[int, int]]) -> Array:
    """Return the peak bytes on the device, [choices, candidates]; with column `offload` at 1, after offload.

    After offload, the peak is at most the capacity of the device if enough bytes can be evicted. Otherwise it is the
    least possible peak.

    Args:
        s: Pricing case, columns of one length; `regather` and `recompute` are not read.
        choices: Pairs (`regather`, `recompute`), the first axis of the result.
    """
    s = with_choices(s, choices)
    parts = memory_parts(s)
    peaks, _ = fullest_phase(total_bytes(parts, s), shape_of(s.c))
    return resident_bytes(peaks, s, parts)


def resident_bytes(peaks: Array, s: PricingCase, parts: Sequence[Parts] | None = None) -> Array:
    """Return the part of the predicted `peaks` that stays on the device after offload, in bytes.

    `parts` is the result of `memory_parts`, if already computed.
    """
    if not (s.c.offload > 0).any():
        return peaks
    infeasible = offload_demand(s, parts).missing_bytes
    least = s.machine.memory_bytes + np.maximum(infeasible, 0.0)
    return np.where(s.c.offload > 0, np.minimum(peaks, least), peaks)


def offload_demand(s: PricingCase, parts: Sequence[Parts] | None = None) -> OffloadDemand:
    """Return the inputs of the cost of offload; all fields in seconds are 0, for the caller to fill in.

    A plan may evict the states of all layers except one, and all transient bytes except the operands of the largest
    matmul. Fragmentation counts as transient bytes, because a plan assigns an address to every byte.
    """
    c, machine, layers, shape = s.c, s.machine, s.layers, shape_of(s.c)
    parts = memory_parts(s) if parts is None else parts
    floor, frag = _operands(s), 1.0 + machine.card.fragmentation
    transient = [np.maximum(transient_bytes(p) * frag - floor, 0.0) for p in parts]
    totals = total_bytes(parts, s)
    need, full = _excess(parts, totals, s)
    # The persistent bytes must also fit in phases without activations.
    persistent = [total - passing for total, passing in zip(totals, transient, strict=True)]
    end, empty = _excess(parts, persistent, s, ending=True)
    offloading = c.offload > 0
    staged = _staged(s) + np.zeros(shape)
    flight = np.broadcast_to(in_flight(c), shape)
    movable_share = np.broadcast_to(1.0 - 1.0 / np.maximum(layers, 1.0), shape)
    # Only states that exist in both phases count, because evicting others does not help in both.
    optimizer, parameters, gradients = (
        movable_share * np.minimum(*(select_phase([p[name] for p in parts], phase) for phase in (full, empty)))
        for name in ("optimizer states", "parameters", "gradients")
    )
    peaks = select_phase(transient, full)
    passing, products = _recomputable_bytes(s)
    recomputable = np.where(c.recompute > 1, 0.0, layers * flight) * float(machine.may_recompute)
    zeros, ones = np.zeros(shape), np.ones(shape)
    reachable = machine.host_bytes if machine.host_bytes_s > 0 else 0.0
    alternates = (flight <= 1.0) | (c.schedule == SCHEDULES.index("gpipe"))
    return OffloadDemand(
        need_bytes=np.where(offloading, need + staged, 0.0), end_bytes=np.where(offloading, end + staged, 0.0),
        staged_bytes=staged, host_bytes=ones * reachable, optimizer_bytes=optimizer, parameters_bytes=parameters,
        gradients_bytes=gradients, activations_bytes=peaks, passing_bytes=np.minimum(passing * recomputable, peaks),
        products_bytes=np.minimum(products * recomputable, peaks), passing_s=zeros, products_s=zeros, forward_s=zeros,
        backward_s=zeros, update_s=zeros, microbatches=c.accumulation * ones, in_flight=flight * ones,
        alternating=np.where(alternates, 1.0, zeros), link_bytes_s=ones * max(machine.host_bytes_s, 1.0),
    )  # fmt: skip


def _operands(s: PricingCase) -> Array:
    """Return the bytes of the weight and the inputs of the largest matmul."""
    n = s.n
    matrix = max([float(n.head_weights), *(float(m.inputs * m.outputs) for m in n.matmuls)])
    return (matrix + s.tokens * n.hidden) / s.c.tp * s.machine.width


def _staged(s: PricingCase) -> Array:
    """Return the bytes of the staging buffer: the largest result that no kernel can write to a planned address.

    This result is a piece of the embedding's unreduced gradient with its inputs, or the output of attention.
    """
    piece = (s.n.embedding_weights + s.tokens * s.n.hidden) / GRADIENT_PIECES
    return np.maximum(piece, s.tokens * s.n.v_width) / s.c.tp * s.machine.width


def _recomputable_bytes(s: PricingCase) -> tuple[Array, Array]:
    """Return the recomputable bytes of one layer and microbatch: results of (element-wise kernels, matmuls).

    Element-wise kernels write the outputs of both norms and of the gate, and the copies of unfused kernels. Matmuls
    write queries, keys, values, the inputs of the gate, and the residual between the blocks. Outputs of experts count
    as copies of unfused kernels; fused kernels do not save them.
    """
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    scale = s.tokens / c.tp * stack.kept
    scale = scale * np.where(c.recompute == 1, stack.selective_kept, 1.0)
    routed = n.experts_per_token * n.expert_width
    passing = (2.0 * n.hidden + n.mlp_width + routed) * width + stack.eager * n.eager_bytes(width)
    outputs = n.experts_per_token * n.hidden
    wide = n.mlp_saved_width - n.mlp_width + np.maximum(n.expert_saved_width - outputs - routed, 0.0)
    products = (n.hidden + n.q_width + 2.0 * n.k_width + wide) * width
    return scale * passing, scale * products


def _excess(
    parts: Sequence[Parts], totals: Sequence[Array], s: PricingCase, ending: bool = False
) -> tuple[Array, NDArray[np.intp]]:
    """Return, per candidate, the bytes beyond the capacity in its fullest phase, and the index of that phase.

    The bytes are negative if that phase fits. Only phases with activations count; with `ending`, only phases without
    activations. Without any such phase, the bytes are 0.
    """
    excess = [
        np.where((phase_parts["activations"] > 0.0) != ending, total - s.machine.memory_bytes, -np.inf)
        for phase_parts, total in zip(parts, totals, strict=True)
    ]
    largest, phase = fullest_phase(excess, shape_of(s.c))
    return np.where(np.isfinite(largest), largest, 0.0), phase
