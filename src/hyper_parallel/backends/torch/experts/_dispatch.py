"""Token dispatch: rows are sent to the ranks of their experts, results are sent back.

    hidden [N, D], index [N, k]
      sort         N k rows by expert, so that the rows of one expert-parallel rank are contiguous
      counts       all-to-all of the number of rows per expert
      dispatch     all-to-all with uneven splits: each rank receives R rows for its experts
      experts      code of the model, on [R, D]
      combine      inverse all-to-all, inverse permutation, weighted sum over k

With a capacity, every expert computes exactly `capacity` rows of every rank. Each row is assigned a slot of its expert,
in token order. Surplus rows are written to one overflow row at the end, which is dropped. No size depends on the data,
so there is no device synchronization, and a step can be captured once and planned.

Padding rows are sorted behind the rows of all experts and use the overflow row. Without a capacity they are not sent.

Backward is exact: the gradient of an all-to-all is the all-to-all with exchanged splits. No row is used twice, so
gradients are scattered without atomic additions, and sums have one fixed order on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch.collectives import all_to_all, paired
from hyper_parallel.backends.torch.experts.routing import LayerRouting, is_first_forward
from hyper_parallel.ir import Purpose


def attach_zero_gradients(out: Any, params: Iterable[Tensor]) -> Any:
    """Return `out`, and attach a zero gradient for each trainable tensor of `params` to its backward.

    Reductions over ranks need a gradient of every parameter on every rank.

    Args:
        out: Tensor, or tuple with a tensor as first element.
        params: Parameters without a contribution to `out`.
    """
    params = [p for p in params if p.requires_grad]

    def zeros(grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, params)

    first, *rest = out if isinstance(out, tuple) else (out,)
    with_gradients = paired(lambda x, *_: x.view_as(x), zeros, first, *params)
    return (with_gradients, *rest) if isinstance(out, tuple) else with_gradients


class _MoveRows(torch.autograd.Function):
    """Scatter rows to distinct indices of [size, D], or gather them from there; each is the backward of the other.

    With an `overflow_row`, index `size` is a row that is dropped: any number of rows are scattered to it, and the rows
    gathered from it are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, size: int, overflow_row: bool, gathers: bool
    ) -> Tensor:
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
    """Return [size, D] with `rows` at distinct indices and zero elsewhere."""
    return _MoveRows.apply(rows, index, size, False, False)


def _gather(rows: Tensor, index: Tensor, size: int, overflow_row: bool) -> Tensor:
    if overflow_row:
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows[index]


def _scatter(rows: Tensor, index: Tensor, size: int, overflow_row: bool) -> Tensor:
    new = rows.new_empty if len(index) == size and not overflow_row else rows.new_zeros
    out = new(size + overflow_row, *rows.shape[1:]).index_copy_(0, index, rows)
    return out[:size] if overflow_row else out


def _exchange(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Run an all-to-all of rows; `send` and `receive` are the numbers of rows per rank."""
    if group is None:
        return rows

    def exchange(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        return all_to_all(out, rows.contiguous(), group, Purpose.EXPERT_ROWS, receive, send)

    return paired(
        lambda x: exchange(x, send, receive), lambda grad: exchange(grad, receive, send), rows
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Maximum of rows per expert, rank and pass.

    Attributes:
        slots: Slots per expert, a size independent of the data.
        limit: Number of usable slots; smaller if some tokens are padding.
    """

    slots: int
    limit: int | Tensor

    @classmethod
    def from_factor(
        cls, factor: float, index: Tensor, num_experts: int, real: Tensor | None
    ) -> Capacity:
        """Return the capacity for `index` [N, k], counting only the `real` tokens [N]."""
        slots = math.ceil(factor * index.numel() / num_experts)
        if real is None:
            return cls(slots, slots)
        rows = real.sum().double() * index.shape[1]
        return cls(slots, (factor * rows / num_experts).ceil().long())


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Slots of the sorted rows in the send buffer, and sizes of the exchange.

    Attributes:
        sorted_slot: Slot of each row, in expert order; `num_slots` for rows that are not sent.
        num_slots: Rows of the send buffer.
        send: Rows sent to each rank.
        receive: Rows received from each rank.
        local_expert: Expert of each received row, counted from the first one on this rank.
        num_kept: Number of rows that are not dropped.
    """

    sorted_slot: Tensor
    num_slots: int
    send: list[int]
    receive: list[int]
    local_expert: Tensor
    num_kept: int | Tensor


def _assign_uneven(
    sorted_slot: Tensor,
    counts: Tensor,
    expert: Tensor,
    group: dist.ProcessGroup,
    load: Tensor | None,
) -> _Assignment:
    """Exchange the row counts and send exactly these rows.

    Args:
        sorted_slot: Index of each row in expert order.
        counts: Rows of each expert on this rank.
        expert: Local experts, once per rank.
        group: Expert-parallel ranks.
        load: Rows of each expert to count; None: all.
    """
    received_counts = all_to_all(torch.empty_like(counts), counts, group, Purpose.EXPERT_ROW_COUNTS)
    # One transfer to the host for both lists of splits, which an uneven all-to-all reads there.
    by_rank = [c.view(group.size(), -1).sum(1) for c in (counts, received_counts)]
    send, receive = torch.stack(by_rank).tolist()
    num_slots = sum(send)
    sorted_slot = sorted_slot.clamp(max=num_slots)
    num_kept: int | Tensor = num_slots if load is None else load.sum()
    local_expert = expert.repeat_interleave(received_counts, output_size=sum(receive))
    return _Assignment(sorted_slot, num_slots, send, receive, local_expert, num_kept)


def _assign_capacity(
    sorted_slot: Tensor,
    counts: Tensor,
    expert: Tensor,
    sorted_expert: Tensor,
    capacity: Capacity,
    degree: int,
) -> _Assignment:
    """Assign the rows of each expert to its slots, in token order; sizes do not depend on the data.

    Args:
        sorted_slot: Index of each row in expert order.
        counts: Rows of each expert on this rank.
        expert: Local experts, once per rank.
        sorted_expert: Expert of each row in expert order; number of experts for rows that are not computed.
        capacity: Slots of an expert.
        degree: Number of expert-parallel ranks.
    """
    num_experts = len(counts)
    num_slots, limit = num_experts * capacity.slots, capacity.limit
    num_kept = counts.clamp(max=limit).sum()
    is_computed = sorted_expert < num_experts
    sorted_expert = sorted_expert.clamp(max=num_experts - 1)
    rank_in_expert = sorted_slot - (torch.cumsum(counts, 0) - counts)[sorted_expert]
    slot = sorted_expert * capacity.slots + rank_in_expert
    sorted_slot = torch.where(is_computed & (rank_in_expert < limit), slot, num_slots)
    splits = [num_slots // degree] * degree
    local_expert = expert.repeat_interleave(capacity.slots)
    return _Assignment(sorted_slot, num_slots, splits, splits, local_expert, num_kept)


def dispatch(
    hidden: Tensor,
    index: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    capacity: Capacity | None,
    routing: LayerRouting,
    work: Callable[[Tensor, Tensor], Tensor],
    computed: Tensor | None = None,
    load: Tensor | None = None,
) -> Tensor:
    """Compute the expert results [N k, D] of tokens [N, D]; zero for dropped rows.

    Args:
        hidden: Tokens [N, D].
        index: Experts [N, k] of the tokens. A row is one of the k choices of one token.
        num_experts: Number of experts; each rank of the group has an equal, contiguous range.
        group: Expert-parallel ranks; None: all experts are on this rank.
        capacity: Maximum of rows per expert and rank; None: unlimited.
        routing: Counter of rows.
        work: Function of rows [R, D] and their experts [R], counted from this rank's first one; returns [R, D].
        computed: Mask [N] of the tokens to compute; None: all.
        load: Rows of each expert to count; None: all computed rows.
    """
    flat = index.reshape(-1)
    if computed is not None:
        skipped = ~computed.unsqueeze(1).expand_as(index).reshape(-1)
        flat = flat.masked_fill(skipped, num_experts)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    degree, rank = (1, 0) if group is None else (group.size(), group.rank())
    expert = torch.arange(num_experts // degree, device=flat.device).repeat(degree)
    sorted_slot = torch.arange(len(flat), device=flat.device)
    if capacity is None:
        assert group is not None
        assigned = _assign_uneven(sorted_slot, counts, expert, group, load)
    else:
        assigned = _assign_capacity(sorted_slot, counts, expert, flat[order], capacity, degree)
    send, receive, num_slots = assigned.send, assigned.receive, assigned.num_slots
    if is_first_forward():
        load = counts if load is None else load
        routing.add(load, assigned.num_kept, sum(send) - send[rank], sum(receive) - receive[rank])
    slot = torch.empty_like(flat).index_copy_(0, order, assigned.sorted_slot)
    rows = hidden.unsqueeze(1).expand(-1, index.shape[1], -1).reshape(-1, hidden.shape[-1])
    overflow_row = capacity is not None or computed is not None
    rows = _MoveRows.apply(rows, slot, num_slots, overflow_row, False)
    results = work(_exchange(rows, send, receive, group), assigned.local_expert)
    results = _exchange(results, receive, send, group)
    return _MoveRows.apply(results, slot, num_slots, overflow_row, True)
