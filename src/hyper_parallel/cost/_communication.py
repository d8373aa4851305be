"""Communication seconds of candidate strategies: the collectives that `shard` lists, on the links of a machine.

A `shard.Boundary` is a collective with its elements, its group and its number of calls. Unless a docstring says
otherwise, results are seconds on one rank for one decoder layer and one microbatch. Exposed communication is not hidden
by computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.cost._layer import Compute
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._pricing_case import PricingCase, collapse
from hyper_parallel.cost.candidates import SHAPES, Array
from hyper_parallel.ir import Purpose
from hyper_parallel.model import AttentionSpec
from hyper_parallel.shard import (
    BlockWidths,
    Boundary,
    Projection,
    block_boundaries,
    context_boundaries,
    expert_boundaries,
    pipeline_boundaries,
    sharing_boundaries,
)

_MIRROR = {"reduce_scatter": "all_gather"}
"""Dict from kind of collective to the kind with the same duration that is priced instead."""
_PARAMETERS = (Purpose.FSDP_PARAMETERS, Purpose.EXPERT_PARAMETERS)
_GRADIENTS = (Purpose.FSDP_GRADIENTS, Purpose.EXPERT_GRADIENTS)


@dataclass(frozen=True, slots=True)
class BlockCommunication:
    """Seconds of tensor- and context-parallel collectives of one layer and microbatch on one rank."""

    tp: Array  # exposed part of `tp_whole`
    tp_whole: Array  # gathers and scatters of tensor parallelism
    cp: Array  # exposed part of `cp_whole`
    cp_whole: Array  # key-value ring or all-gather of context parallelism, and all-to-alls of Ulysses


@dataclass(frozen=True, slots=True)
class Communication(BlockCommunication):
    """Seconds of all collectives of one layer and microbatch on one rank.

    With pipeline parallelism, and with ZeRO 0 and 1, gradients are reduced once per step (`step_tail`). Then
    `fsdp_scatter` and `outside` are 0, and so is `fsdp_gather` unless parameters are freed after forward.
    """

    ep: Array  # all dispatches and combines of experts; in the result of `with_overlap`, their exposed part
    # exposed parameter gathers and gradient scatters per microbatch
    fsdp: Array
    fsdp_gather: Array  # one all-gather of the layer's parameters
    fsdp_scatter: Array  # one reduce-scatter of the layer's gradients
    # FSDP gathers and scatters of embedding and head per microbatch; never hidden
    outside: Array


def exposed(traffic: Array, work: Array, overlap: float) -> Array:
    """Return the seconds of communication that computation does not hide.

    Computation hides at most the fraction `overlap` of the `traffic` seconds, and at most `work` seconds.
    """
    return np.maximum((1.0 - overlap) * traffic, traffic - work)


def call_seconds(s: PricingCase, b: Boundary) -> Array:
    """Return the seconds of one call of a collective; results are cached in `s`.

    A send to the next of g ranks takes the time of one of the g - 1 rounds of an all-gather.
    """
    formats = {"reduce": s.reduce_width, "statistic": max(4.0, s.machine.width)}
    width, kind = formats.get(b.format, s.machine.width), _MIRROR.get(b.kind, b.kind)
    key = (kind, b.axes, width, id(b.elements))
    if key not in s.priced_calls:
        s.priced_calls[key] = b.elements, _call_seconds(s, b, kind, b.elements * width)
    return s.priced_calls[key][1]


def _call_seconds(s: PricingCase, b: Boundary, kind: str, size: Array) -> Array:
    """Return the seconds of one call; `size`: bytes of the full tensor, or of one rank for all_to_all and send_recv."""
    machine, places = s.machine, s.places
    if kind == "all_to_all" and b.axes == ("ep",):
        copies = s.n.routed_experts_per_token if machine.stack.ep_dedup else 1.0
        token = s.n.hidden * machine.width
        return machine.all_to_all_seconds(size, *places.experts["ep"], copies=copies, message=token)
    if kind == "all_to_all" and b.axes == ("cp",):
        return machine.all_to_all_seconds(size, (s.c.cp_ulysses, places.axis("cp")[1]))
    ring = s.ring(b.axes)
    if kind == "send_recv":
        rounds: Array = np.maximum(b.ranks - 1.0, 1.0)
        return ring.seconds(size * b.ranks) / rounds
    return (2.0 if kind == "all_reduce" else 1.0) * ring.seconds(size)


def _pass_seconds(s: PricingCase, rows: Iterable[Boundary], name: str, purposes: Collection[Purpose]) -> Array:
    """Return the seconds of the collectives for `purposes`; `name`: field of `Boundary` with the number of calls."""
    calls = ((b, getattr(b, name)) for b in rows if b.purpose in purposes)
    return sum((number * call_seconds(s, b) for b, number in calls if np.any(number)), np.zeros(1))


def block_communication(s: PricingCase, work: Compute) -> BlockCommunication:
    """Return the seconds of tensor- and context-parallel collectives of one average layer."""
    tp = tensor_seconds(s)
    cp_whole, cp = _context(s, work)
    hidden = exposed(tp, 3.0 * work.matmul, s.machine.stack.overlap_tp)
    return BlockCommunication(hidden, tp, cp, cp_whole)


def layer_communication(s: PricingCase, work: Compute, blocks: BlockCommunication) -> Communication:
    """Return the communication seconds of one average layer per microbatch and, in `outside`, of embedding and head.

    Pipeline sends (`hop_seconds`) and collectives once per step (`step_tail`) are not included.
    """
    stack, rows, ends = s.machine.stack, [*_layer_boundaries(s, 1.0)], [*_end_boundaries(s, False)]
    gather = _pass_seconds(s, rows, "forward", _PARAMETERS)
    regather = _pass_seconds(s, rows, "backward", _PARAMETERS)
    scatter = _pass_seconds(s, rows, "backward", _GRADIENTS)
    fsdp = exposed(gather, work.forward, stack.overlap_dp)
    fsdp = fsdp + exposed(regather + scatter, work.backward, stack.overlap_dp)
    outside = _pass_seconds(s, ends, "forward", _PARAMETERS)
    outside = outside + _pass_seconds(s, ends, "backward", _GRADIENTS)
    inside = (blocks.tp, blocks.tp_whole, blocks.cp, blocks.cp_whole)
    return Communication(*inside, expert_seconds(s), fsdp, gather, scatter, outside)


def forward_communication(s: PricingCase) -> tuple[Array, Array, Array, Array]:
    """Return the seconds of the collectives of a forward without overlap, except context and pipeline parallelism.

    Returns:
        Four arrays of seconds. For an average layer: tensor-parallel collectives, collectives of experts, and the
        all-gather of parameters. For embedding and head: the all-gather of parameters. Collectives once per step are
        excluded.
    """
    layer, ends = (
        _pass_seconds(s, rows, "forward", _PARAMETERS) for rows in (_layer_boundaries(s, 1.0), _end_boundaries(s, True))
    )
    return tensor_seconds(s, 0.0), expert_seconds(s, 0.0), layer, ends


def tensor_seconds(s: PricingCase, backward: float = 1.0) -> Array:
    """Return the seconds of the tensor-parallel collectives of an average layer, forward and backward.

    1-D tensor parallelism has 8 collectives per layer, or 10 if the candidate re-gathers inputs in backward. Full
    recomputation adds the collectives of the recomputed layer. Experts that process only the tokens of their rank have
    no tensor-parallel collectives. `backward` is a factor on the collectives of backward; 0: forward only.
    """
    n, c, regathers = s.n, s.c, (1.0 - s.full) * collapse(s.c.regather)
    both_2d = (c.attention_shape == SHAPES.index("2d")) & (c.mlp_shape == SHAPES.index("2d"))
    flat = c.tp_y <= 1
    total: Array = np.zeros(1)
    if (c.tp <= 1).all():
        return total
    local_experts = (c.ep > 1) | s.whole_experts  # experts process the tokens of their rank
    attention_layers = 1.0 - s.uncut.attention * s.keeps_whole
    mlp_layers = 1.0 - s.uncut.mlp * s.keeps_whole - np.where(local_experts, n.moe_share, 0.0)
    for block, column, layers in (
        (_attention_widths(n), c.attention_shape, attention_layers),
        (_mlp_widths(n), c.mlp_shape, mlp_layers),
    ):
        for index, shape in enumerate(SHAPES):
            used = flat | (column == index) if shape == "1d" else ~flat & (column == index)
            if not used.any():
                continue
            seconds: Array = np.zeros(1)
            # The residual stream is sharded over y if all matrices are in 2-D blocks; those of experts are not.
            for b in block_boundaries(
                block, shape, s.cut, token_scatter=c.attention_tokens, hidden_cut=both_2d & (not n.experts)
            ):  # fmt: skip
                backward_calls = b.backward + s.full * b.recomputed + regathers * b.regathered
                times = b.forward + backward * backward_calls
                if np.any(times):
                    seconds = seconds + times * call_seconds(s, b)
            total = total + layers * np.where(used, seconds, 0.0)
    # A group of one rank costs nothing.
    return np.where(c.tp > 1, total, 0.0)


def _attention_widths(n: ModelNumbers) -> BlockWidths:
    keys = Projection(2.0 * n.k_width, 2.0 * n.k_width * n.hidden, keys=True)
    out = Projection(n.v_width, n.v_width * n.hidden)
    query = Projection(n.q_width, n.attention_weights - keys.weights - out.weights)
    return BlockWidths(n.hidden, (query, keys), (out,), n.num_kv_heads)


def _mlp_widths(n: ModelNumbers) -> BlockWidths:
    """Return the widths of an average layer's feed-forward part: dense MLP, shared experts, and chosen experts.

    The numbers of weights include all routed experts.
    """
    wide = [m for m in n.matmuls if m.part != "attention"]
    columns = sum(m.outputs * m.count for m in wide if not m.row)
    inputs = sum(m.inputs * m.count for m in wide if m.row)
    out = Projection(inputs, inputs * n.hidden)
    weights = n.mlp_weights + n.expert_weights - out.weights
    return BlockWidths(n.hidden, (Projection(columns, weights),), (out,))


def _context(s: PricingCase, work: Compute) -> tuple[Array, Array]:
    """Return (total, exposed) seconds of the context-parallel collectives of an average layer.

    Only the key-value ring can hide behind attention.
    """
    n, full = s.n, s.full
    ring_forward = ring_backward = unhidden = np.zeros(1)
    if (s.c.cp <= 1).all():
        return unhidden, unhidden
    kinds: dict[AttentionSpec, float] = {}
    for count, attention in n.attentions:  # sliding windows are ignored: no round is skipped
        kind = replace(attention, window=None, kind="mla" if attention.kind == "mla" else "full")
        kinds[kind] = kinds.get(kind, 0.0) + count / n.layers
    for attention, share in kinds.items():
        for b in context_boundaries(attention, s.cut, s.c.cp_gather):
            forward, backward = share * (b.forward + full * b.recomputed), share * b.backward
            if not np.any(forward + backward):
                continue
            seconds = call_seconds(s, b)
            if b.kind == "send_recv":
                ring_forward = ring_forward + forward * seconds
                ring_backward = ring_backward + backward * seconds
            else:
                unhidden = unhidden + (forward + backward) * seconds
    overlap, forward_passes = s.machine.stack.overlap_cp, 1.0 + full
    hidden = forward_passes * exposed(ring_forward / forward_passes, work.attention, overlap)
    hidden = hidden + exposed(ring_backward, work.attention_backward, overlap)
    return ring_forward + ring_backward + unhidden, hidden + unhidden


def expert_seconds(s: PricingCase, backward: float = 1.0) -> Array:
    """Return the seconds of all dispatches and combines of experts in an average layer; `backward` = 0: forward only.

    With etp > 1, the all-gather of rows and the reduce-scatter of results are included. For candidates with ep = 1 the
    result is 0, and `tensor_seconds` includes any collectives of experts.
    """
    n, c = s.n, s.c
    total: Array = np.zeros(1)
    if not n.experts:
        return total
    rows = s.tokens / c.tp * n.routed_experts_per_token * s.machine.stack.imbalance
    for b in expert_boundaries(n.hidden, n.experts, c.ep, rows, cut_experts=s.etp):
        # A few bytes; the router's host work is a term of its own
        if b.purpose == Purpose.EXPERT_ROW_COUNTS:
            continue
        used = (c.ep > 1) & (b.ranks > 1)
        if used.any():
            seconds = n.moe_share * np.where(used, call_seconds(s, b), 0.0)
            total = total + (b.forward + backward * (b.backward + s.full * b.recomputed)) * seconds
    return total


def hop_seconds(s: PricingCase) -> Array:
    """Return the seconds to send the activations of one microbatch, or their gradients, to an adjacent stage."""
    return call_seconds(s, next(pipeline_boundaries(s.cut, s.n.hidden, 1, 1)))


def _layer_boundaries(s: PricingCase, layers: Array | float) -> Iterator[Boundary]:
    """Yield the data-parallel collectives of `layers` average layers; those of routed experts come last."""
    yield from _sharing_boundaries(s, s.dense(layers))
    if s.n.experts:
        yield from _sharing_boundaries(s, s.experts(layers), experts=True)


def _end_boundaries(s: PricingCase, freed: bool) -> Iterator[Boundary]:
    elements = s.ends(float(s.n.embedding_weights + s.n.head_params))
    return _sharing_boundaries(s, elements, freed=freed)


def _sharing_boundaries(
    s: PricingCase, elements: Array, *, freed: bool = True, experts: bool = False
) -> Iterator[Boundary]:
    """Yield the data-parallel collectives of `elements` parameters.

    With `freed`, ZeRO-3 frees gathered parameters after forward. With `experts`, the elements are parameters of
    experts, and the group is `edp`.
    """
    c, ranks = s.c, s.shards
    if experts:
        ranks = ranks * c.tp / (c.ep * c.etp)
    axes, once = ("edp",) if experts else ("dp_shard", "cp"), (c.pp > 1) | (c.zero < 2)
    return sharing_boundaries(
        elements, axes, ranks, c.dp_replicate, c.zero, once, freed & (c.zero > 2), experts=experts
    )


def step_tail(s: PricingCase) -> dict[str, Array]:
    """Return the seconds of the data-parallel collectives that the fullest stage has once per step.

    Returns:
        Dict with four entries:

        * `scatter_s`: ZeRO 0 and 1, and dp_replicate: reduction of gradients, may overlap the last backward;
        * `gather_s`: ZeRO 1: all-gather of updated parameters, may overlap the next forward;
        * `first_s`: pipeline with ZeRO 2: all-gather of layers that stay gathered, may overlap the first forward;
        * `late_s`: pipeline with ZeRO 2 and 3: reduction of gradients, and all-gather of embedding and head; exposed.
    """
    layers = [*_layer_boundaries(s, s.layers)]
    ends = [*_sharing_boundaries(s, s.ends(s.outside), freed=False)]
    gathered, gathered_ends = (_pass_seconds(s, rows, "once", _PARAMETERS) for rows in (layers, ends))
    reduced = _pass_seconds(s, layers + ends, "once", _GRADIENTS)
    replicas = _pass_seconds(s, layers + ends, "once", (Purpose.REPLICA_GRADIENTS,))
    low = s.c.zero < 2  # with ZeRO 2 and 3, only pipelines have collectives once per step, except over dp_replicate
    return {
        "scatter_s": np.where(low, reduced, 0.0) + replicas,
        "gather_s": np.where(low, gathered + gathered_ends, 0.0),
        "first_s": np.where(low, 0.0, gathered),
        "late_s": np.where(low, 0.0, reduced + gathered_ends),
    }


def per_tensor_latency_s(s: PricingCase) -> Array:
    """Return the seconds of latency per step of ZeRO-1 collectives that the framework calls per tensor.

    A ring of g ranks has g - 1 steps, each with the latency of the outermost tier. The result is 0 for other ZeRO
    stages.
    """
    steps = (s.shards - 1.0) * s.machine.tiers[-1].latency_s.value
    seconds = s.layers * s.machine.stack.tail_tensors * steps
    return np.where((s.c.zero == 1) & (s.shards > 1), seconds, 0.0)
