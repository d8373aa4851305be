"""Dropless token dispatch: every token travels to the ranks of its experts and its results travel back.

    hidden [N, D], index [N, k]
      sort         N k rows by expert, so that the rows of one expert-parallel rank lie together
      counts       all-to-all of the number of rows per expert
      dispatch     all-to-all with uneven splits: each rank receives R rows for the experts it holds
      experts      the model's own code, on [R, D]
      combine      the same all-to-all backwards, rows to their places, weighted sum over k

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

from hyper_parallel.backends.torch import _collectives
from hyper_parallel.backends.torch.experts._rows import place, take
from hyper_parallel.ir import Purpose


def _exchange(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    name = Purpose.EXPERT_ROWS
    return _collectives.all_to_all(out, rows.contiguous(), group, name, receive, send)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        return _exchange(grad, receive, send, ctx.group), None, None, None


class _Touch(torch.autograd.Function):
    """The same tensor, with a zero gradient for every parameter, so that ranks without tokens have gradients too."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Rows for every rank, `send` of them each, become the rows of every rank, `receive` of them each."""
    return _AllToAll.apply(rows, send, receive, group)


def touch(out: Tensor, params: list[Tensor]) -> Tensor:
    """`out`, and a zero gradient for each of `params`: reductions over ranks need one on every rank."""
    return _Touch.apply(out, *params)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where the rows of one pass go. A row is one of the k choices of one token; there are N k of them.

    Attributes:
        size: N k.
        order: [N k] rows sorted by expert.
        counts: [E] rows the router gave each expert.
        local_expert: [R] expert of each row this rank works on, counted from the first it holds.
        group: Expert-parallel ranks; None: every expert is here.
        send: Rows for each rank of the group.
        receive: Rows from each rank of the group.
    """

    size: int
    order: Tensor
    counts: Tensor
    local_expert: Tensor
    group: dist.ProcessGroup | None
    send: list[int]
    receive: list[int]

    @classmethod
    def plan(
        cls,
        index: Tensor,
        num_experts: int,
        group: dist.ProcessGroup | None,
    ) -> Dispatch:
        """Sort the rows of one pass and exchange their counts.

        Args:
            index: [N, k] experts of each token; the ranks of the group hold equal runs of experts in order.
            num_experts: Experts over all ranks.
            group: Expert-parallel ranks; None: one rank has all experts.
        """
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        if group is None:
            return cls(len(flat), order, counts, flat[order], None, [], [])
        degree = group.size()
        local = num_experts // degree
        theirs = torch.empty_like(counts)
        _collectives.all_to_all(theirs, counts, group, Purpose.EXPERT_ROW_COUNTS)
        # One transfer to the host for both lists of splits.
        both = torch.stack((counts.view(degree, local).sum(1), theirs.view(degree, local).sum(1)))
        send, receive = both.tolist()
        expert = torch.arange(local, device=index.device).repeat(degree)
        local_expert = expert.repeat_interleave(theirs, output_size=sum(receive))
        return cls(len(flat), order, counts, local_expert, group, send, receive)

    def scatter(self, hidden: Tensor) -> Tensor:
        """[R, D]: the rows of all ranks for the experts of this one, from [N, D]."""
        k = self.size // max(1, hidden.shape[0])
        repeated = hidden.unsqueeze(1).expand(-1, k, -1).reshape(-1, hidden.shape[-1])
        rows = take(repeated, self.order)
        if self.group is None:
            return rows
        return all_to_all(rows, self.send, self.receive, self.group)

    def gather(self, results: Tensor) -> Tensor:
        """[N k, D] results of this rank's tokens in the order of `index`, from [R, D]."""
        if self.group is not None:
            results = all_to_all(results, self.receive, self.send, self.group)
        return place(results, self.order, self.size)

    @property
    def kept(self) -> int:
        """Rows that are worked on: all."""
        return self.size

    @property
    def exchanged(self) -> tuple[int, int]:
        """Rows sent to and received from other ranks."""
        if self.group is None:
            return 0, 0
        me = self.group.rank()
        return sum(self.send) - self.send[me], sum(self.receive) - self.receive[me]
