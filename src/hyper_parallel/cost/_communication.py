"""Seconds of communication over candidates: the boundary table of `shard`, on the links of a machine.

One decoder layer and one microbatch on one rank, what of it nothing hides, and the data-parallel traffic of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import SHAPES, Array
from hyper_parallel.cost._layer import Compute
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._place import Axis, split
from hyper_parallel.cost._setting import Setting, plain
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
    ring_bytes,
    sharing_boundaries,
)

_PARAMETERS = (Purpose.FSDP_PARAMETERS, Purpose.EXPERT_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds of one layer and microbatch on one rank.

    A pipeline's gradients are added up whole and scattered once per step, see `step_tail`: there `fsdp_scatter` and
    `outside` are 0, and so is `fsdp_gather` unless parameters are freed after forward.
    """

    tp: Array  # gathers and scatters of tensor parallelism beyond what hides behind matmuls
    tp_whole: Array  # all of them
    cp: Array  # key-value ring beyond the attention it hides behind, and head exchanges
    cp_whole: Array  # all of it
    ep: Array  # all dispatches and combines of experts
    ep_exchange: Array  # one of the exchanges
    # parameter gathers and gradient scatters per microbatch beyond the layer they hide behind
    fsdp: Array
    fsdp_gather: Array  # one gather of the layer's parameters
    fsdp_scatter: Array  # one scatter of its gradients
    # embedding and head of FSDP, gathered and scattered once a microbatch; never hidden
    outside: Array


def exposed(traffic: Array, work: Array, overlap: float) -> Array:
    """Seconds of traffic that work does not hide: a share never hides, and what is longer than the work does not."""
    return np.maximum((1.0 - overlap) * traffic, traffic - work)


def layer_communication(s: Setting, work: Compute) -> Communication:
    """Communication of one mean layer, as far as it does not hide behind its compute."""
    n, stack, tp = s.n, s.machine.stack, _tensor(s)
    cp_whole, cp = _context(s, work)
    ep, exchange = _experts(s)
    gather = scatter = again = np.zeros(1)
    for b in _layers_shared(s, 1.0):
        if _used(b.forward + b.backward):
            seconds = _shared_s(s, b)
            if b.purpose in _PARAMETERS:
                gather, again = gather + b.forward * seconds, again + b.backward * seconds
            else:
                scatter = scatter + b.backward * seconds
    fsdp = exposed(gather, work.forward, stack.overlap_dp)
    fsdp = fsdp + exposed(again + scatter, work.backward, stack.overlap_dp)
    outside = np.zeros(1)
    for b in _outside_shared(s, float(n.embedding_weights + n.head_params)):
        calls = b.forward + b.backward
        if _used(calls):
            outside = outside + calls * _shared_s(s, b)
    hidden = exposed(tp, 3.0 * work.matmul, stack.overlap_tp)
    return Communication(hidden, tp, cp, cp_whole, ep, exchange, fsdp, gather, scatter, outside)


def _used(calls: Array | float) -> bool:
    return bool(calls.any()) if isinstance(calls, np.ndarray) else bool(calls)


def _runs(
    rows: Iterable[Boundary], full: Array | float, regather: Array | float = 0.0
) -> Iterator[tuple[Boundary, Array | float]]:
    """Collectives of a layer and microbatch, and how often each runs; those of one tensor and group are one."""
    calls: dict[tuple[bool, tuple[str, ...], int], tuple[Boundary, Array, Array, Array]] = {}
    for b in rows:
        key = (b.kind == "all_reduce", b.axes, id(b.elements))
        first, times, redone, gathered = calls.get(key, (b, 0, 0, 0))
        times = times + b.forward + b.backward
        calls[key] = first, times, redone + b.recomputed, gathered + b.regathered
    again = _used(full)
    kept = (1.0 - full) * regather if _used(regather) else None
    for b, times, redone, gathered in calls.values():
        if again:
            times = times + full * redone
        if kept is not None:
            times = times + kept * gathered
        if _used(times):
            yield b, times


def _tensor(s: Setting) -> Array:
    """Seconds of tensor-parallel collectives; layers whose experts are spread by ep have none in that block.

    Stacks that gather an input again do so behind the backward matmul, so only 8 count in 1-D; where a strategy asks
    our own runtime for it, 10. Recomputation is priced to the end of the layer.
    """
    n, c, machine, regather = s.n, s.c, s.machine, plain(s.c.regather)
    links: dict[tuple[str, ...], tuple[Array, Array]] = {}  # seconds per element, per call
    both = (c.attention_shape == SHAPES.index("2d")) & (c.mlp_shape == SHAPES.index("2d"))
    flat = c.tp_y <= 1
    total: Array = np.zeros(1)
    for block, column, layers in (
        (_attention_widths(n), c.attention_shape, 1.0),
        (_mlp_widths(n), c.mlp_shape, 1.0 - np.where(c.ep > 1, n.moe_share, 0.0)),
    ):
        for index, shape in enumerate(SHAPES):
            used = flat | (column == index) if shape == "1d" else ~flat & (column == index)
            if not used.any():
                continue
            rows = block_boundaries(
                block, shape, s.cut, token_scatter=c.attention_tokens,
                # The stream is cut over y when all matrices of the layers belong to 2d blocks; experts do not.
                hidden_cut=both & (not n.experts),
            )  # fmt: skip
            sums: dict[tuple[str, ...], tuple[Array | float, Array | float]] = {}
            for b, times in _runs(rows, s.full, regather):
                elements, calls = sums.get(b.axes, (0.0, 0.0))
                passes = 2.0 if b.kind == "all_reduce" else 1.0
                sums[b.axes] = elements + passes * times * b.elements, calls + times
                if b.axes not in links:
                    ring = machine.ring(*(getattr(s.places, axis) for axis in b.axes))
                    element = ring_bytes("all_gather", machine.width, b.ranks) / ring.rate
                    links[b.axes] = element, ring.delay
            seconds: Array = np.zeros(1)
            for group, (elements, calls) in sums.items():
                seconds = seconds + elements * links[group][0] + calls * links[group][1]
            total = total + layers * np.where(used, seconds, 0.0)
    # What only one layout needs: a group of one rank costs nothing.
    return np.where(c.tp > 1, total, 0.0)


def _attention_widths(n: ModelNumbers) -> BlockWidths:
    """The attention block of a mean layer."""
    keys = Projection(2.0 * n.k_width, 2.0 * n.k_width * n.hidden, keys=True)
    out = Projection(n.v_width, n.v_width * n.hidden)
    query = Projection(n.q_width, n.attention_weights - keys.weights - out.weights)
    return BlockWidths(n.hidden, (query, keys), (out,), n.num_kv_heads)


def _mlp_widths(n: ModelNumbers) -> BlockWidths:
    """The feed-forward block of a mean layer: dense part, shared and visited experts."""
    wide = [m for m in n.matmuls if m.part != "attention"]
    columns = sum(m.outputs * m.count for m in wide if not m.row)
    inputs = sum(m.inputs * m.count for m in wide if m.row)
    out = Projection(inputs, inputs * n.hidden)
    weights = n.mlp_weights + n.expert_weights - out.weights
    return BlockWidths(n.hidden, (Projection(columns, weights),), (out,))


def _context(s: Setting, work: Compute) -> tuple[Array, Array]:
    """All context-parallel traffic of a layer and what attention does not hide: it hides the ring's."""
    n, c, machine, cut, full = s.n, s.c, s.machine, s.cut, s.full
    if (c.cp <= 1).all():
        return np.zeros(1), np.zeros(1)
    inner, outer = split(s.places.cp, c.cp_ulysses)
    ahead = behind = bare = np.zeros(1)
    kinds: dict[AttentionSpec, float] = {}
    for count, attention in n.attentions:  # a window that leaves out rounds is priced as none
        kind = replace(attention, window=None, kind="mla" if attention.kind == "mla" else "full")
        kinds[kind] = kinds.get(kind, 0.0) + count / n.layers
    for attention, share in kinds.items():
        passed: Array | None = None
        for b in context_boundaries(attention, cut, c.cp_gather):
            forward, backward = share * (b.forward + full * b.recomputed), share * b.backward
            if not (_used(forward) or _used(backward)):
                continue
            if b.kind == "send_recv":  # all rounds are one pass of a ring
                if passed is None:
                    whole = b.elements * cut.ring * machine.width
                    passed = machine.ring_seconds(whole, outer) / np.maximum(cut.ring - 1.0, 1.0)
                ahead, behind = ahead + forward * passed, behind + backward * passed
                continue
            width = max(4.0, machine.width) if b.format == "statistic" else machine.width
            if b.kind == "all_to_all":
                seconds = machine.all_to_all_seconds(b.elements * width, inner)
            else:
                seconds = machine.ring_seconds(b.elements * width, outer)
            bare = bare + (forward + backward) * seconds
    overlap, redone = machine.stack.overlap_cp, 1.0 + full
    hidden = redone * exposed(ahead / redone, work.attention, overlap)
    hidden = hidden + exposed(behind, work.attention_backward, overlap)
    return ahead + behind + bare, hidden + bare


def _experts(s: Setting) -> tuple[Array, Array]:
    """Seconds of all dispatches and combines of a mean layer, and of one.

    Ranks that cut one expert gather each other's rows; without ep that is tensor parallelism's own gather.
    """
    n, c, machine = s.n, s.c, s.machine
    if not n.experts:
        return np.zeros(1), np.zeros(1)
    visited = n.experts_per_token / n.moe_share
    rows = s.tokens / c.tp * visited * machine.stack.imbalance
    copies, token = visited if machine.stack.ep_dedup else 1.0, n.hidden * machine.width
    total = one = np.zeros(1)
    table = expert_boundaries(n.hidden, n.experts, c.ep, rows, cut_experts=c.etp)
    for b, times in _runs(table, s.full):
        if b.purpose == Purpose.EXPERT_ROW_COUNTS:  # a few bytes; the router's host work is priced
            continue
        sent = b.elements * machine.width
        if b.kind == "all_to_all":
            seconds = machine.all_to_all_seconds(sent, *s.places.ep, copies=copies, message=token)
        else:
            seconds = np.where(c.etp > 1, machine.ring_seconds(sent, *s.places.etp), 0.0)
        seconds = n.moe_share * np.where(c.ep > 1, seconds, 0.0)
        total, one = total + times * seconds, one + seconds
    return total, one


def hop_seconds(s: Setting, hop: Axis) -> Array:
    """Seconds of sending one microbatch's activations to the next stage, or their gradients to the one before."""
    message, _ = pipeline_boundaries(s.cut, s.n.hidden, 1, 1)
    # Sending to one other rank is what a gather over two ranks sends of twice the tensor.
    return s.machine.ring_seconds(2.0 * message.elements * s.machine.width, hop)


def _layers_shared(s: Setting, layers: Array | float) -> Iterator[Boundary]:
    """Data-parallel collectives of some mean layers: the part without experts, then experts."""
    yield from _shared(s, s.dense(layers), s.c.zero > 2)
    if s.n.experts:
        yield from _shared(s, s.experts(layers), s.c.zero > 2, experts=True)


def _outside_shared(s: Setting, elements: Array | float) -> Iterator[Boundary]:
    """Those of embedding and head, which are never freed early; elements before the cut by P."""
    return _shared(s, elements / s.c.tp, np.zeros(1, dtype=np.bool_))


def _shared(
    s: Setting, elements: Array, freed: NDArray[np.bool_], experts: bool = False
) -> Iterator[Boundary]:
    c, ranks = s.c, s.shards
    if experts:
        ranks = ranks * c.tp / (c.ep * c.etp)
    axes, once = ("edp",) if experts else ("dp_shard", "cp"), (c.pp > 1) | (c.zero < 2)
    return sharing_boundaries(
        elements, axes, ranks, c.dp_replicate, c.zero, once, freed, experts=experts
    )


def _shared_s(s: Setting, b: Boundary) -> Array:
    """Seconds of one call."""
    width = s.reduce_width if b.format == "reduce" else s.machine.width
    seconds = s.sharing_ring(b.axes[0]).seconds(b.elements * width)
    return 2.0 * seconds if b.kind == "all_reduce" else seconds


@dataclass(frozen=True, slots=True)
class Tail:
    """Data-parallel traffic once per step, in seconds."""

    scatter: Array  # reduction of gradients that the last microbatch's backward may hide
    gather: Array  # gather of updated parameters
    # gather of a pipeline's layers that are not freed after forward, which the first forward may hide
    first: Array
    # what nothing hides: reduction of a pipeline's sharded gradients, and its embedding or head
    late: Array


def step_tail(s: Setting) -> Tail:
    """Data-parallel traffic of the fullest stage once per step: gradient reduction, and the gather of parameters."""
    reduced = replicas = np.zeros(1)
    gathers = []
    for rows in (_layers_shared(s, s.layers), _outside_shared(s, s.outside)):
        gathered = np.zeros(1)
        for b in rows:
            if not np.any(b.once):
                continue
            seconds = b.once * _shared_s(s, b)
            if b.purpose in _PARAMETERS:
                gathered = gathered + seconds
            elif b.purpose == Purpose.REPLICA_GRADIENTS:
                replicas = replicas + seconds
            else:
                reduced = reduced + seconds
        gathers.append(gathered)
    low = s.c.zero < 2  # else of a pipeline, and 0 without
    return Tail(
        scatter=np.where(low, reduced, 0.0) + replicas,
        gather=np.where(low, gathers[0] + gathers[1], 0.0),
        first=np.where(low, 0.0, gathers[0]),
        late=np.where(low, 0.0, reduced + gathers[1]),
    )


def tensor_hops(s: Setting) -> Array:
    """Seconds that ZeRO 1 spends in ring steps of tensors that are reduced and gathered one by one.

    A ring over g ranks takes g - 1 steps of the outermost tier's latency however small its tensor is; shards of one
    tensor over hundreds of ranks are small.
    """
    steps = (s.shards - 1.0) * s.machine.tiers[-1].latency_s.value
    many = s.layers * s.machine.stack.tail_tensors * steps
    return np.where((s.c.zero == 1) & (s.shards > 1), many, 0.0)
