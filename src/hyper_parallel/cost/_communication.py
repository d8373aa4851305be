"""One decoder layer and one microbatch on one rank: seconds of communication that nothing hides, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._layer import Compute, tokens_of
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._place import Axis, Places, split
from hyper_parallel.cost._tensor import BlockWidths, block_traffic, relayout_elements
from hyper_parallel.ir import Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds of one layer and microbatch on one rank.

    Attributes:
        tp: Gathers and scatters of tensor parallelism beyond what hides behind matmuls.
        tp_whole: All of them.
        cp: Key-value ring beyond the attention it hides behind, and head exchanges.
        cp_whole: All of it.
        ep: All dispatches and combines of experts.
        ep_exchange: One of the exchanges.
        fsdp: Parameter gathers and gradient scatters per microbatch beyond the layer they hide behind.
        fsdp_gather: One gather of the layer's parameters.
        fsdp_scatter: One scatter of its gradients.
        outside: Embedding and head of FSDP, gathered and scattered once a microbatch; never hidden.

    A pipeline's gradients are added up whole and scattered once per step, see `step_tail`: there `fsdp_scatter` and
    `outside` are 0, and so is `fsdp_gather` unless parameters are freed after forward.
    """

    tp: Array
    tp_whole: Array
    cp: Array
    cp_whole: Array
    ep: Array
    ep_exchange: Array
    fsdp: Array
    fsdp_gather: Array
    fsdp_scatter: Array
    outside: Array


def exposed(traffic: Array, work: Array, overlap: float) -> Array:
    """Seconds of traffic that work does not hide: a share never hides, and what is longer than the work does not."""
    return np.maximum((1.0 - overlap) * traffic, traffic - work)


def layer_communication(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    places: Places,
    work: Compute,
) -> Communication:
    """Communication of one mean layer, as far as it does not hide behind its compute."""
    tp = _tensor(n, machine, workload, c, places)
    hidden = exposed(tp, 3.0 * work.matmul, machine.stack.overlap_tp)
    cp_whole, cp = _context(n, machine, workload, c, places, work)
    exchange = _exchange(n, machine, workload, c, places)
    times = 4.0 + 2.0 * (c.recompute > 1)
    gather, scatter, outside = _sharded(n, machine, workload, c, places)
    one = c.pp <= 1
    gather = np.where(one | (c.zero > 2), gather, 0.0)
    scatter, outside = np.where(one, scatter, 0.0), np.where(one, outside, 0.0)
    overlap = machine.stack.overlap_dp
    forward = exposed(gather, work.forward, overlap)
    again = np.where(c.zero > 2, gather, 0.0)
    fsdp = forward + exposed(again + scatter, work.backward, overlap)
    return Communication(
        tp=hidden,
        tp_whole=tp,
        cp=cp,
        cp_whole=cp_whole,
        ep=times * exchange,
        ep_exchange=exchange,
        fsdp=fsdp,
        fsdp_gather=gather,
        fsdp_scatter=scatter,
        outside=outside,
    )


def _tensor(
    n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates, places: Places
) -> Array:
    """Seconds of tensor-parallel collectives; layers whose experts are spread by ep have none in that block.

    Stacks that gather an input again do so behind the backward matmul, so only 8 count in 1-D; where a strategy asks
    our own runtime for it, 10. Full recomputation repeats the forward instead.
    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    tokens, width = tokens_of(workload, c), machine.width
    x, y = places.tp_x, places.tp_y
    rate_x, rate_y = machine.bandwidth(x), machine.bandwidth(y)
    rate, delay = machine.bandwidth(x, y), machine.latency(x, y)
    delay_x, delay_y = machine.latency(x), machine.latency(y)
    total: Array = np.zeros(1)
    full = c.recompute > 1
    # Most tables hold neither choice: then it is one number, not a column.
    keep = np.where(full, 1.0, 1.0 - c.regather) if c.regather.any() else 1.0
    spans = c.attention_tokens if c.attention_tokens.any() else 0.0
    for widths, shape, share in (
        (BlockWidths.attention(n), c.attention_shape, 1.0),
        (BlockWidths.mlp(n), c.mlp_shape, 1.0 - np.where(c.ep > 1, n.moe_share, 0.0)),
    ):
        flat = (shape == 0) | (c.tp_y <= 1)
        passes: list[tuple[bool, Array | float]] = [(True, 1.0)]
        if full.any():
            passes.append((False, np.where(full, 1.0, 0.0)))
        for backward, times in passes:
            t = block_traffic(
                widths, shape, tokens, c.tp_x, c.tp_y,
                keep=keep, keep_kv=1.0, spans=spans, backward=backward,
            )  # fmt: skip
            line = t.x * width / rate + t.collectives_x * delay
            plane = t.x * width / rate_x + t.collectives_x * delay_x
            plane = plane + t.y * width / rate_y + t.collectives_y * delay_y
            total = total + share * times * np.where(flat, line, plane)
    moved = relayout_elements(n.hidden, c.attention_shape, c.mlp_shape, tokens, c.tp_x, c.tp_y)
    turns = (4.0 + 2.0 * full) * (moved > 0)
    relayout = turns * (moved * width / rate_y + delay_y)
    # What only one layout needs: a group of one rank costs nothing.
    return np.where(c.tp > 1, total + relayout, 0.0)


def _context(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    places: Places,
    work: Compute,
) -> tuple[Array, Array]:
    """All context-parallel traffic of a layer and what attention does not hide.

    The ring sends keys and values once forward and twice backward; Ulysses exchanges queries, keys, values and output
    for heads, and the same backward, which nothing hides. Instead of the ring all keys and values may be gathered
    before attention, and again before its backward, and their gradients scattered in float32 at least, all in full.
    Sources: Liu et al. 2023 (ring attention), section 3; Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.
    """
    tokens, width, again = (
        tokens_of(workload, c),
        machine.width,
        np.where(c.recompute > 1, 1.0, 0.0),
    )
    inner, outer = split(places.cp, c.cp_ulysses)
    pairs = 2.0 * n.k_width / c.tp * tokens * width
    ring = machine.ring_seconds(pairs * outer[0], outer)
    overlap = machine.stack.overlap_cp
    hidden = (1.0 + again) * exposed(ring, work.attention, overlap)
    hidden = hidden + exposed(2.0 * ring, work.attention_backward, overlap)
    local = (n.q_width + n.v_width + 2.0 * n.k_width) / c.tp * tokens * width
    heads = (2.0 + again) * machine.all_to_all_seconds(local, inner)
    heads = np.where(c.cp_ulysses > 1, heads, 0.0)
    whole = (3.0 + again) * ring
    if c.cp_gather.any():
        wide = machine.ring_seconds(pairs * outer[0] * max(4.0, width) / width, outer)
        gathered = (2.0 + again) * ring + wide
        whole = np.where(c.cp_gather > 0, gathered, whole)
        hidden = np.where(c.cp_gather > 0, gathered, hidden)
    used = outer[0] > 1
    return np.where(used, whole, 0.0) + heads, np.where(used, hidden, 0.0) + heads


def _exchange(
    n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates, places: Places
) -> Array:
    """Seconds of one dispatch or combine of a mean layer: T / P tokens to their experts' ranks.

    Source: Lepikhin et al. 2020 (GShard), section 3.
    """
    if not n.experts:
        return np.zeros(1)
    tokens, stack = tokens_of(workload, c), machine.stack
    visited = n.experts_per_token / n.moe_share
    local = tokens / c.tp * visited * n.hidden * machine.width * stack.imbalance
    copies = visited if stack.ep_dedup else 1.0
    token = n.hidden * machine.width
    dispatch = machine.all_to_all_seconds(local, *places.ep, copies=copies, message=token)
    dispatch = np.where(c.ep > 1, dispatch, 0.0)
    # Ranks that cut one expert gather each other's tokens; without ep that is tensor parallelism's own gather.
    cut = machine.ring_seconds(local * c.etp, *places.etp)
    return n.moe_share * (dispatch + np.where((c.ep > 1) & (c.etp > 1), cut, 0.0))


def layer_weights(n: ModelNumbers, c: Candidates) -> tuple[Array, Array]:
    """Elements of one mean layer on a tensor- and expert-parallel rank before data sharding: dense, experts."""
    dense = (n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights
    return dense, n.expert_weights / (c.ep * c.etp)


def group_seconds(machine: Machine, elements: Array, width: float, axes: tuple[Axis, ...]) -> Array:
    """Seconds of gathering (or scattering) elements over a group; 0 for one rank."""
    size: Array = np.ones(1)
    for degree, _ in axes:
        size = size * degree
    return np.where(size > 1, machine.ring_seconds(elements * width, *axes), 0.0)


def _sharded(
    n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates, places: Places
) -> tuple[Array, Array, Array]:
    """FSDP per microbatch: gather and scatter of a layer, and both of what lies outside the layers.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    width, reduce_width = machine.width, float(DTYPE_BYTES[workload.reduce_dtype])
    dense, expert = layer_weights(n, c)
    group = (places.dp_shard, places.cp)
    every = np.where(c.zero > 1, 1.0, 0.0)

    def seconds(of: float) -> Array:
        total = group_seconds(machine, dense, of, group)
        if n.experts:
            total = total + group_seconds(machine, expert, of, places.edp)
        return every * total

    vocabulary = (n.embedding_weights + n.head_params) / c.tp
    outside = group_seconds(machine, vocabulary, width + reduce_width, group)
    return seconds(width), seconds(reduce_width), every * outside


@dataclass(frozen=True, slots=True)
class Tail:
    """Data-parallel traffic once per step, in seconds.

    Attributes:
        scatter: Reduction of gradients that the last microbatch's backward may hide.
        gather: Gather of updated parameters.
        first: Gather of a pipeline's layers that are not freed after forward, which the first forward may hide.
        late: What nothing hides: reduction of a pipeline's sharded gradients, and its embedding or head.
    """

    scatter: Array
    gather: Array
    first: Array
    late: Array


def step_tail(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    places: Places,
    layers: Array,
    outside: Array,
) -> Tail:
    """Data-parallel traffic once per step: gradient reduction, and the gather of updated parameters.

    ZeRO 0 all-reduces gradients, ZeRO 1 scatters them and gathers parameters. ZeRO 2 and 3 do so per microbatch, or in
    a pipeline scatter at the end of the step what was added up whole, and gather once what is not freed after forward;
    replicas all-reduce their shards.

    Args:
        n: The model.
        machine: The machine.
        workload: Number formats.
        c: Candidates.
        places: Where the axes lie.
        layers: Layers of the fullest stage.
        outside: Elements of embedding and head on that stage, before the cut by P.
    """
    width, reduce_width = machine.width, float(DTYPE_BYTES[workload.reduce_dtype])
    dense, expert = layer_weights(n, c)
    whole, expert = layers * dense + outside / c.tp, layers * expert
    group = (places.dp_shard, places.cp)
    share = np.where(c.zero > 0, c.dp_shard * c.cp, 1.0)
    experts_share = np.where(c.zero > 0, c.dp_shard * c.cp * c.tp / (c.ep * c.etp), 1.0)

    def seconds(elements: Array, experts: Array, of: float) -> Array:
        total = group_seconds(machine, elements, of, group)
        if n.experts:
            total = total + group_seconds(machine, experts, of, places.edp)
        return total

    replicas = (places.dp_replicate,)
    reduced = whole / share + expert / experts_share
    all_reduce = 2.0 * group_seconds(machine, reduced, reduce_width, replicas)
    piped, updated = (c.zero > 1) & (c.pp > 1), c.zero == 1
    scatter = seconds(whole, expert, reduce_width)
    gather = first = late = np.zeros(1)
    if updated.any():
        gather = np.where(updated, seconds(whole, expert, width), 0.0)
    if piped.any():
        first = seconds(layers * dense, expert, width)
        first = np.where(piped & (c.zero == 2), first, 0.0)
        late = scatter + group_seconds(machine, outside / c.tp, width, group)
        late = np.where(piped, late, 0.0)
    scatter = np.where(c.zero < 2, scatter, 0.0) * np.where(c.zero == 0, 2.0, 1.0)
    return Tail(scatter + all_reduce, gather, first, late)


def tensor_hops(machine: Machine, c: Candidates, places: Places, layers: Array) -> Array:
    """Seconds that ZeRO 1 spends in ring steps of tensors that are reduced and gathered one by one.

    A ring over g ranks takes g - 1 steps of the outermost tier's latency however small its tensor is; shards of one
    tensor over hundreds of ranks are small.
    """
    steps = (c.dp_shard * c.cp - 1.0) * machine.tiers[-1].latency_s.value
    many = layers * machine.stack.tail_tensors * steps
    return np.where((c.zero == 1) & (c.dp_shard * c.cp > 1), many, 0.0)
