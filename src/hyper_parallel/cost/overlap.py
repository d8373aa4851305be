"""Exposed communication of layers whose collectives overlap with computation, from a simulated program of the layers.

A program is a list of tasks on two lanes, computation (0) and communication (1); its span is the time from its start to
its end. A layer is a chain of tasks: gather, attention, scatter, gather, feed-forward part, scatter, copy of rows to
send buffers, dispatch, experts, combine, copy of results. With half-batches, a microbatch has two parts (halves), whose
chains share the lanes. Chunks of the experts' tokens repeat the last five tasks. A part takes the time of a smaller
microbatch, because it has its own launches and latencies, and smaller matmuls. Backward is the same program in reverse,
so its span is that of the forward program with other durations.

Chunks of a block's tokens divide its collectives, its column-parallel and its row-parallel matmuls; see
`block_program`. Weight gradients are tasks of backward only, at the positions where forward reads the weights. With
chunks of the experts' tokens, backward computes part of the first chunk's weight gradients while its rows are in
flight.

A recomputed forward runs one layer at a time, so it takes the span of a program of one layer. In the other passes with
half-batches, a layer takes the time that one more layer adds to the span of several layers, plus a share of the time at
the first and the last layer in which only one half is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np

from hyper_parallel.cost._communication import Communication, expert_seconds, tensor_seconds
from hyper_parallel.cost._layer import Compute, layer_compute, matmuls, moved_elements
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.candidates import Array, distinct, shape_of
from hyper_parallel.sim import LaneProgram, Ranks

_COMPUTE, _LINK = 0, 1
_SCATTERS: Final = (3, 4)
"""Rows of `PassSeconds.durations` that are collectives of tensor parallelism."""
_COLLECTIVES: Final = (*_SCATTERS, 5)
"""Rows of `PassSeconds.durations` that are collectives with a duration."""
_NORM: Final = 8
"""Row of `PassSeconds.durations` for norms between two blocks."""
_COUNTS, _SPLITS = 9, 10
"""Rows of `PassSeconds.durations`: exchange of row counts before a dispatch, and reading of the counts by the host."""
_COLUMNS: Final = (6, 7)
"""Rows of `PassSeconds.durations` that are column-parallel matmuls."""
_FIRST, _WEIGHTS = 11, 12
"""Rows of `PassSeconds.durations` for the first chunk of experts and its weight gradients, if separate tasks."""
_COPY, _COPY_BACK = 13, 14
"""Rows of `PassSeconds.durations` for copies of rows before a dispatch and after a combine."""
_NOT_WAITING: Final = (*_COLLECTIVES, _WEIGHTS, _COPY)
"""Rows of `PassSeconds.durations` that are issued without waiting for earlier collectives of the same half."""
_RANKS: Final = 8
"""Maximum number of ranks of a simulated group; with more, run time grows faster than the delay of the latest rank."""
_STEADY: Final = 3
"""Number of layers after which each further layer is assumed to add the same time to a program."""


def _no_work() -> Array:
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one part of a microbatch (see the module docstring) in the forward or the backward of a layer.

    Without column-parallel matmuls, a scatter and the gather of the next block run back to back.
    """

    attention: Array  # computation of the attention block without `attention_column`
    mlp: Array  # computation of the feed-forward part without routed experts and `mlp_column`
    experts: Array  # computation of routed experts of one chunk
    attention_collective: Array  # one of the two collectives around the attention block
    mlp_collective: Array  # one of the two collectives around the feed-forward part
    exchange: Array  # dispatch or combine of one chunk
    attention_column: Array = field(default_factory=_no_work)  # column-parallel matmuls of the attention block
    mlp_column: Array = field(default_factory=_no_work)  # column-parallel matmuls of the feed-forward part
    # weight gradients of the first chunk, a part of `experts`, that are computed while its rows are in flight
    expert_weights: Array = field(default_factory=_no_work)
    # copy of one chunk's rows to its send buffer, or of its results to the order of the tokens
    copy: Array = field(default_factory=_no_work)
    # whether ranks exchange the numbers of rows before a dispatch; both halves wait for this exchange
    counts_rows: bool = field(default=False, kw_only=True)

    def durations(self) -> tuple[Array, ...]:
        """Return the durations by row, for `layer_program`.

        A norm takes 0 s, because its time is part of the blocks. An exchange of row counts takes 0 s, because it has
        few bytes; it still waits for the collectives in flight.
        """
        return (
            self.attention, self.mlp, self.experts, self.attention_collective, self.mlp_collective,
            self.exchange, self.attention_column, self.mlp_column, _no_work(),
            _no_work(), _no_work(), self.experts - self.expert_weights, self.expert_weights,
            self.copy, self.copy,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of the tasks of an attention or MLP block with chunks of tokens, in forward or backward."""

    column: Array  # column-parallel matmuls of one chunk
    core: Array  # all other computation of the block
    row: Array  # row-parallel matmul of one chunk
    collective: Array  # gather or scatter of one chunk
    # weight gradients during the collectives of backward that mirror the gathers of forward
    while_gathering: Array = field(default_factory=_no_work)
    # weight gradients during the collectives of backward that mirror the scatters of forward
    while_scattering: Array = field(default_factory=_no_work)

    def span(self, chunks: int, demand: float, ranks: Ranks | None = None) -> Array:
        """Return the seconds of the block with `chunks` chunks of tokens; other arguments as for `pass_span`."""
        durations = (
            self.column, self.core, self.row, self.collective, self.while_gathering,
            self.while_scattering,
        )  # fmt: skip
        return block_program(chunks).contended_span(durations, demand, ranks)


@lru_cache(maxsize=64)
def block_program(chunks: int) -> LaneProgram:
    """Return the forward program of a block with chunks of tokens; durations are the fields of `BlockSeconds`.

    The block gathers all chunks and computes the column-parallel matmul of each chunk on its arrival. Then follow the
    core, and per chunk a row-parallel matmul and a scatter. Backward is this program in reverse, with weight gradients.
    """
    column, core, row, collective, while_gathering, while_scattering = range(6)
    tasks: list[tuple[int, tuple[int, ...], int]] = [(_LINK, (), collective)] * chunks
    tasks.append((_COMPUTE, (), while_gathering))
    tasks += [(_COMPUTE, (n,), column) for n in range(chunks)]
    tasks.append((_COMPUTE, (), core))
    for _ in range(chunks):
        tasks.append((_COMPUTE, (), row))
        tasks.append((_LINK, (len(tasks) - 1,), collective))
    tasks.append((_COMPUTE, (), while_scattering))
    return LaneProgram(*zip(*tasks, strict=True))


@lru_cache(maxsize=256)
def layer_program(
    layers: int, halves: int, chunks: int, used: tuple[bool, ...] = (True,) * 6 + (False,) * 9
) -> LaneProgram:
    """Return the forward program of `layers` consecutive layers; durations are those of `PassSeconds.durations`.

    A half issues tasks until its next computation waits for a collective; then the other half has its turn. After its
    column-parallel matmuls a half may yield its turn, see `_order`. The dispatches of all chunks are issued before the
    first chunk is computed. The host reads the row counts before it issues dispatches; meanwhile neither half computes.

    Args:
        layers: Number of layers.
        halves: Number of parts of the microbatch.
        chunks: Number of chunks of the experts' tokens of a part.
        used: For every row of `PassSeconds.durations`, whether layers have tasks of this row.
    """
    chain = _chain(layers, chunks, used)
    order = _order([row for row, _ in chain], halves)
    number = {key: n for n, key in enumerate(order)}
    return LaneProgram(
        tuple(_LINK if chain[step][0] in (*_COLLECTIVES, _COUNTS) else _COMPUTE for _, step in order),
        tuple(tuple(number[half, dep] for dep in chain[step][1]) for half, step in order),
        tuple(chain[step][0] for _, step in order),
    )


def _order(rows: list[int], halves: int) -> list[tuple[int, int]]:
    """Return all tasks as (half, index in `rows`), in the order in which the runtime issues them.

    `rows` are the duration rows of the tasks of one half. The halves take turns as in `in_flight.Turns` of the torch
    backend. A half that waits for a scatter before a norm will soon issue its next collective, so the other half yields
    after its column-parallel matmuls.
    """
    order: list[tuple[int, int]] = []
    position, soon_starting = [0] * halves, set[int]()
    while min(position) < len(rows):
        for half in range(halves):
            soon_starting.discard(half)
            begin = position[half]
            for step in range(begin, len(rows)):
                row, before = rows[step], rows[step - 1] if step > begin else None
                # Backward computes deferred weight gradients before it waits.
                waits = before in (*_COLLECTIVES, _WEIGHTS) and row not in _NOT_WAITING
                if waits and row == _NORM and before in _SCATTERS:
                    soon_starting.add(half)
                if waits or (before in _COLUMNS and soon_starting - {half}):
                    break
                order.append((half, step))
                position[half] = step + 1
    return order


def _chain(layers: int, chunks: int, used: tuple[bool, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the tasks of one half as (row of the duration, indices of the tasks that must end first)."""
    chain: list[tuple[int, tuple[int, ...]]] = []

    def add(row: int, after: tuple[int, ...]) -> tuple[int, ...]:
        if not used[row]:
            return after
        chain.append((row, after))
        return (len(chain) - 1,)

    ready: tuple[int, ...] = ()
    for _ in range(layers):
        for row in (_NORM, 3, 6, 0, 3, _NORM, 4, 7, 1, 4, _COUNTS, _SPLITS):
            ready = add(row, ready)
        sent = [add(5, add(_COPY, ready)) for _ in range(chunks)]
        add(_WEIGHTS, ready)
        work = [_FIRST if used[_WEIGHTS] else 2] + [2] * (chunks - 1)
        combined = [add(5, add(row, dispatch)) for row, dispatch in zip(work, sent, strict=True)]
        results = [add(_COPY_BACK, combine) for combine in combined]
        ready = tuple(sorted({n for result in results for n in result}))
    return chain


def pass_span(
    seconds: PassSeconds,
    halves: int,
    chunks: int,
    meets: Array,
    demand: float,
    layers: float = np.inf,
    ranks: Ranks | None = None,
) -> Array:
    """Return the seconds of a whole microbatch in the forward or the backward of one layer.

    Args:
        seconds: Seconds of the tasks of one part; all candidates have the same tasks.
        halves: Number of parts of the microbatch, 1 or 2.
        chunks: Number of chunks of the experts' tokens of a part.
        meets: 1 for candidates whose halves wait for each other after every layer, else 0.
        demand: Fraction of the compute units that a collective occupies.
        layers: Number of layers after which the halves wait for each other if `meets` is 0.
        ranks: Ranks that run the program together; None: ranks in lockstep.
    """
    durations = seconds.durations()
    used = [bool(np.any(row > 0.0)) for row in durations]
    used[_NORM] = any(used[row] for row in _COLUMNS)
    used[_FIRST] = used[_WEIGHTS]
    used[_COUNTS] = used[_SPLITS] = bool(seconds.counts_rows)

    def program(count: int) -> LaneProgram:
        return layer_program(count, halves, chunks, tuple(used))

    def span(count: int) -> Array:
        return program(count).contended_span(durations, demand, ranks)

    if halves == 1 or bool(np.all(meets)):
        return span(1)
    if layers <= _STEADY:
        passed = span(int(layers)) / layers
        return np.where(meets > 0, span(1), passed)
    first = span(_STEADY)
    steady = span(_STEADY + 1) - first
    if ranks is None or not ranks.vary:
        _, busy = program(1).span(durations)
        longest = np.maximum.reduce(np.broadcast_arrays(*busy))
        steady = np.maximum(steady, longest + demand * (sum(busy) - longest))
    ends = np.maximum(first - _STEADY * steady, 0.0) / layers
    return np.where(meets > 0, span(1), steady + ends)


def with_overlap(s: PricingCase, work: Compute, comm: Communication) -> Communication:
    """Return `comm` with exposed seconds from a simulation, for candidates with overlap or with ranks of varying speed.

    The exposed seconds of a layer are its simulated time minus its compute time without overlap. They therefore include
    the costs of overlap: contention, more kernel launches and smaller matmuls. Candidates for which a search has not
    chosen an overlap get a lower bound instead.
    """
    c, group = s.c, _largest_group(s)
    if not c.any_overlap and not np.any(group > 1.0):
        return comm
    shape = shape_of(c)
    tp, ep, halves, chunks, tokens = (
        np.broadcast_to(x, shape).copy() for x in (comm.tp, comm.ep, c.halves, c.ep_chunks, c.tp_chunks)
    )
    compute_s, tp_whole = (
        np.broadcast_to(x, shape) for x in (work.forward + work.backward + work.recompute + work.launch, comm.tp_whole)
    )
    demand = min(1.0, s.machine.card.collective_share)
    # Candidates with equal parts and equal kinds of tasks share a program.
    tasks = (np.broadcast_to(degree > 1, shape).astype(np.float64) for degree in (c.tp, c.ep))
    ranks = np.broadcast_to(group, shape)
    first, kind = distinct((halves, chunks, tokens, *tasks, ranks))
    for index, row in enumerate(first):
        half, chunk, token = int(halves[row]), int(chunks[row]), int(tokens[row])
        mask = kind == index
        if half == 1 and token > 1:
            tp[mask] = _exposed_stream(replace(s, c=c.take(mask)), token)
        elif half == 1 and token < 0:
            # Forward exposes a block's first gather and last scatter; backward may overlap them with weight gradients.
            forward = tensor_seconds(replace(s, c=c.take(mask)), 0.0)
            rest = np.maximum(tp_whole[mask] - compute_s[mask], forward / -token)
            tp[mask] = _least_exposed(tp_whole[mask], rest, demand)
        if (half, chunk) == (1, 1) and (token != 1 or ranks[row] == 1.0):
            continue
        if half < 0:
            traffic = tp_whole[mask] + ep[mask]
            exposed = _least_exposed(traffic, np.maximum(traffic - compute_s[mask], 0.0), demand)
            tp[mask], ep[mask] = _split(exposed, tp_whole[mask], ep[mask])
        elif chunk < 0:
            # The first dispatch and the last combine of a pass are exposed; weight gradients may hide one in backward.
            shown = 1.0 - 0.25 * s.machine.stack.overlap_expert_weights
            rest = np.maximum(ep[mask] - compute_s[mask], shown * ep[mask] / -chunk)
            ep[mask] = _least_exposed(ep[mask], rest, demand)
        elif half == 1 and chunk > 1:
            ep[mask] = _exposed_exchanges(replace(s, c=c.take(mask)), chunk)
        else:
            case = replace(s, c=c.take(mask))
            tp[mask], ep[mask] = _exposed_halves(case, compute_s[mask], half, chunk)
    return replace(comm, tp=tp, ep=ep)


def _least_exposed(traffic: Array, alone: Array, demand: float) -> Array:
    """Return a lower bound of the exposed part of `traffic` seconds, if `alone` seconds of it cannot overlap.

    Overlapped communication still slows computation down, see `LaneProgram.contended_span`.
    """
    return (1.0 - demand) * alone + demand * traffic


def _split(exposed: Array, tp: Array, ep: Array) -> tuple[Array, Array]:
    """Divide `exposed` seconds into (tensor-parallel, expert) seconds, in proportion to `tp` and `ep`."""
    total = tp + ep
    share = np.divide(tp, total, out=np.ones_like(total), where=total > 0.0)
    return exposed * share, exposed * (1.0 - share)


def _exposed_exchanges(s: PricingCase, chunks: int) -> Array:
    """Return the exposed seconds of expert all-to-alls if only experts split their tokens into chunks."""
    redone = 1.0 + s.full
    total: Array = np.zeros(1)
    for seconds, whole, times in zip(_passes(s, 1, chunks), _passes(s, 1, 1), (redone, np.ones(1)), strict=True):
        experts = np.maximum(seconds.experts, whole.experts / chunks)
        # Ranks reach the first dispatch at different times, after the other blocks.
        before = seconds.attention + seconds.attention_column + seconds.mlp + seconds.mlp_column
        alone = replace(
            PassSeconds(*[np.zeros(1)] * 6), attention=before, experts=experts, exchange=seconds.exchange,
            expert_weights=seconds.expert_weights, copy=seconds.copy,
        )  # fmt: skip
        span = pass_span(alone, 1, chunks, np.ones(1), s.machine.card.collective_share, ranks=_ranks(s))
        total = total + times * (span - before - whole.experts - 2.0 * whole.copy)
    return np.maximum(total, 0.0)


def _exposed_stream(s: PricingCase, chunks: int) -> Array:
    """Return the exposed seconds of tensor-parallel collectives if attention and MLP split their tokens into chunks."""
    redone = 1.0 + s.full
    parts = s.with_columns(microbatch=s.c.microbatch / chunks)
    # Seconds of a chunk's products with the weights of a block: (column-parallel, row-parallel).
    names = ("attention", "mlp")
    whole = {name: [matmuls(s, part=name, row=row) for row in (False, True)] for name in names}
    chunk = {
        name: [np.maximum(matmuls(parts, part=name, row=row), whole[name][row] / chunks) for row in (False, True)]
        for name in names
    }
    # Column weights of the MLP are used while results of attention are scattered.
    gradients: dict[str, tuple[Array, Array]] = {
        "attention": (chunk["attention"][0] + chunk["attention"][1], chunk["mlp"][0]),
        "mlp": (chunk["mlp"][1], _no_work()),
    }
    total: Array = np.zeros(1)
    passes = zip(_passes(s, 1, 1), _passes(parts, 1, 1), (0, 1), (redone, np.ones(1)), strict=True)
    for seconds, part, backward, repeats in passes:
        span: Array = np.zeros(1)
        filled = backward * s.machine.stack.overlap_weights
        for name in names:
            compute = getattr(seconds, name) + getattr(seconds, f"{name}_column")
            core = np.maximum(compute - (1.0 + filled) * sum(whole[name]), 0.0)
            column, row = chunk[name]
            collective = getattr(part, f"{name}_collective")
            gathering, scattering = (filled * chunks * work for work in gradients[name])
            block = BlockSeconds(column, core, row, collective, gathering, scattering)
            span = span + block.span(chunks, s.machine.card.collective_share, _ranks(s)) - compute
        total = total + repeats * np.maximum(span, 0.0)
    return total


def _exposed_halves(s: PricingCase, compute_s: Array, halves: int, chunks: int) -> tuple[Array, Array]:
    """Return the exposed seconds of (tensor-parallel, expert) collectives with `halves` parts of a microbatch."""
    demand, layers = s.machine.card.collective_share, float(s.n.layers)
    flows, repeats = np.zeros(1), s.full
    forward, backward = _passes(s, halves, chunks)
    ranks = _ranks(s)
    span = pass_span(forward, halves, chunks, flows, demand, layers, ranks)
    span = span + pass_span(backward, halves, chunks, flows, demand, layers, ranks)
    if np.any(repeats > 0.0):
        span = span + repeats * pass_span(forward, halves, chunks, np.ones(1), demand, ranks=ranks)
    exposed = np.maximum(span - compute_s, 0.0)
    tp = forward.attention_collective + forward.mlp_collective
    return _split(exposed, tp, chunks * forward.exchange)


def _largest_group(s: PricingCase) -> Array:
    """Return the larger of tp and ep, at most `_RANKS`; 1 if ranks run in lockstep by the device card."""
    card = s.machine.card
    if card.jitter == 0.0 and card.collective_spread == 0.0:
        return np.ones(1)
    return np.minimum(np.maximum(s.c.tp, s.c.ep), _RANKS)


def _ranks(s: PricingCase) -> Ranks:
    """Return the ranks to simulate, by `_largest_group`; all candidates must have groups of one size."""
    card, size = s.machine.card, int(np.max(_largest_group(s)))
    return Ranks(size, card.jitter, card.collective_spread, s.machine.counts_late)


def _passes(s: PricingCase, halves: int, chunks: int) -> tuple[PassSeconds, PassSeconds]:
    """Return the seconds of one part of a microbatch in one layer, as (forward, backward)."""
    half = s.with_columns(microbatch=s.c.microbatch / halves)
    chunk = half.with_columns(microbatch=half.c.microbatch / chunks)
    blocks, experts = _block_seconds(half), _block_seconds(chunk)
    tp, tp_forward = tensor_seconds(half), tensor_seconds(half, 0.0)
    traffic = tp_forward, np.maximum(tp - (1.0 + s.full) * tp_forward, 0.0)
    mlp = 1.0 - np.where((s.c.ep > 1) | s.whole_experts, s.n.moe_share, 0.0)
    exchange = expert_seconds(chunk, 0.0) / 2.0
    # Half of backward's products are weight gradients.
    deferred = 0.5 * (chunks > 1) * s.machine.stack.overlap_expert_weights
    columns = [np.where(s.c.tp > 1, matmuls(half, part=part, row=False), 0.0) for part in ("attention", "mlp")]
    added = _addition_seconds(s, halves, chunks)
    forward, backward = (
        PassSeconds(
            blocks[i][0] - (1 + i) * columns[0] + i * added[0],
            blocks[i][1] - (1 + i) * columns[1] + i * added[1],
            experts[i][2] + i * added[2],
            traffic[i] / 2.0 / (1.0 + mlp), mlp * traffic[i] / 2.0 / (1.0 + mlp), exchange,
            (1 + i) * columns[0], (1 + i) * columns[1], i * deferred * experts[i][2], 0.5 * experts[i][3],
            counts_rows=i == 0 and bool(np.any(exchange > 0.0)),
        )
        for i in (0, 1)
    )  # fmt: skip
    return forward, backward


def expert_work_seconds(s: PricingCase) -> Array:
    """Return the seconds of routed experts in the forward and the backward of a layer, without overlap."""
    forward, backward = _passes(s, 1, 1)
    return forward.experts + backward.experts


def _addition_seconds(s: PricingCase, halves: int, chunks: int) -> tuple[Array, Array, Array]:
    """Return the seconds to add the weight gradients of one part of a microbatch to those of the other parts.

    Returns:
        Seconds for the attention block, for the feed-forward part without routed experts, and for one chunk of experts.
    """
    n, c, machine = s.n, s.c, s.machine
    # An addition reads two gradients and writes one.
    element_s = machine.stack.adds_gradients * 3.0 * machine.width / machine.passing_bytes_s
    half, chunk = 1.0 - 1.0 / halves, 1.0 - 1.0 / (halves * chunks)
    return (
        half * element_s * n.attention_weights / c.tp,
        half * element_s * n.mlp_weights / c.tp,
        chunk * element_s * n.expert_weights / (c.ep * s.etp),
    )


def _block_seconds(s: PricingCase) -> list[tuple[Array, Array, Array, Array]]:
    """Return the compute seconds of a layer, first for forward, then for backward.

    Returns:
        Seconds of attention, of the feed-forward part without routed experts, of routed experts, and of both copies of
        their rows. Casts and launches are divided over these in proportion to their other seconds. Backward includes
        selective recomputation, but not full recomputation.
    """
    work, redone = layer_compute(s), np.asarray(s.full)
    launch = work.launch / (3.0 + redone)
    selective = np.where(redone > 0.0, 0.0, work.recompute)
    products = [matmuls(s, part=part) for part in ("attention", "mlp", "expert")]
    moved = moved_elements(s)
    forward, backward = (
        _block_shares(total, [times * p for p in products], scores, [p * elementwise / sum(elements) for p in elements])
        for total, times, scores, elementwise, elements in (
            (work.forward + launch, 1.0, work.attention, work.elementwise, moved[0]),
            (
                work.backward + selective + 2.0 * launch, 2.0, work.attention_backward,
                work.elementwise_backward, moved[1],
            ),
        )
    )  # fmt: skip
    return [forward, backward]


def _block_shares(
    total: Array, products: Sequence[Array], scores: Array, elementwise: Sequence[Array]
) -> tuple[Array, Array, Array, Array]:
    """Divide `total` seconds over the four parts of `_block_seconds`, in proportion to the seconds of their kernels.

    Args:
        total: Seconds of a pass of one layer.
        products: Seconds of matmuls with weights, of the first three parts.
        scores: Seconds of attention scores and their product with the values.
        elementwise: Seconds of element-wise kernels, of all parts.
    """
    attention, mlp, experts = (p + e for p, e in zip(products, elementwise[:3], strict=True))
    copies = elementwise[3]
    scale = total / (attention + scores + mlp + experts + copies)
    return (attention + scores) * scale, mlp * scale, experts * scale, copies * scale
