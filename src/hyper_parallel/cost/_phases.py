"""What a rank holds: parameters, gradients, optimizer states, and the phases of a step in which FSDP2 is fullest.

ZeRO 2 and 3 as FSDP2 does it: parameters, gradients and optimizer states are shards in the parameter format. ZeRO 0
and 1 as Megatron does it: parameters in the compute format, float32 gradients, and a float32 copy and two moments in
the optimizer. Phases of a step:

    loss        all activations, the logits and their gradient; embedding and head gathered, and the last layer early
    last layer  all activations, its gradients of activations; two layers gathered
    next layer  one layer's activations fewer; the gradients of the last one are cast and reduced meanwhile
    end         nothing of activations; embedding and head are one group whose gradients are cast and reduced together

With several microbatches sharded gradients are there from the first on. A pipeline adds up unsharded gradients and
reduces them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hyper_parallel.cost._candidates import Array
from hyper_parallel.cost._setting import Setting

FORMULAS: Final = {
    "parameters": "elements of the stage / P; ZeRO 2, 3: / d, in the parameter format, else in the compute format",
    "gradients": "elements of the stage / P in the parameter format; ZeRO 2, 3: / d",
    "optimizer states": "two AdamW moments in the parameter format, ZeRO 0, 1: and a copy of the parameters; "
    "ZeRO > 0: / d",
    "gathered parameters": "layers (all, when not resharded) and the embedding or head, / P, in the compute format",
    "gradient buffers": "unsharded gradients before and in reduction; of a pipeline those of the whole stage",
    "activations": "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + gathered inputs), T b h / P",
    "work space": "gradients of activations of the layer or the loss being worked on",
    "exchange buffers": "dispatched tokens of one expert layer, sent and received",
    "logits": "T V / P: the logits, float32 probabilities and their gradient",
}
"""What a device holds at one time or another, by the names of its terms; the phases of a step add up some of it."""
_STATES: Final = ("parameters", "gradients", "optimizer states")
Parts = dict[str, Array]
"""Bytes of each."""


def staying(parts: Parts) -> Array:
    """What lives through the step, or is added up in it."""
    return np.asarray(sum(parts[name] for name in _STATES))


def moving(parts: Parts) -> Array:
    """What comes and goes."""
    return np.asarray(sum(parts[name] for name in FORMULAS if name not in _STATES))


def stage_elements(
    s: Setting, layers: Array | None = None, outside: Array | None = None
) -> tuple[Array, Array]:
    """Parameters of a rank after pp, tp and ep, before data sharding; and its share of them under full sharding.

    Without `layers` and the elements `outside` of them: those of the fullest stage.
    """
    layers = s.layers if layers is None else layers
    dense = s.dense(layers) + s.ends(s.outside if outside is None else outside)
    experts = s.experts(layers)
    return dense + experts, dense / s.shards + experts / s.expert_shards


def state_bytes(s: Setting, elements: tuple[Array, Array]) -> Parts:
    """Parameters, gradients and optimizer states of a rank with so many `stage_elements`.

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


def moved_bytes(s: Setting, elements: tuple[Array, Array]) -> Array:
    """Bytes that AdamW moves.

    It reads gradient, parameter and two moments and writes three of them; a copy in the compute format is written.
    """
    mine = np.where(s.c.zero > 0, elements[1], elements[0]) * s.workload.trained
    return mine * (7.0 * s.param_width + np.where(s.c.zero > 1, 0.0, s.machine.width))


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one mean layer and microbatch."""

    kept: Array  # from forward to backward
    freed: Array  # of that what goes when the backward of the last layer is done
    worked: Array  # what recomputation makes again
    exchange: Array  # dispatched tokens
    combine: Array  # outputs of experts that forward weights and sums in float32


def phases(
    s: Setting, layer: LayerMemory, layers: Array, outside: Array, flight: Array, logits: Array
) -> tuple[Parts, ...]:
    """Return the six phases of a stage with so many layers and microbatches in flight.

    `outside` are elements of embedding and head before tensor parallelism, `logits` bytes, 0 without the head.
    """
    n, c, width, trained = s.n, s.c, s.machine.width, s.workload.trained
    wide = s.reduce_width * trained
    tokens, none = s.tokens, np.zeros(1)
    states = state_bytes(s, stage_elements(s, layers, outside))
    mean, vocabulary = s.dense() + s.experts(), s.ends(outside)
    dense, experts = s.last_layer
    one = dense + experts
    piped, several = c.pp > 1, c.accumulation > 1
    copies = np.where(s.copies, width, 0.0)
    root = copies * vocabulary
    # A pipeline's stage gathers its first layer for the next microbatch early.
    most = np.where(piped, layers + 1.0, layers)
    coming = copies * np.where(c.zero > 2, np.minimum(1.0, most) * one, layers * mean)
    two = copies * np.where(c.zero > 2, np.minimum(2.0, most) * one, layers * mean)
    # Experts of expert parallelism are an FSDP group of their own: while its gradients are reduced no other group of
    # experts is gathered.
    apart = (c.ep > 1) & (c.zero > 2)
    beside = np.where(apart, copies * np.minimum(2.0, most) * dense, two)
    # Unsharded sums of a pipeline's gradients; without copies the gradients are what they are.
    sums = np.where(piped & s.copies, wide * (vocabulary + layers * mean), 0.0)
    mine = np.where(piped & s.copies, 0.0, states["gradients"])
    before = np.where(several, mine, 0.0)
    outer = vocabulary / np.where(s.sharded, s.shards, 1.0) * wide
    inner = np.maximum(mine - outer, 0.0)
    # Before reduction in the compute format, in reduction wide; a group of one rank makes a wide copy of it all.
    both = width * trained + wide
    reduced = np.where(s.sharded, both, 2.0 * wide) * dense
    reduced = reduced + np.where(s.sharded & (s.expert_shards > 1), both, 2.0 * wide) * experts
    reduced = np.where(s.copies, reduced, 0.0)
    first = np.where(s.sharded, dense / s.shards + experts / s.expert_shards, one) * s.param_width
    first = np.where(piped & s.copies, 0.0, np.minimum(first * trained, inner))
    # A group of one rank divides its gradients into a copy, which is added to the sums of earlier microbatches.
    lone = several & ~piped & s.copies & s.sharded & (s.expert_shards <= 1)
    added = np.where(lone, wide * experts, 0.0)
    # A stage that is not the last ends its forward in the last layer's experts.
    forward = np.where(piped, layer.exchange + layer.combine, none)
    single = np.where(s.copies, np.where(s.sharded, both, 3.0 * wide), 0.0)
    # Beside the last reduction, of layer 0, come the gradients of head and embedding, and of tied ones their sum.
    tied = 1.0 if n.head_params == 0 else 0.0
    wide_part = reduced * (wide / np.maximum(both, 1.0))
    # The gradient of the head, tied or not, waits for that of the embedding.
    head = np.where(piped, 0.0, copies * (n.head_weights / s.vocabulary_ranks) * trained)
    # The final norm keeps its input wide, and both formats of its output.
    final = np.where(
        logits > 0.0, tokens * n.hidden * (4.0 + 2.0 * width) * s.over_tp(s.uncut.stream), 0.0
    )
    # Stages keep what they receive of every microbatch in flight, and hold a message in and one out.
    message = np.where(piped, tokens * n.hidden * width / c.tp, 0.0)
    held = layers * flight * layer.kept
    # Where every forward comes before the first backward, the sums come as the first microbatch goes.
    fewer = np.maximum(held - sums, layers * (flight - 1.0) * layer.kept)
    held = np.where(piped & (flight >= c.accumulation), fewer, held)
    saved = held + message * (flight + 2.0)
    working = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    working = working + 2.0 * tokens * width * n.mlp_width * s.over_tp(s.uncut.mlp)
    working = working + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    # Beside the probabilities that are kept: their gradient and that of the scores, in float32 where operators make
    # them, less the probabilities cast for the product with the values, which is done. The activations of the
    # feed-forward part behind them are gone by then.
    unfused = s.machine.stack.eager * n.unfused_scores(s.workload.seq_len)
    unfused = min(2.0 * unfused, 6.0 * n.num_heads * s.workload.seq_len)
    scores = np.where(c.cp > 1, 0.0, 2.0 * s.scores + unfused)
    scores = scores * tokens * s.over_tp(s.uncut.attention)
    gone = np.where(scores > 0.0, tokens * width * n.mlp_saved_width * s.over_tp(s.uncut.mlp), 0.0)
    stream = 2.0 * tokens * width * n.hidden * s.over_tp(s.uncut.stream)
    stream = stream + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    working = np.where(scores > 0.0, np.maximum(working, scores + stream - gone), working)
    # Gradients of the output, queries, keys and values of attention that stays whole, in the next layer too.
    attending = np.where(
        c.tp > 1, tokens * width * s.uncut.attention * s.keeps_whole * n.attention_width, 0.0
    )
    working = np.maximum(working, attending)
    left = np.maximum(saved - layer.freed, 0.0) + layer.worked
    at_end = np.where(several, mine, inner + np.where(s.copies, 0.0, outer))
    next_buffers = np.where(piped, sums + wide * copies / width * one, head + reduced)
    # Where a layer's gradients are more than its activations the last layers of backward are fullest: those behind
    # have their gradients then, and the first layer is gathered.
    grown = np.maximum(before, inner * np.maximum(layers - 2.0, 0.0) / np.maximum(layers, 1.0))
    remaining = layers * (flight - 1.0) * layer.kept + np.minimum(2.0, layers) * layer.kept
    remaining = np.minimum(left, remaining + layer.worked)
    working_next = attending + np.maximum(scores - gone, 0.0)
    # At the end the reduced gradients of embedding and head come beside what they were reduced from.
    reduced_last = np.where(s.sharded & s.copies, wide * vocabulary + outer, 0.0)
    reduced_last = reduced_last + width * trained * np.minimum(vocabulary, s.ends(s.largest_end))
    last = np.where(
        s.sharded & s.copies, np.maximum(single * vocabulary, reduced_last), single * vocabulary
    )
    columns = (
        # loss, last layer, next layer, first layers, embedding, end
        ("gradients", before, before, np.maximum(before, first) + added, grown + added,
         np.where(piped, before, np.maximum(before, inner)), at_end),
        ("gathered parameters", root + coming, root + two, root + beside, root + beside, root,
         np.where(piped, root, 0.0)),
        ("gradient buffers", sums, sums + head, next_buffers, next_buffers,
         np.where(piped, sums, 2.0 * head + np.maximum(reduced, wide_part + tied * head)),
         np.where(piped, sums + np.where(s.copies, wide, 0.0) * vocabulary, last)),
        ("activations", saved + final, saved + layer.worked, left, remaining, none, none),
        ("work space", none, working, working_next, working_next, none, none),
        ("exchange buffers", forward, layer.exchange, layer.exchange, layer.exchange, none, none),
        ("logits", logits, none, none, none, none, none),
    )  # fmt: skip
    return tuple(states | {name: each[phase] for name, *each in columns} for phase in range(6))
