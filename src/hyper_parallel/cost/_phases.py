"""Memory of a rank in the phases of an FSDP2 step: parameters, gradients, optimizer states, activations and buffers.

ZeRO 2 and 3 follow FSDP2: parameters, gradients and optimizer states are shards in the parameter format. ZeRO 0
and 1 follow Megatron: parameters are in the compute format, gradients and two moments in the parameter format, and the
optimizer has a copy of the parameters if the formats differ. The peak of ZeRO 2 and 3 is in one of these phases, or
in one of two between the last two (see `phases`):

    loss        all activations, logits and their gradient; embedding and head gathered, and the prefetched last layer
    last layer  all activations, activation gradients of the last layer; two layers gathered
    next layer  activations without those of the last layer, whose gradients are cast and reduced meanwhile
    end         no activations; embedding and head are one group whose gradients are cast and reduced together

With several microbatches, sharded gradients exist from the end of the first one on. A pipeline accumulates unsharded
gradients and reduces them at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.candidates import Array

FORMULAS: Final = {
    "parameters": "elements of the stage / P; ZeRO 2, 3: / d, in the parameter format, else in the compute format",
    "gradients": "elements of the stage / P in the parameter format; ZeRO 2, 3: / d",
    "optimizer states": "two AdamW moments in the parameter format, ZeRO 0, 1: and a copy of the parameters; "
    "ZeRO > 0: / d",
    "gathered parameters": "layers (all, when not resharded) and the embedding or head, / P, in the compute format",
    "gradient buffers": "unsharded gradients before and in reduction; of a pipeline those of the whole stage",
    "activations": "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + gathered inputs); "
    "recomputed layers: T b h / P",
    "work space": "gradients of activations of the current layer or the loss",
    "exchange buffers": "dispatched tokens of one expert layer, sent and received",
    "logits": "T V / P: the logits, float32 probabilities and their gradient",
}
"""Formula of each memory term by name."""
_STATES: Final = ("parameters", "gradients", "optimizer states")
Parts = dict[str, Array]
"""Dict from name of a memory term to its bytes, as arrays over candidates."""
_Columns = tuple[Array, ...]
"""Bytes of one term in each phase: loss, last layer, next layer, first layers, embedding, end."""


def persistent_bytes(parts: Parts) -> Array:
    """Return the bytes of parameters, gradients and optimizer states."""
    return np.asarray(sum(parts[name] for name in _STATES))


def transient_bytes(parts: Parts) -> Array:
    """Return the bytes that are allocated and freed within the step: all terms except `persistent_bytes`."""
    return np.asarray(sum(parts[name] for name in FORMULAS if name not in _STATES))


def stage_elements(s: PricingCase, layers: Array | None = None, outside: Array | None = None) -> tuple[Array, Array]:
    """Return the numbers of parameters per rank: (before, after) FSDP shards them over data-parallel ranks.

    Args:
        s: Pricing case.
        layers: Number of layers of a pipeline stage; None: that of the fullest stage.
        outside: Parameters of embedding and head in the stage, before any sharding; None: those of the fullest stage.
    """
    layers = s.layers if layers is None else layers
    dense = s.dense(layers) + s.ends(s.outside if outside is None else outside)
    experts = s.experts(layers)
    return dense + experts, dense / s.shards + experts / s.expert_shards


def state_bytes(s: PricingCase, elements: tuple[Array, Array]) -> Parts:
    """Return the bytes of parameters, gradients and optimizer states; `elements` is the result of `stage_elements`.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.
    """
    param, compute = s.param_width, s.machine.width
    whole, sharded = elements
    fully, trained = s.c.zero > 1, s.workload.trained
    state_width = 2.0 * param + np.where(fully | (param == compute), 0.0, param)
    return {
        "parameters": np.where(fully, sharded * param, whole * compute),
        "gradients": np.where(fully, sharded, whole) * param * trained,
        "optimizer states": np.where(s.c.zero > 0, sharded, whole) * state_width * trained,
    }


def optimizer_traffic(s: PricingCase, elements: tuple[Array, Array]) -> Array:
    """Return the bytes that an AdamW update reads and writes; `elements` is the result of `stage_elements`.

    The update reads gradient, parameter and two moments, and writes parameter and moments. With ZeRO 0 and 1, it also
    writes a copy of the parameter in the compute format.
    """
    gradients = np.where(s.c.zero > 0, elements[1], elements[0]) * s.workload.trained
    return gradients * (7.0 * s.param_width + np.where(s.c.zero > 1, 0.0, s.machine.width))


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of activations and buffers of one average layer and microbatch, by kind."""

    saved: Array  # saved from forward to backward
    freed: Array  # saved by the last layer, and freed after its backward
    recomputed: Array  # recomputed activations
    exchange: Array  # tokens dispatched to experts
    combine: Array  # outputs of experts, weighted and summed in float32


def _saved_activations(s: PricingCase, layer: LayerMemory, layers: Array, flight: Array, sums: Array) -> Array:
    """Return the bytes of saved activations and pipeline messages of all microbatches in flight.

    `flight` is the number of microbatches in flight, and `sums` are the bytes of unsharded gradient sums.
    """
    n, c, width, tokens, piped = s.n, s.c, s.machine.width, s.tokens, s.c.pp > 1
    # Stages keep the received message of every microbatch in flight, plus one incoming and one outgoing message.
    message = np.where(piped, tokens * n.hidden * width / c.tp, 0.0)
    saved = layers * flight * layer.saved
    # If all forwards precede the first backward, gradient sums reuse memory of the first microbatch's activations.
    overlapped = np.maximum(saved - sums, layers * (flight - 1.0) * layer.saved)
    saved = np.where(piped & (flight >= c.accumulation), overlapped, saved)
    return saved + message * (flight + 2.0)


def _work_space(s: PricingCase) -> tuple[Array, Array]:
    """Return the bytes of activation gradients as (backward of the last layer, attention of the layer before it)."""
    n, c, width, tokens = s.n, s.c, s.machine.width, s.tokens
    working = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    working = working + 2.0 * tokens * width * n.mlp_width * s.over_tp(s.uncut.mlp)
    if n.every_expert_bytes:
        # The last layers have experts, so a mean over all layers would be too small.
        visited = n.routed_experts_per_token * n.expert_width
        working = working + 2.0 * tokens * width * visited * s.over_tp(s.uncut.stream)
    working = working + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    # The gradients of probabilities and scores exist in addition to the kept probabilities. Unfused operators have them
    # in float32. The cast probabilities and the activations of the feed-forward part are freed by then.
    unfused = s.machine.stack.eager * n.unfused_scores(s.workload.seq_len)
    unfused = min(2.0 * unfused, 6.0 * n.num_heads * s.workload.seq_len)
    scores = np.where(c.cp > 1, 0.0, 2.0 * s.scores + unfused)
    scores = scores * tokens * s.over_tp(s.uncut.attention)
    freed = np.where(scores > 0.0, tokens * width * n.mlp_saved_width * s.over_tp(s.uncut.mlp), 0.0)
    stream = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    stream = stream + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    working = np.where(scores > 0.0, np.maximum(working, scores + stream - freed), working)
    # Gradients of output, queries, keys and values of unsharded attention, also in the next layer.
    attending = np.where(c.tp > 1, tokens * width * s.uncut.attention * s.keeps_whole * n.attention_width, 0.0)
    working = np.maximum(working, attending)
    return working, attending + np.maximum(scores - freed, 0.0)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Values of one pipeline stage that several memory terms use, as arrays over candidates."""

    s: PricingCase
    layers: Array
    piped: NDArray[np.bool_]  # whether a candidate has several stages
    several: NDArray[np.bool_]  # whether a step has several microbatches
    states: Parts  # parameters, gradients and optimizer states
    mean_layer: Array  # parameters of an average layer
    dense: Array  # parameters, without experts, of the layer gathered and reduced at the peak
    experts: Array  # parameters of the experts of that layer
    layer_elements: Array  # `dense` + `experts`
    vocabulary: Array  # parameters of embedding and head
    copies: Array  # bytes per element of the copied parameters that matmuls read; 0 without copies
    wide: float  # bytes of a gradient in reduction; 0 for frozen parameters
    # bytes of a gradient before reduction, in the compute format, plus `wide`
    reduction_width: float
    sums: Array  # bytes of unsharded gradient sums of a pipeline, if matmuls read copies of the parameters
    outer_gradients: Array  # bytes of the gradients of embedding and head after their reduction

    @classmethod
    def of(cls, s: PricingCase, layers: Array, outside: Array) -> _Stage:
        """Return a stage with `layers` layers and `outside` parameters of embedding and head, before any sharding."""
        width, trained = s.machine.width, s.workload.trained
        wide, piped = s.reduce_width * trained, s.c.pp > 1
        mean_layer, vocabulary = s.dense() + s.experts(), s.ends(outside)
        dense, experts = s.last_layer
        sums = np.where(piped & s.copies, wide * (vocabulary + layers * mean_layer), 0.0)
        return cls(
            s=s,
            layers=layers,
            piped=piped,
            several=s.c.accumulation > 1,
            states=state_bytes(s, stage_elements(s, layers, outside)),
            mean_layer=mean_layer,
            dense=dense,
            experts=experts,
            layer_elements=dense + experts,
            vocabulary=vocabulary,
            copies=np.where(s.copies, width, 0.0),
            wide=wide,
            reduction_width=width * trained + wide,
            sums=sums,
            outer_gradients=vocabulary / np.where(s.sharded, s.shards, 1.0) * wide,
        )


def phases(
    s: PricingCase, layer: LayerMemory, layers: Array, outside: Array, flight: Array, logits: Array
) -> tuple[Parts, ...]:
    """Return the bytes by memory term in each of six phases of a pipeline stage, in the order of the module docstring.

    Between `next layer` and `end` are two more phases: the backward of the first layers, and of the embedding. The
    stage has `layers` layers, `flight` microbatches in flight, and `outside` parameters of embedding and head before
    any sharding. `logits` are the bytes of logits, 0 without the head.
    """
    stage, zeros = _Stage.of(s, layers, outside), np.zeros(1)
    working, working_next = _work_space(s)
    # The forward of a stage other than the last ends with the last layer's experts.
    forward = np.where(stage.piped, layer.exchange + layer.combine, zeros)
    columns: dict[str, _Columns] = {
        "gradients": _gradients(stage),
        "gathered parameters": _gathered_parameters(stage),
        "gradient buffers": _gradient_buffers(stage),
        "activations": _activations(stage, layer, flight, logits),
        "work space": (zeros, working, working_next, working_next, zeros, zeros),
        "exchange buffers": (forward, layer.exchange, layer.exchange, layer.exchange, zeros, zeros),
        "logits": (logits, zeros, zeros, zeros, zeros, zeros),
    }
    return tuple(stage.states | {name: column[phase] for name, column in columns.items()} for phase in range(6))


def _gathered_parameters(stage: _Stage) -> _Columns:
    """Return the bytes of copied parameters: embedding and head, and one to three layers (all layers if not freed).

    With half-batches, the two halves may be in adjacent layers, so three layers are gathered at once.
    """
    c, copies = stage.s.c, stage.copies
    root = copies * stage.vocabulary
    # A stage of a pipeline prefetches its first layer for the next microbatch.
    num_gathered = np.where(stage.piped, stage.layers + 1.0, stage.layers)
    resident = stage.layers * stage.mean_layer
    one, two = (
        copies * np.where(c.zero > 2, np.minimum(n, num_gathered) * stage.layer_elements, resident) for n in (1.0, 2.0)
    )
    # Experts with ep > 1 are a separate FSDP group. No other group of experts is gathered during its reduction.
    separate_experts = (c.ep > 1) & (c.zero > 2)
    following = np.where(separate_experts, copies * np.minimum(2.0, num_gathered) * stage.dense, two)
    spans_layers = (c.zero > 2) & (c.halves > 1)
    third = np.clip(stage.layers - 2.0, 0.0, 1.0) * stage.layer_elements
    following = following + np.where(spans_layers, copies * third, 0.0)
    end = np.where(stage.piped, root, 0.0)
    return root + one, root + two, root + following, root + following, root, end


def _gradients(stage: _Stage) -> _Columns:
    """Return the bytes of reduced gradients: of earlier microbatches, and of layers whose backward is done."""
    s, piped, several = stage.s, stage.piped, stage.several
    dense, experts = stage.dense, stage.experts
    gradients = np.where(piped & s.copies, 0.0, stage.states["gradients"])
    earlier = np.where(several, gradients, 0.0)
    inner = np.maximum(gradients - stage.outer_gradients, 0.0)
    own_elements = dense / s.shards + experts / s.expert_shards
    first = np.where(s.sharded, own_elements, stage.layer_elements) * s.param_width
    first = np.where(piped & s.copies, 0.0, np.minimum(first * s.workload.trained, inner))
    # A group of one rank divides its gradients into a copy, which is added to the sums of earlier microbatches.
    lone = several & ~piped & s.copies & s.sharded & (s.expert_shards <= 1)
    copied = np.where(lone, stage.wide * experts, 0.0)
    # If a layer's gradients exceed its activations, the peak is in the last layers of backward: later layers have
    # gradients by then, and the first layer is gathered.
    accumulated = np.maximum(earlier, inner * np.maximum(stage.layers - 2.0, 0.0) / np.maximum(stage.layers, 1.0))
    embedding = np.where(piped, earlier, np.maximum(earlier, inner))
    end = np.where(several, gradients, inner + np.where(s.copies, 0.0, stage.outer_gradients))
    next_layer = np.maximum(earlier, first) + copied
    return earlier, earlier, next_layer, accumulated + copied, embedding, end


def _gradient_buffers(stage: _Stage) -> _Columns:
    """Return the bytes of unsharded gradients before and during their reduction."""
    s, n, piped, sums, wide = stage.s, stage.s.n, stage.piped, stage.sums, stage.wide
    dense, experts = stage.dense, stage.experts
    width = stage.reduction_width
    # A group of one rank makes a copy in the reduction format.
    reduced = np.where(s.sharded, width, 2.0 * wide) * dense
    reduced = reduced + np.where(s.sharded & (s.expert_shards > 1), width, 2.0 * wide) * experts
    reduced = np.where(s.copies, reduced, 0.0)
    # Gradients of head and embedding, and their sum if tied, coexist with the last reduction, of layer 0.
    tied = 1.0 if n.head_params == 0 else 0.0
    wide_part = reduced * (wide / np.maximum(width, 1.0))
    # The gradient of the head, tied or not, is kept until that of the embedding.
    head = np.where(piped, 0.0, stage.copies * (n.head_weights / s.vocabulary_ranks) * s.workload.trained)
    accumulating = wide * stage.copies / s.machine.width * stage.layer_elements
    next_layer = np.where(piped, sums + accumulating, head + reduced)
    embedding = np.where(piped, sums, 2.0 * head + np.maximum(reduced, wide_part + tied * head))
    end = np.where(piped, sums + np.where(s.copies, wide, 0.0) * stage.vocabulary, _end_buffers(stage))
    return sums, sums + head, next_layer, next_layer, embedding, end


def _end_buffers(stage: _Stage) -> Array:
    """Return the bytes of embedding and head gradients at the end of a step without pipeline parallelism."""
    s, wide, vocabulary = stage.s, stage.wide, stage.vocabulary
    trained_width = s.machine.width * s.workload.trained
    single = np.where(s.copies, np.where(s.sharded, stage.reduction_width, 3.0 * wide), 0.0)
    reduced = np.where(s.sharded & s.copies, wide * vocabulary + stage.outer_gradients, 0.0)
    larger = float(max(s.n.embedding_weights, s.n.head_params))
    reduced = reduced + trained_width * np.minimum(vocabulary, s.ends(larger))
    single = single * vocabulary
    return np.where(s.sharded & s.copies, np.maximum(single, reduced), single)


def _activations(stage: _Stage, layer: LayerMemory, flight: Array, logits: Array) -> _Columns:
    s, layers, zeros = stage.s, stage.layers, np.zeros(1)
    # The final norm keeps its input in float32, and its output in both formats.
    final_bytes = s.tokens * s.n.hidden * (4.0 + 2.0 * s.machine.width) * s.over_tp(s.uncut.stream)
    final = np.where(logits > 0.0, final_bytes, 0.0)
    saved = _saved_activations(s, layer, layers, flight, stage.sums)
    after_last = np.maximum(saved - layer.freed, 0.0) + layer.recomputed
    remaining = layers * (flight - 1.0) * layer.saved + np.minimum(2.0, layers) * layer.saved
    remaining = np.minimum(after_last, remaining + layer.recomputed)
    return saved + final, saved + layer.recomputed, after_last, remaining, zeros, zeros
