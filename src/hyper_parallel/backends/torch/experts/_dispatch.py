"""Token dispatch: rows are sent to the ranks of their experts, results are sent back.

    hidden [N, D], index [N, k]
      sort         N k rows by expert, so that the rows of one expert-parallel rank are contiguous
      counts       all-to-all of the number of rows per expert
      dispatch     all-to-all with uneven splits: each rank receives R rows for its experts
      experts      code of the model, on [R, D]
      combine      inverse all-to-all, inverse permutation; the caller sums over k

With a capacity, every expert computes a fixed number of rows of every rank. Each row is assigned a slot of its expert,
in token order. Surplus rows are written to one overflow row at the end, which is dropped. No size depends on the data,
so there is no device synchronization, and a step can be captured once and planned.

Rows of tokens that are not computed, such as padding, are sorted behind the rows of all experts and are not sent.

Backward is exact: the gradient of an all-to-all is the all-to-all with exchanged splits. No row is used twice, so
gradients are scattered without atomic additions, and sums have one fixed order on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch.collectives import all_to_all, launch_all_to_all, paired
from hyper_parallel.backends.torch.experts.deferred_weights import DeferredWeights
from hyper_parallel.backends.torch.experts.routing import (
    LayerRouting,
    count_rows,
    is_first_forward,
)
from hyper_parallel.backends.torch.in_flight import (
    CollectiveLauncher,
    PendingCollective,
    collective,
)
from hyper_parallel.ir import Purpose


def attach_zero_gradients(out: Any, params: Iterable[Tensor]) -> Any:
    """Return `out`, a tensor or a tuple that begins with one, whose backward also gives `params` zero gradients.

    Reductions over ranks need a gradient of every trained parameter on every rank.
    """
    params = [p for p in params if p.requires_grad]

    def zeros(grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, params)

    first, *rest = out if isinstance(out, tuple) else (out,)
    with_gradients = paired(lambda x, *_: x.view_as(x), zeros, first, *params)
    return (with_gradients, *rest) if isinstance(out, tuple) else with_gradients


class _MoveRows(torch.autograd.Function):
    """Autograd function that scatters rows to distinct indices of [size, D], or gathers them from there.

    Each of the two operations is the backward of the other.

    With an `overflow_row`, index `size` is a row that is dropped: any number of rows are scattered to it, and the rows
    gathered from it are zero.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, size: int, overflow_row: bool, gathers: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size, ctx.overflow_row, ctx.gathers = size, overflow_row, gathers
        return (_gather if gathers else _scatter)(rows, index, size, overflow_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transpose = _scatter if ctx.gathers else _gather
        rows = transpose(grad, *ctx.saved_tensors, ctx.size, ctx.overflow_row)
        return rows, None, None, None, None


def scatter_rows(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """Return [size, D] with `rows` at the indices `index`, which must be distinct, and zero elsewhere."""
    return _MoveRows.apply(rows, index, size, False, False)


def _gather(rows: Tensor, index: Tensor, size: int, overflow_row: bool) -> Tensor:
    if overflow_row:
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows[index]


def _scatter(rows: Tensor, index: Tensor, size: int, overflow_row: bool) -> Tensor:
    new = rows.new_empty if len(index) == size and not overflow_row else rows.new_zeros
    out = new(size + overflow_row, *rows.shape[1:]).index_copy_(0, index, rows)
    return out[:size] if overflow_row else out


def _launch_exchange(
    rows: Tensor, *, send: list[int], receive: list[int], group: dist.ProcessGroup, async_op: bool
) -> Callable[[], Tensor]:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    return launch_all_to_all(out, rows.contiguous(), group, Purpose.EXPERT_ROWS, receive, send, async_op=async_op)


def _exchange_pair(
    send: list[int], receive: list[int], group: dist.ProcessGroup
) -> tuple[CollectiveLauncher, CollectiveLauncher]:
    """Return launchers of an all-to-all, and of its transpose, for these numbers of rows per rank."""
    forward = partial(_launch_exchange, send=send, receive=receive, group=group)
    return forward, partial(_launch_exchange, send=receive, receive=send, group=group)


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return rows
    result: Tensor = collective(*_exchange_pair(send, receive, group), rows)
    return result


@dataclass(frozen=True, slots=True)
class Capacity:
    """Number of rows that each rank sends to one expert in one pass.

    Attributes:
        slots: Number of slots per expert that are sent, independent of the data.
        limit: Maximum number of slots that are used; it may be below `slots` if some tokens are padding.
    """

    slots: int
    limit: int | Tensor

    @classmethod
    def from_factor(cls, factor: float, index: Tensor, num_experts: int, real: Tensor | None) -> Capacity:
        """Return the capacity for the experts `index` [N, k]; `real` [N] is False for padding tokens (None: none)."""
        slots = math.ceil(factor * index.numel() / num_experts)
        if real is None:
            return cls(slots, slots)
        rows = real.sum().double() * index.shape[1]
        return cls(slots, (factor * rows / num_experts).ceil().long())


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Slots in the send buffer for the rows of one chunk of tokens, and the sizes of the exchange.

    Attributes:
        slot: Slot of each row; `num_slots`, the size of the send buffer, for rows that are not sent.
        send: Number of rows sent to each rank.
        receive: Number of rows received from each rank.
        local_expert: Expert of each received row, counted from the first one on this rank.
        num_kept: Number of rows that are not dropped.
    """

    slot: Tensor
    num_slots: int
    send: list[int]
    receive: list[int]
    local_expert: Tensor
    num_kept: int | Tensor


@dataclass(frozen=True, slots=True)
class _SortedRows:
    """Rows of one chunk of tokens, sorted by expert.

    Attributes:
        expert: Expert of each row; the number of experts for rows that are not computed.
        order: Indices of the rows in expert order.
        counts: Number of rows of each expert.
    """

    expert: Tensor
    order: Tensor
    counts: Tensor

    @classmethod
    def from_choices(cls, index: Tensor, num_experts: int, computed: Tensor | None) -> _SortedRows:
        """Sort the choices `index` [N, k] of the tokens in the mask `computed` [N]; None: all tokens."""
        expert = index.reshape(-1)
        if computed is not None:
            skipped = ~computed.unsqueeze(1).expand_as(index).reshape(-1)
            expert = expert.masked_fill(skipped, num_experts)
        order = torch.argsort(expert, stable=True)
        counts = count_rows(expert.unsqueeze(1), num_experts + 1, None)[:num_experts]
        return cls(expert, order, counts)

    def slots(self, sorted_slot: Tensor) -> Tensor:
        """Return the slot of each row in token order, from `sorted_slot`, the slots in expert order."""
        return torch.empty_like(self.expert).index_copy_(0, self.order, sorted_slot)


def _assign_uneven(chunks: Sequence[_SortedRows], group: dist.ProcessGroup, load: Tensor | None) -> list[_Assignment]:
    """Assign a slot in the send buffer to every row of each chunk of tokens, after one exchange of row counts.

    Rows that are not computed are not sent. `load` has the rows per expert that count as kept, over all chunks; None:
    all rows that are sent.
    """
    degree = group.size()
    counts = torch.stack([c.counts.view(degree, -1) for c in chunks], dim=1)
    received = all_to_all(torch.empty_like(counts), counts, group, Purpose.EXPERT_ROW_COUNTS)
    # One transfer to the host for all lists of splits, which an uneven all-to-all reads there.
    send, receive = torch.stack([c.sum(2).t() for c in (counts, received)]).tolist()
    local = torch.arange(counts.shape[2], device=counts.device).repeat(degree)
    assigned = []
    for i, rows in enumerate(chunks):
        num_slots = sum(send[i])
        sorted_slot = torch.arange(len(rows.expert), device=counts.device).clamp(max=num_slots)
        # `load` covers all chunks: it is counted with the first one.
        num_kept = num_slots if load is None else load.sum() if i == 0 else 0
        counts_here, num_received = received[:, i].reshape(-1), sum(receive[i])
        local_expert = local.repeat_interleave(counts_here, output_size=num_received)
        slot = rows.slots(sorted_slot)
        assigned.append(_Assignment(slot, num_slots, send[i], receive[i], local_expert, num_kept))
    return assigned


def _assign_capacity(rows: _SortedRows, capacity: Capacity, degree: int) -> _Assignment:
    """Assign the rows of each expert to the expert's slots, in token order; sizes do not depend on the data."""
    counts, num_experts = rows.counts, len(rows.counts)
    num_slots, limit = num_experts * capacity.slots, capacity.limit
    num_kept = counts.clamp(max=limit).sum()
    sorted_expert = rows.expert[rows.order]
    is_computed = sorted_expert < num_experts
    sorted_expert = sorted_expert.clamp(max=num_experts - 1)
    sorted_slot = torch.arange(len(rows.expert), device=counts.device)
    rank_in_expert = sorted_slot - (torch.cumsum(counts, 0) - counts)[sorted_expert]
    slot = sorted_expert * capacity.slots + rank_in_expert
    sorted_slot = torch.where(is_computed & (rank_in_expert < limit), slot, num_slots)
    splits = [num_slots // degree] * degree
    local = torch.arange(num_experts // degree, device=counts.device).repeat(degree)
    local_expert = local.repeat_interleave(capacity.slots)
    return _Assignment(rows.slots(sorted_slot), num_slots, splits, splits, local_expert, num_kept)


class ExpertWork(NamedTuple):
    """Computation of the experts of a rank.

    Attributes:
        compute: Function of rows [R, D] and their experts [R], counted from this rank's first one; returns [R, D].
        weights: Function that returns the local tensors of the parameters that `compute` reads.
    """

    compute: Callable[[Tensor, Tensor], Tensor]
    weights: Callable[[], Iterable[Tensor]]


def dispatch(
    hidden: Tensor,
    index: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    capacity: Capacity | None,
    routing: LayerRouting,
    work: ExpertWork,
    computed: Tensor | None = None,
    load: Tensor | None = None,
    chunks: int = 1,
) -> Tensor:
    """Compute the expert results [N k, D] of tokens [N, D]; zero for rows that are dropped or not computed.

    Args:
        hidden: Tokens [N, D].
        index: Experts [N, k] of the tokens. A row is one of the k choices of one token.
        num_experts: Number of experts; each rank of the group has an equal, contiguous range.
        group: Expert-parallel ranks; None: all experts are on this rank, which requires a capacity.
        capacity: Limit of the rows that each rank sends to an expert; None: no limit.
        routing: Statistics to which the rows of this pass are added.
        work: Computation of the experts.
        computed: Mask [N] of the tokens to compute; None: all.
        load: Number of rows of each expert for the statistics; None: all computed rows.
        chunks: Number of chunks of tokens, 1 with a capacity. Rows of one chunk are in flight while another chunk is
            computed.
    """
    masks = [None] * chunks if computed is None else computed.tensor_split(chunks)
    sorted_rows = [
        _SortedRows.from_choices(part, num_experts, mask)
        for part, mask in zip(index.tensor_split(chunks), masks, strict=True)
    ]
    degree, rank = (1, 0) if group is None else (group.size(), group.rank())
    if capacity is None:
        assert group is not None
        assigned = _assign_uneven(sorted_rows, group, load)
    else:
        assigned = [_assign_capacity(sorted_rows[0], capacity, degree)]
    if is_first_forward():
        load = reduce(add, (r.counts for r in sorted_rows)) if load is None else load
        sent = sum(sum(a.send) - a.send[rank] for a in assigned)
        received = sum(sum(a.receive) - a.receive[rank] for a in assigned)
        routing.add(load, reduce(add, (a.num_kept for a in assigned)), sent, received)
    overflow_row = capacity is not None or computed is not None
    choices = index.shape[1]

    def rows_to_send(tokens: Tensor, assignment: _Assignment) -> Tensor:
        rows = tokens.unsqueeze(1).expand(-1, choices, -1).reshape(-1, hidden.shape[-1])
        return _MoveRows.apply(rows, assignment.slot, assignment.num_slots, overflow_row, False)

    pieces = zip(hidden.tensor_split(chunks), assigned, strict=True)
    sends = (partial(rows_to_send, tokens, a) for tokens, a in pieces)
    computed_rows = zip(assigned, _exchange_and_work(sends, assigned, group, work), strict=True)
    results = [_MoveRows.apply(rows, a.slot, a.num_slots, overflow_row, True) for a, rows in computed_rows]
    return results[0] if chunks == 1 else torch.cat(results)


def _exchange_and_work(
    sends: Iterator[Callable[[], Tensor]],
    assigned: Sequence[_Assignment],
    group: dist.ProcessGroup | None,
    work: ExpertWork,
) -> Iterator[Tensor]:
    """Yield the results of each chunk, in the slots of its send buffer.

    With several chunks, the rows of later chunks and the results of earlier chunks are in flight during `work`. In
    backward, the weight gradients of the first chunk overlap with the last exchange. The caller moves the results of a
    chunk while those of later chunks are in flight; the same holds for their gradients in backward.
    """
    if len(assigned) == 1:
        (send,), (a,) = sends, assigned
        results = work.compute(_exchange(send(), a.send, a.receive, group), a.local_expert)
        yield _exchange(results, a.receive, a.send, group)
        return
    assert group is not None
    # Send all rows before any results, so that a link that is the bottleneck is never idle before the last results.
    arriving = [
        PendingCollective(*_exchange_pair(a.send, a.receive, group), send())
        for send, a in zip(sends, assigned, strict=True)
    ]
    deferred = DeferredWeights(work.weights())
    returning = []
    for index, (pending, a) in enumerate(zip(arriving, assigned, strict=True)):
        rows = pending.finish()
        with nullcontext() if index else deferred:
            results = work.compute(rows, a.local_expert)
        back = _exchange_pair(a.receive, a.send, group)
        returning.append(PendingCollective(*back, results))
    for pending in returning:
        yield pending.finish()
