"""Exposed communication of layers whose collectives overlap with computation, from a simulated program of the layers.

A layer is a chain of tasks: gather, attention, scatter, gather, feed-forward part, scatter, dispatch, experts, combine.
Half-batches are two such chains that share the lanes; chunks repeat the last three tasks. Durations of parts are prices
of smaller microbatches: a part has its own launches and latencies, and smaller matmuls. Backward is the same program in
reverse, so its length is that of the forward program with the durations of backward.

Chunks of tokens divide the collectives of a block, its first products and its last products; see `block_program`.

    meeting   halves meet after every layer that FSDP or recomputation wraps: a layer costs its own span
    else      halves go on: a layer costs what one more layer adds to the span
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from hyper_parallel.cost._communication import Communication, expert_seconds, tensor_seconds
from hyper_parallel.cost._layer import Compute, layer_compute, matmuls
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.candidates import Array, distinct, shape_of
from hyper_parallel.sim import LaneProgram

_COMPUTE, _LINK = 0, 1
_FIRST_COLLECTIVE: Final = 3
"""First row of `PassSeconds.durations` that is a collective."""
_STEADY: Final = 3
"""Layers of a program after which one more layer always adds the same time."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one part of a microbatch in one pass through a layer, forward or backward."""

    attention: Array  # computation of the attention block
    mlp: Array  # computation of the feed-forward part without routed experts
    experts: Array  # computation of routed experts of one chunk
    attention_collective: Array  # one of the two collectives around the attention block
    mlp_collective: Array  # one of the two collectives around the feed-forward part
    exchange: Array  # dispatch or combine of one chunk

    def durations(self) -> tuple[Array, ...]:
        """Return the rows that tasks of `layer_program` refer to."""
        return (
            self.attention, self.mlp, self.experts, self.attention_collective, self.mlp_collective,
            self.exchange,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of one block of a layer in one pass, with its tokens in chunks."""

    column: Array  # column-parallel products of one chunk
    core: Array  # all other computation of the block
    row: Array  # row-parallel product of one chunk
    collective: Array  # gather or scatter of one chunk

    def span(self, chunks: int, demand: float) -> Array:
        """Return the seconds of the block; `demand` as in `pass_span`."""
        durations = (self.column, self.core, self.row, self.collective)
        return block_program(chunks).contended_span(durations, demand)


@lru_cache(maxsize=64)
def block_program(chunks: int) -> LaneProgram:
    """Return the forward program of a block: all gathers, products of chunks as they arrive, a scatter per product.

    Rows of durations are those of `BlockSeconds`.
    """
    column, core, row, collective = range(4)
    gathers = [(_LINK, (), collective)] * chunks
    columns = [(_COMPUTE, (n,), column) for n in range(chunks)]
    middle = [(_COMPUTE, tuple(range(chunks, 2 * chunks)), core)]
    ends = [
        task
        for n in range(chunks)
        for task in (
            (_COMPUTE, (2 * chunks,), row),
            (_LINK, (2 * chunks + 1 + 2 * n,), collective),
        )
    ]
    lanes, deps, rows = zip(*gathers, *columns, *middle, *ends, strict=True)
    return LaneProgram(lanes, deps, rows)


@lru_cache(maxsize=256)
def layer_program(
    layers: int, halves: int, chunks: int, used: tuple[bool, ...] = (True,) * 6
) -> LaneProgram:
    """Return the forward program of some layers: lanes 0 for computation and 1 for communication.

    A half has the lanes until its next computation waits for a collective, then the other half has its turn. The
    exchange of the next chunk is issued before the current chunk is computed.

    Args:
        layers: Number of layers.
        halves: Number of parts of the microbatch.
        chunks: Chunks of the experts' tokens of a part.
        used: For every row of `PassSeconds.durations`, whether layers have such tasks.
    """
    chain = _chain(layers, chunks, used)
    turns: list[list[int]] = [[]]
    for step, (row, _) in enumerate(chain):
        if row < _FIRST_COLLECTIVE and any(chain[n][0] >= _FIRST_COLLECTIVE for n in turns[-1]):
            turns.append([])
        turns[-1].append(step)
    order = [(half, step) for turn in turns for half in range(halves) for step in turn]
    number = {key: n for n, key in enumerate(order)}
    return LaneProgram(
        tuple(_LINK if chain[step][0] >= _FIRST_COLLECTIVE else _COMPUTE for _, step in order),
        tuple(tuple(number[half, dep] for dep in chain[step][1]) for half, step in order),
        tuple(chain[step][0] for _, step in order),
    )


def _chain(layers: int, chunks: int, used: tuple[bool, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the tasks of one half: their row of durations, and the tasks of the half that each waits for."""
    chain: list[tuple[int, tuple[int, ...]]] = []

    def add(row: int, after: tuple[int, ...]) -> tuple[int, ...]:
        if not used[row]:
            return after
        chain.append((row, after))
        return (len(chain) - 1,)

    ready: tuple[int, ...] = ()
    for _ in range(layers):
        for row in (3, 0, 3, 4, 1, 4):
            ready = add(row, ready)
        sent, combined = [add(5, ready)], ready[:0]
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                sent.append(add(5, ready))
            combined += add(5, add(2, sent[chunk]))
        ready = combined
    return chain


def pass_span(seconds: PassSeconds, halves: int, chunks: int, meets: Array, demand: float) -> Array:
    """Return the seconds of one pass through one layer.

    Args:
        seconds: Seconds of a part; all candidates have the same tasks.
        halves: Number of parts of the microbatch, 1 or 2.
        chunks: Chunks of the experts' tokens of a part.
        meets: 1 if the halves meet after every layer.
        demand: Share of the compute units that a collective occupies.
    """
    durations = seconds.durations()

    used = tuple(bool(np.any(row > 0.0)) for row in durations)

    def span(layers: int) -> Array:
        program = layer_program(layers, halves, chunks, used)
        return program.contended_span(durations, demand)

    if halves == 1 or bool(np.all(meets)):
        return span(1)
    _, busy = layer_program(1, halves, chunks, used).span(durations)
    longest = np.maximum.reduce(np.broadcast_arrays(*busy))
    least = longest + demand * (sum(busy) - longest)
    steady = np.maximum(span(_STEADY + 1) - span(_STEADY), least)
    return np.where(meets > 0, span(1), steady)


def with_overlap(s: PricingCase, work: Compute, comm: Communication) -> Communication:
    """Return the communication with the exposed seconds of candidates that overlap; others are unchanged.

    The exposed seconds of a layer are its simulated length minus its computation without overlap. So they include the
    losses of overlap: contention, launches and smaller matmuls.
    """
    c = s.c
    if not c.any_overlap:
        return comm
    shape = shape_of(c)
    tp, ep, halves, chunks, tokens = (
        np.broadcast_to(x, shape).copy()
        for x in (comm.tp, comm.ep, c.halves, c.ep_chunks, c.tp_chunks)
    )
    compute_s, tp_whole = (
        np.broadcast_to(x, shape)
        for x in (work.forward + work.backward + work.recompute + work.launch, comm.tp_whole)
    )
    demand = min(1.0, s.machine.card.collective_share)
    # Programs differ in their parts and in the tasks that they have.
    tasks = (np.broadcast_to(degree > 1, shape).astype(np.float64) for degree in (c.tp, c.ep))
    first, kind = distinct((halves, chunks, tokens, *tasks))
    for index, row in enumerate(first):
        half, chunk, token = int(halves[row]), int(chunks[row]), int(tokens[row])
        mask = kind == index
        if half == 1 and token > 1:
            tp[mask] = _exposed_stream(replace(s, c=c.take(mask)), token)
        elif half == 1 and token < 0:
            # The first gather and the last scatter of a block are exposed.
            rest = np.maximum(tp_whole[mask] - compute_s[mask], tp_whole[mask] / -token)
            tp[mask] = _least_exposed(tp_whole[mask], rest, demand)
        if (half, chunk) == (1, 1):
            continue
        if half < 0:
            traffic = tp_whole[mask] + ep[mask]
            exposed = _least_exposed(traffic, np.maximum(traffic - compute_s[mask], 0.0), demand)
            tp[mask], ep[mask] = _split(exposed, tp_whole[mask], ep[mask])
        elif chunk < 0:
            # The first dispatch and the last combine are exposed.
            rest = np.maximum(ep[mask] - compute_s[mask], ep[mask] / -chunk)
            ep[mask] = _least_exposed(ep[mask], rest, demand)
        elif half == 1:
            ep[mask] = _exposed_exchanges(replace(s, c=c.take(mask)), chunk)
        else:
            case = replace(s, c=c.take(mask))
            tp[mask], ep[mask] = _exposed_halves(case, compute_s[mask], half, chunk)
    return replace(comm, tp=tp, ep=ep)


def _least_exposed(traffic: Array, alone: Array, demand: float) -> Array:
    """Return a lower bound of exposed traffic of which `alone` has no computation to hide behind.

    Hidden traffic still slows the computation down: see `LaneProgram.contended_span`.
    """
    return (1.0 - demand) * alone + demand * traffic


def _split(exposed: Array, tp: Array, ep: Array) -> tuple[Array, Array]:
    """Return exposed seconds divided in proportion to two kinds of traffic."""
    total = tp + ep
    share = np.divide(tp, total, out=np.ones_like(total), where=total > 0.0)
    return exposed * share, exposed * (1.0 - share)


def _exposed_exchanges(s: PricingCase, chunks: int) -> Array:
    """Return the exposed exchanges of experts with chunks; the blocks outside of them run as without overlap."""
    redone = 1.0 + _repeats_forward(s)
    total: Array = np.zeros(1)
    for seconds, whole, times in zip(
        _passes(s, 1, chunks), _passes(s, 1, 1), (redone, np.ones(1)), strict=True
    ):
        experts = np.maximum(seconds.experts, whole.experts / chunks)
        alone = replace(PassSeconds(*[np.zeros(1)] * 6), experts=experts, exchange=seconds.exchange)
        span = pass_span(alone, 1, chunks, np.ones(1), s.machine.card.collective_share)
        total = total + times * (span - whole.experts)
    return np.maximum(total, 0.0)


def _exposed_stream(s: PricingCase, chunks: int) -> Array:
    """Return the exposed collectives of tensor parallelism with chunks of tokens; blocks follow one another."""
    redone = 1.0 + _repeats_forward(s)
    parts = s.with_columns(microbatch=s.c.microbatch / chunks)
    total: Array = np.zeros(1)
    whole_passes, parts_passes = _passes(s, 1, 1), _passes(parts, 1, 1)
    for whole, part, times, repeats in zip(
        whole_passes, parts_passes, (1.0, 2.0), (redone, np.ones(1)), strict=True
    ):
        for name in ("attention", "mlp"):
            compute, collective = getattr(whole, name), getattr(part, f"{name}_collective")
            column, row = (times * matmuls(s, part=name, row=is_row) for is_row in (False, True))
            chunk = [
                np.maximum(times * matmuls(parts, part=name, row=is_row), products / chunks)
                for is_row, products in ((False, column), (True, row))
            ]
            core = np.maximum(compute - column - row, 0.0)
            block = BlockSeconds(chunk[0], core, chunk[1], collective)
            span = block.span(chunks, s.machine.card.collective_share)
            total = total + repeats * np.maximum(span - compute, 0.0)
    return total


def _exposed_halves(
    s: PricingCase, compute_s: Array, halves: int, chunks: int
) -> tuple[Array, Array]:
    """Return the exposed seconds of tensor and expert parallelism with half-batches."""
    c, demand = s.c, s.machine.card.collective_share
    wrapped = s.sharded | ((c.zero > 1) & (c.dp_replicate > 1)) | (c.recompute > 0)
    meets = np.where(wrapped, 1.0, 0.0)
    forward, backward = _passes(s, halves, chunks)
    span = pass_span(forward, halves, chunks, meets, demand) * (1.0 + _repeats_forward(s))
    span = span + pass_span(backward, halves, chunks, meets, demand)
    exposed = np.maximum(span - compute_s, 0.0)
    tp = forward.attention_collective + forward.mlp_collective
    return _split(exposed, tp, chunks * forward.exchange)


def _repeats_forward(s: PricingCase) -> Array:
    """Return 1 for candidates that repeat the whole forward in backward."""
    return np.where(s.c.recompute > 1, 1.0, 0.0)


def _passes(s: PricingCase, halves: int, chunks: int) -> tuple[PassSeconds, PassSeconds]:
    """Return the seconds of a part of a microbatch, forward and backward."""
    half = s.with_columns(microbatch=s.c.microbatch / halves)
    chunk = half.with_columns(microbatch=half.c.microbatch / chunks)
    blocks, experts = _block_seconds(half), _block_seconds(chunk)
    tp, tp_forward = tensor_seconds(half), tensor_seconds(half, 0.0)
    traffic = tp_forward, np.maximum(tp - (1.0 + _repeats_forward(s)) * tp_forward, 0.0)
    mlp = 1.0 - np.where((s.c.ep > 1) | s.whole_experts, s.n.moe_share, 0.0)
    exchange = expert_seconds(chunk, 0.0) / 2.0
    forward, backward = (
        PassSeconds(
            blocks[i][0], blocks[i][1], experts[i][2],
            traffic[i] / 2.0 / (1.0 + mlp), mlp * traffic[i] / 2.0 / (1.0 + mlp), exchange,
        )
        for i in (0, 1)
    )  # fmt: skip
    return forward, backward


def _block_seconds(s: PricingCase) -> list[tuple[Array, Array, Array]]:
    """Return the computation of attention, feed-forward part and experts of a layer, forward and backward.

    Element-wise work, casts and launches belong to the blocks in proportion to their products. Partial recomputation
    is work of backward.
    """
    work, redone = layer_compute(s), _repeats_forward(s)
    launch = work.launch / (3.0 + redone)
    selective = np.where(redone > 0.0, 0.0, work.recompute)
    totals = work.forward + launch, work.backward + selective + 2.0 * launch
    products = [matmuls(s, part=part) for part in ("attention", "mlp", "expert")]
    result = []
    for total, times, scores in zip(
        totals, (1.0, 2.0), (work.attention, work.attention_backward), strict=True
    ):
        attention, mlp, experts = (times * seconds for seconds in products)
        scale = total / (attention + scores + mlp + experts)
        result.append(((attention + scores) * scale, mlp * scale, experts * scale))
    return result
