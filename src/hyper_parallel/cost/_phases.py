"""Memory of a rank: parameters, gradients, optimizer states, and the phases of a step with the highest FSDP2 memory.

ZeRO 2 and 3 follow FSDP2: parameters, gradients and optimizer states are shards in the parameter format. ZeRO 0
and 1 follow Megatron: parameters in the compute format, float32 gradients, and a float32 copy and two moments in
the optimizer. Phases of a step:

    loss        all activations, the logits and their gradient; embedding and head gathered, and the last layer early
    last layer  all activations, its gradients of activations; two layers gathered
    next layer  one layer's activations fewer; the gradients of the last one are cast and reduced meanwhile
    end         no activations; embedding and head are one group whose gradients are cast and reduced together

With several microbatches sharded gradients exist from the first on. A pipeline accumulates unsharded gradients and
reduces them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hyper_parallel.cost._candidates import Array
from hyper_parallel.cost._pricing_case import PricingCase

FORMULAS: Final = {
    "parameters": "elements of the stage / P; ZeRO 2, 3: / d, in the parameter format, else in the compute format",
    "gradients": "elements of the stage / P in the parameter format; ZeRO 2, 3: / d",
    "optimizer states": "two AdamW moments in the parameter format, ZeRO 0, 1: and a copy of the parameters; "
    "ZeRO > 0: / d",
    "gathered parameters": "layers (all, when not resharded) and the embedding or head, / P, in the compute format",
    "gradient buffers": "unsharded gradients before and in reduction; of a pipeline those of the whole stage",
    "activations": "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + gathered inputs), T b h / P",
    "work space": "gradients of activations of the current layer or the loss",
    "exchange buffers": "dispatched tokens of one expert layer, sent and received",
    "logits": "T V / P: the logits, float32 probabilities and their gradient",
}
"""Formulas of the memory terms, by name; the phases of a step sum some of them."""
_STATES: Final = ("parameters", "gradients", "optimizer states")
Parts = dict[str, Array]
"""Bytes by term."""


def persistent_bytes(parts: Parts) -> Array:
    """Return bytes that persist or accumulate through the step: parameters, gradients, optimizer states."""
    return np.asarray(sum(parts[name] for name in _STATES))


def transient_bytes(parts: Parts) -> Array:
    """Return bytes that are allocated and freed within the step."""
    return np.asarray(sum(parts[name] for name in FORMULAS if name not in _STATES))


def stage_elements(
    s: PricingCase, layers: Array | None = None, outside: Array | None = None
) -> tuple[Array, Array]:
    """Return parameters of a rank after pp, tp and ep, before data sharding; and its share of them under full sharding.

    Without `layers` and the elements `outside` of them: those of the fullest stage.
    """
    layers = s.layers if layers is None else layers
    dense = s.dense(layers) + s.ends(s.outside if outside is None else outside)
    experts = s.experts(layers)
    return dense + experts, dense / s.shards + experts / s.expert_shards


def state_bytes(s: PricingCase, elements: tuple[Array, Array]) -> Parts:
    """Return bytes of parameters, gradients and optimizer states of a rank with these `stage_elements`.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.
    """
    param, compute = s.param_width, s.machine.width
    whole, sharded = elements
    fully, trained = s.c.zero > 1, s.workload.trained
    master = np.where(fully | (param == compute), 0.0, param)
    return {
        "parameters": np.where(fully, sharded * param, whole * compute),
        "gradients": np.where(fully, sharded, whole) * param * trained,
        "optimizer states": np.where(s.c.zero > 0, sharded, whole)
        * (2.0 * param + master)
        * trained,
    }


def optimizer_traffic(s: PricingCase, elements: tuple[Array, Array]) -> Array:
    """Return bytes that AdamW reads and writes.

    It reads gradient, parameter and two moments and writes three of them; a copy in the compute format is written.
    """
    gradients = np.where(s.c.zero > 0, elements[1], elements[0]) * s.workload.trained
    return gradients * (7.0 * s.param_width + np.where(s.c.zero > 1, 0.0, s.machine.width))


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one mean layer and microbatch."""

    kept: Array  # kept from forward to backward
    freed: Array  # part of `kept` that is freed after the backward of the last layer
    recomputed: Array  # recomputed activations
    exchange: Array  # dispatched tokens
    combine: Array  # outputs of experts, weighted and summed in float32


def _saved_activations(
    s: PricingCase, layer: LayerMemory, layers: Array, flight: Array, sums: Array
) -> Array:
    """Return activations and messages of all microbatches in flight; `sums` are unsharded gradient sums."""
    n, c, width, tokens, piped = s.n, s.c, s.machine.width, s.tokens, s.c.pp > 1
    # Stages keep the received message of every microbatch in flight, plus one incoming and one outgoing message.
    message = np.where(piped, tokens * n.hidden * width / c.tp, 0.0)
    saved = layers * flight * layer.kept
    # If all forwards precede the first backward, the sums replace activations of the first microbatch.
    overlapped = np.maximum(saved - sums, layers * (flight - 1.0) * layer.kept)
    saved = np.where(piped & (flight >= c.accumulation), overlapped, saved)
    return saved + message * (flight + 2.0)


def _work_space(s: PricingCase) -> tuple[Array, Array]:
    """Return gradients of activations in the backward of the last layer, and in that of the next layer."""
    n, c, width, tokens = s.n, s.c, s.machine.width, s.tokens
    working = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    working = working + 2.0 * tokens * width * n.mlp_width * s.over_tp(s.uncut.mlp)
    working = working + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    # Besides the kept probabilities: their gradient and that of the scores, in float32 in unfused operators, without
    # the cast probabilities, which are freed after the product with the values. Activations of the feed-forward part
    # are freed by then.
    unfused = s.machine.stack.eager * n.unfused_scores(s.workload.seq_len)
    unfused = min(2.0 * unfused, 6.0 * n.num_heads * s.workload.seq_len)
    scores = np.where(c.cp > 1, 0.0, 2.0 * s.scores + unfused)
    scores = scores * tokens * s.over_tp(s.uncut.attention)
    freed = np.where(scores > 0.0, tokens * width * n.mlp_saved_width * s.over_tp(s.uncut.mlp), 0.0)
    stream = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    stream = stream + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    working = np.where(scores > 0.0, np.maximum(working, scores + stream - freed), working)
    # Gradients of output, queries, keys and values of unsharded attention, also in the next layer.
    attending = np.where(
        c.tp > 1, tokens * width * s.uncut.attention * s.keeps_whole * n.attention_width, 0.0
    )
    working = np.maximum(working, attending)
    return working, attending + np.maximum(scores - freed, 0.0)


def phases(
    s: PricingCase, layer: LayerMemory, layers: Array, outside: Array, flight: Array, logits: Array
) -> tuple[Parts, ...]:
    """Return the six phases of a stage with `layers` layers and `flight` microbatches in flight.

    `outside` are elements of embedding and head before tensor parallelism, `logits` bytes, 0 without the head.
    """
    n, c, width, trained = s.n, s.c, s.machine.width, s.workload.trained
    wide = s.reduce_width * trained
    tokens, zeros = s.tokens, np.zeros(1)
    states = state_bytes(s, stage_elements(s, layers, outside))
    mean_layer, vocabulary = s.dense() + s.experts(), s.ends(outside)
    dense, experts = s.last_layer
    layer_elements = dense + experts
    piped, several = c.pp > 1, c.accumulation > 1
    copies = np.where(s.copies, width, 0.0)
    root = copies * vocabulary
    # A stage of a pipeline prefetches its first layer for the next microbatch.
    num_gathered = np.where(piped, layers + 1.0, layers)
    gathered_one = copies * np.where(
        c.zero > 2, np.minimum(1.0, num_gathered) * layer_elements, layers * mean_layer
    )
    gathered_two = copies * np.where(
        c.zero > 2, np.minimum(2.0, num_gathered) * layer_elements, layers * mean_layer
    )
    # Experts with ep > 1 are a separate FSDP group. No other group of experts is gathered during its reduction.
    separate_experts = (c.ep > 1) & (c.zero > 2)
    gathered_next = np.where(
        separate_experts, copies * np.minimum(2.0, num_gathered) * dense, gathered_two
    )
    # A pipeline has unsharded gradient sums, if matmuls read copies of the parameters.
    sums = np.where(piped & s.copies, wide * (vocabulary + layers * mean_layer), 0.0)
    gradients = np.where(piped & s.copies, 0.0, states["gradients"])
    earlier = np.where(several, gradients, 0.0)
    outer_gradients = vocabulary / np.where(s.sharded, s.shards, 1.0) * wide
    inner_gradients = np.maximum(gradients - outer_gradients, 0.0)
    # Compute format before reduction, reduction format in it; a group of one rank makes a copy in the latter.
    reduction_width = width * trained + wide
    reduced = np.where(s.sharded, reduction_width, 2.0 * wide) * dense
    reduced = (
        reduced + np.where(s.sharded & (s.expert_shards > 1), reduction_width, 2.0 * wide) * experts
    )
    reduced = np.where(s.copies, reduced, 0.0)
    first_gradients = (
        np.where(s.sharded, dense / s.shards + experts / s.expert_shards, layer_elements)
        * s.param_width
    )
    first_gradients = np.where(
        piped & s.copies, 0.0, np.minimum(first_gradients * trained, inner_gradients)
    )
    # A group of one rank divides its gradients into a copy, which is added to the sums of earlier microbatches.
    lone = several & ~piped & s.copies & s.sharded & (s.expert_shards <= 1)
    copied = np.where(lone, wide * experts, 0.0)
    # The forward of a stage other than the last ends with the last layer's experts.
    forward = np.where(piped, layer.exchange + layer.combine, zeros)
    single = np.where(s.copies, np.where(s.sharded, reduction_width, 3.0 * wide), 0.0)
    # Gradients of head and embedding, and the sum of tied ones, coexist with the last reduction, of layer 0.
    tied = 1.0 if n.head_params == 0 else 0.0
    wide_part = reduced * (wide / np.maximum(reduction_width, 1.0))
    # The gradient of the head, tied or not, is kept until that of the embedding.
    head_gradient = np.where(piped, 0.0, copies * (n.head_weights / s.vocabulary_ranks) * trained)
    # The final norm keeps its input in float32, and its output in both formats.
    final = np.where(
        logits > 0.0, tokens * n.hidden * (4.0 + 2.0 * width) * s.over_tp(s.uncut.stream), 0.0
    )
    saved = _saved_activations(s, layer, layers, flight, sums)
    working, working_next = _work_space(s)
    after_last = np.maximum(saved - layer.freed, 0.0) + layer.recomputed
    at_end = np.where(
        several, gradients, inner_gradients + np.where(s.copies, 0.0, outer_gradients)
    )
    next_buffers = np.where(
        piped, sums + wide * copies / width * layer_elements, head_gradient + reduced
    )
    # If a layer's gradients exceed its activations, the peak is in the last layers of backward: later layers have
    # gradients by then, and the first layer is gathered.
    accumulated = np.maximum(
        earlier, inner_gradients * np.maximum(layers - 2.0, 0.0) / np.maximum(layers, 1.0)
    )
    remaining = layers * (flight - 1.0) * layer.kept + np.minimum(2.0, layers) * layer.kept
    remaining = np.minimum(after_last, remaining + layer.recomputed)
    # At the end, reduced and unreduced gradients of embedding and head coexist.
    reduced_last = np.where(s.sharded & s.copies, wide * vocabulary + outer_gradients, 0.0)
    reduced_last = reduced_last + width * trained * np.minimum(vocabulary, s.ends(s.largest_end))
    end_buffers = np.where(
        s.sharded & s.copies, np.maximum(single * vocabulary, reduced_last), single * vocabulary
    )
    columns = (
        # loss, last layer, next layer, first layers, embedding, end
        ("gradients", earlier, earlier, np.maximum(earlier, first_gradients) + copied, accumulated + copied,
         np.where(piped, earlier, np.maximum(earlier, inner_gradients)), at_end),
        ("gathered parameters", root + gathered_one, root + gathered_two, root + gathered_next,
         root + gathered_next, root,
         np.where(piped, root, 0.0)),
        ("gradient buffers", sums, sums + head_gradient, next_buffers, next_buffers,
         np.where(piped, sums, 2.0 * head_gradient + np.maximum(reduced, wide_part + tied * head_gradient)),
         np.where(piped, sums + np.where(s.copies, wide, 0.0) * vocabulary, end_buffers)),
        ("activations", saved + final, saved + layer.recomputed, after_last, remaining, zeros, zeros),
        ("work space", zeros, working, working_next, working_next, zeros, zeros),
        ("exchange buffers", forward, layer.exchange, layer.exchange, layer.exchange, zeros, zeros),
        ("logits", logits, zeros, zeros, zeros, zeros, zeros),
    )  # fmt: skip
    return tuple(states | {name: each[phase] for name, *each in columns} for phase in range(6))
