"""Token dispatch: tokens travel to the ranks of their experts and the results travel back.

    hidden [N, D], index [N, k]
      sort         N k rows by expert, so that the rows of one expert-parallel rank lie together
      counts       all-to-all of the number of rows per expert
      dispatch     all-to-all with uneven splits: each rank receives R rows for the experts it holds
      experts      the model's own code, on [R, D]
      combine      the same all-to-all backwards, rows to their places, weighted sum over k

With a capacity every expert works on exactly `capacity` rows of every rank. Each row gets a place among those of its
expert, first tokens first; what is over goes to one slot behind all of them, which is cut off. No size depends on the
data then, so nothing is read by the host, and a step can be captured once and planned.

Rows of padding are sorted behind those of all experts and go to the same slot; without a capacity they are not sent.

Backward is exact: the gradient of an all-to-all is the all-to-all with its splits exchanged. No row is used twice, so
gradients are placed, never added by atomics, and sums are made in one fixed order on every device.
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
from hyper_parallel.backends.torch.experts.routing import LayerRouting, counts_now
from hyper_parallel.ir import Purpose


def touch(out: Any, params: Iterable[Tensor]) -> Any:
    """`out`, or a tuple that begins with it, and a zero gradient for each of `params` that has one.

    Reductions over ranks need one on every rank.
    """
    params = [p for p in params if p.requires_grad]

    def zeros(grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, params)

    first, *rest = out if isinstance(out, tuple) else (out,)
    touched = paired(lambda x, *_: x.view_as(x), zeros, first, *params)
    return (touched, *rest) if isinstance(out, tuple) else touched


class _Move(torch.autograd.Function):
    """Rows placed at an index of [size, D], each place at most once, or taken from there: one is the other's backward.

    With a `spare`, index `size` is a place that is cut off: any number of rows go there, and zero is taken from it.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, size: int, spare: bool, takes: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size, ctx.spare, ctx.takes = size, spare, takes
        return (_taken if takes else _placed)(rows, index, size, spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _placed if ctx.takes else _taken
        return back(grad, *ctx.saved_tensors, ctx.size, ctx.spare), None, None, None, None


def place(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """[size, D] with `rows` at the places `index`, each at most once, and zero elsewhere."""
    return _Move.apply(rows, index, size, False, False)


def _taken(rows: Tensor, index: Tensor, size: int, spare: bool) -> Tensor:
    if spare:
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows[index]


def _placed(rows: Tensor, index: Tensor, size: int, spare: bool) -> Tensor:
    make = rows.new_empty if len(index) == size and not spare else rows.new_zeros
    out = make(size + spare, *rows.shape[1:]).index_copy_(0, index, rows)
    return out[:size] if spare else out


def _exchange(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Rows for every rank, `send` of them each, become the rows of every rank, `receive` of them each."""
    if group is None:
        return rows

    def move(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        return all_to_all(out, rows.contiguous(), group, Purpose.EXPERT_ROWS, receive, send)

    return paired(lambda x: move(x, send, receive), lambda grad: move(grad, receive, send), rows)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Rows that an expert takes of one rank in one pass.

    Attributes:
        slots: Places that there are for them, a size that does not depend on the data.
        limit: How many are used: fewer when some tokens are padding.
    """

    slots: int
    limit: int | Tensor

    @classmethod
    def of(cls, factor: float, index: Tensor, num_experts: int, real: Tensor | None) -> Capacity:
        """Return the capacity for `index` [N, k], of which only the `real` tokens [N] count."""
        slots = math.ceil(factor * index.numel() / num_experts)
        if real is None:
            return cls(slots, slots)
        rows = real.sum().double() * index.shape[1]
        return cls(slots, (factor * rows / num_experts).ceil().long())


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
    """Results [N k, D] for the experts `index` [N, k] of tokens [N, D]; zero for rows that are dropped.

    Args:
        hidden: The tokens.
        index: Their experts. A row is one of the k choices of one token.
        num_experts: Over all ranks of the group, which hold equal runs of them in order.
        group: Expert-parallel ranks; None: every expert is here.
        capacity: Rows that an expert takes of each rank; None: as many as there are.
        routing: Counts the rows.
        work: Results [R, D] of rows [R, D], each by the expert [R] of this rank, counted from the first it holds.
        computed: [N] of the tokens that are computed at all; None: all.
        load: Rows of each expert that are counted; None: all that are computed.
    """
    flat = index.reshape(-1)
    if computed is not None:
        left_out = ~computed.unsqueeze(1).expand_as(index).reshape(-1)
        flat = flat.masked_fill(left_out, num_experts)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    degree, me = (1, 0) if group is None else (group.size(), group.rank())
    expert = torch.arange(num_experts // degree, device=flat.device).repeat(degree)
    sorted_slot = torch.arange(len(flat), device=flat.device)
    if capacity is None:
        assert group is not None
        theirs = all_to_all(torch.empty_like(counts), counts, group, Purpose.EXPERT_ROW_COUNTS)
        # One transfer to the host for both lists of splits: an uneven all-to-all takes them from there.
        both = torch.stack((counts.view(degree, -1).sum(1), theirs.view(degree, -1).sum(1)))
        send, receive = both.tolist()
        slots = sum(send)
        sorted_slot = sorted_slot.clamp(max=slots)
        kept: int | Tensor = slots if load is None else load.sum()
        local_expert = expert.repeat_interleave(theirs, output_size=sum(receive))
    else:
        slots, limit = num_experts * capacity.slots, capacity.limit
        kept = counts.clamp(max=limit).sum()
        sorted_expert = flat[order]
        inside = sorted_expert < num_experts
        sorted_expert = sorted_expert.clamp(max=num_experts - 1)
        number = sorted_slot - (torch.cumsum(counts, 0) - counts)[sorted_expert]
        at = sorted_expert * capacity.slots + number
        sorted_slot = torch.where(inside & (number < limit), at, slots)
        send = receive = [slots // degree] * degree
        local_expert = expert.repeat_interleave(capacity.slots)
    if counts_now():
        load = counts if load is None else load
        routing.add(load, kept, sum(send) - send[me], sum(receive) - receive[me])
    slot = torch.empty_like(flat).index_copy_(0, order, sorted_slot)
    rows = hidden.unsqueeze(1).expand(-1, index.shape[1], -1).reshape(-1, hidden.shape[-1])
    spare = capacity is not None or computed is not None
    rows = _Move.apply(rows, slot, slots, spare, False)
    results = work(_exchange(rows, send, receive, group), local_expert)
    results = _exchange(results, receive, send, group)
    return _Move.apply(results, slot, slots, spare, True)
