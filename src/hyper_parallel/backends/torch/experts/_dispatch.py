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

Backward is exact: the gradient of an all-to-all is the all-to-all with its splits exchanged. No row is used twice, so
gradients are placed, never added by atomics, and sums are made in one fixed order on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch._collectives import all_to_all, paired
from hyper_parallel.ir import Purpose


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def touch(out: Any, params: list[Tensor]) -> Any:
    """`out`, or a tuple that begins with it, and a zero gradient for each of `params`.

    Reductions over ranks need one on every rank.
    """
    if isinstance(out, tuple):
        return _Touch.apply(out[0], *params), *out[1:]
    return _Touch.apply(out, *params)


class _Move(torch.autograd.Function):
    """Rows taken from, or placed at, an index of [size, D], each at most once; one is the other's backward.

    With a `spare`, rows of index `size` are left out, any number of them, and zero where they are taken.
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
    if spare:
        return rows.new_zeros(size + 1, *rows.shape[1:]).index_copy_(0, index, rows)[:size]
    make = rows.new_empty if len(index) == size else rows.new_zeros
    return make(size, *rows.shape[1:]).index_copy_(0, index, rows)


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
class Dispatch:
    """Where the rows of one pass go. A row is one of the k choices of one token; there are N k of them.

    Attributes:
        counts: [E] rows the router gave each expert, dropped ones included.
        kept: Rows that are worked on; [] with a capacity.
        local_expert: [R] expert of each row this rank works on, counted from the first it holds.
        group: Expert-parallel ranks; None: every expert is here.
        send: Rows for each rank of the group.
        receive: Rows from each rank of the group.
        slots: Slots of all rows: N k, or with a capacity E * capacity.
        limited: There is a capacity.
        index: [N k] row of each slot; with a capacity, slot of each row, `slots` when it is dropped.
    """

    counts: Tensor
    kept: int | Tensor
    local_expert: Tensor
    group: dist.ProcessGroup | None
    send: list[int]
    receive: list[int]
    slots: int
    limited: bool
    index: Tensor

    @classmethod
    def plan(
        cls,
        index: Tensor,
        num_experts: int,
        group: dist.ProcessGroup | None,
        capacity: int | None = None,
    ) -> Dispatch:
        """Sort the rows of one pass, of experts `index` [N, k], and exchange their counts.

        Of `num_experts` over all ranks, the ranks of the group hold equal runs in order, each with `capacity` slots.
        """
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        degree = 1 if group is None else group.size()
        local = num_experts // degree
        if capacity is not None:
            begins = torch.cumsum(counts, 0) - counts
            expert = flat[order]
            number = torch.arange(len(order), device=order.device) - begins[expert]
            slots = num_experts * capacity
            sorted_slot = torch.where(number < capacity, expert * capacity + number, slots)
            slot = torch.empty_like(flat).index_copy_(0, order, sorted_slot)
            held = torch.arange(local, device=flat.device)
            local_expert = held.repeat_interleave(capacity).repeat(degree)
            kept = counts.clamp(max=capacity).sum()
            even = [slots // degree] * degree
            return cls(counts, kept, local_expert, group, even, even, slots, True, slot)
        rows = len(flat)
        if group is None:
            return cls(counts, rows, flat[order], None, [], [], rows, False, order)
        theirs = all_to_all(torch.empty_like(counts), counts, group, Purpose.EXPERT_ROW_COUNTS)
        # One transfer to the host for both lists of splits: an uneven all-to-all takes them from there.
        both = torch.stack((counts.view(degree, local).sum(1), theirs.view(degree, local).sum(1)))
        send, receive = both.tolist()
        expert = torch.arange(local, device=index.device).repeat(degree)
        local_expert = expert.repeat_interleave(theirs, output_size=sum(receive))
        return cls(counts, rows, local_expert, group, send, receive, rows, False, order)

    def scatter(self, hidden: Tensor) -> Tensor:
        """[R, D]: the rows of all ranks for the experts of this one, from [N, D]."""
        k = len(self.index) // max(1, hidden.shape[0])
        rows = hidden.unsqueeze(1).expand(-1, k, -1).reshape(-1, hidden.shape[-1])
        rows = _Move.apply(rows, self.index, self.slots, self.limited, not self.limited)
        return _exchange(rows, self.send, self.receive, self.group)

    def gather(self, results: Tensor) -> Tensor:
        """[N k, D] results of this rank's tokens, from [R, D]; zero for dropped rows."""
        rows = _exchange(results, self.receive, self.send, self.group)
        return _Move.apply(rows, self.index, self.slots, self.limited, self.limited)

    @property
    def exchanged(self) -> tuple[int, int]:
        """Rows sent to and received from other ranks, empty slots included."""
        if self.group is None:
            return 0, 0
        me = self.group.rank()
        return sum(self.send) - self.send[me], sum(self.receive) - self.receive[me]
