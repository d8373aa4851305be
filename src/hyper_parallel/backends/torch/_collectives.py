"""Collectives on local tensors, as autograd functions, over one process group.

Tensor parallelism keeps activations between regions as a shard of the tokens: `B` sequences of `S` tokens are seen as
one list of B*S tokens, cut into equal pieces of ceil(B*S / tp); the last pieces are padded. A piece has the shape
[1, piece, D], so that modules written for [B, S, D] accept it. Cutting the list of tokens instead of every sequence
needs no copy on either side of a collective, and no divisibility.

    gather_tokens   [1, piece, D] on each rank -> [B, S, D] on every rank    backward: reduce-scatter
    scatter_tokens  [B, S, D] summands         -> [1, piece, D] of their sum  backward: all-gather
    slice_tokens    [B, S, D] equal on ranks   -> [1, piece, D]               backward: own part, zero elsewhere

Nothing here dispatches a DTensor operator: in eager mode that costs more than the small operators themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch._purpose import purpose
from hyper_parallel.ir import Purpose

# torch 2.13 renamed the two calls and deprecates the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def piece_size(num_tokens: int, degree: int) -> int:
    """Tokens of one rank's piece: ceil(num_tokens / degree)."""
    return -(-num_tokens // degree)


def _padded(flat: Tensor, rows: int) -> Tensor:
    """`flat` with zero rows appended up to `rows`; itself when it has as many."""
    missing = rows - flat.shape[0]
    if not missing:
        return flat.contiguous()
    return torch.cat((flat, flat.new_zeros(missing, *flat.shape[1:])))


def _gather(
    piece: Tensor, batch: tuple[int, ...], group: dist.ProcessGroup, name: Purpose
) -> Tensor:
    """All pieces as one tensor of shape (*batch, D)."""
    rows = piece.shape[-2]
    out = piece.new_empty(group.size() * rows, piece.shape[-1])
    with purpose(name):
        _all_gather(out, piece.reshape(rows, -1).contiguous(), group=group)
    num_tokens = _num_tokens(batch)
    if num_tokens != out.shape[0]:
        out = out[:num_tokens]
    return out.view(*batch, -1)


def _scatter(partial: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """This rank's piece of the sum over the ranks."""
    flat = partial.reshape(-1, partial.shape[-1])
    rows = piece_size(flat.shape[0], group.size())
    out = flat.new_empty(rows, flat.shape[1])
    return reduce_into(out, _padded(flat, rows * group.size()), group, name).unsqueeze(0)


def _own(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    flat = full.reshape(-1, full.shape[-1])
    rows = piece_size(flat.shape[0], group.size())
    return _padded(flat[group.rank() * rows : (group.rank() + 1) * rows], rows).unsqueeze(0)


def _num_tokens(batch: tuple[int, ...]) -> int:
    count = 1
    for size in batch:
        count *= size
    return count


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Tensor, batch: tuple[int, ...], group: dist.ProcessGroup, name: Purpose
    ) -> Tensor:
        ctx.group, ctx.purpose = group, name
        return _gather(piece, batch, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(grad, ctx.group, ctx.purpose.backward), None, None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
        ctx.group, ctx.purpose = group, name
        ctx.batch = tuple(partial.shape[:-1])
        return _scatter(partial, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.batch, ctx.group, ctx.purpose.backward), None, None


class _SliceTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.shape = full.shape
        return _own(full, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.shape[-2]
        out = grad.new_zeros(ctx.group.size() * rows, grad.shape[-1])
        start = ctx.group.rank() * rows
        out[start : start + rows] = grad[0]
        return out[: _num_tokens(tuple(ctx.shape[:-1]))].view(ctx.shape), None


class _JoinTokens(torch.autograd.Function):
    """Pieces to the whole for a consumer that every rank repeats: its gradients are equal, each rank keeps its own."""

    @staticmethod
    def forward(
        ctx: Any, piece: Tensor, batch: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group = group
        return _gather(piece, batch, group, Purpose.LOGITS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own(grad, ctx.group), None, None


class _JoinColumns(torch.autograd.Function):
    """Slices of the last dim to the whole, for a consumer that every rank repeats."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = gather_rows(part, group, Purpose.LOGITS)
        return parts.movedim(0, -2).reshape(*part.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


class _JoinSequence(torch.autograd.Function):
    """Tokens of [B, local, ...] to whole sequences, for a consumer that every rank repeats."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, local.shape
        ctx.save_for_backward(order)
        rows = gather_rows(local, group, Purpose.LOGITS)
        return rows.transpose(0, 1).flatten(1, 2).index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        batch, local, *rest = ctx.shape
        out = grad.new_zeros(batch, ctx.group.size() * local, *rest)
        out.index_copy_(1, order, grad)
        return out.narrow(1, ctx.group.rank() * local, local).contiguous(), None, None


class _AllReduce(torch.autograd.Function):
    """Sum over ranks where asked: forward, backward, or both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, name: Purpose, forward: bool, backward: bool
    ) -> Tensor:
        ctx.group, ctx.purpose, ctx.sum_backward = group, name, backward
        return all_reduce(x.contiguous().clone(), group, name) if forward else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.sum_backward:
            grad = all_reduce(grad.contiguous().clone(), ctx.group, ctx.purpose.backward)
        return grad, None, None, None, None


def gather_tokens(
    piece: Tensor,
    batch: tuple[int, ...],
    group: dist.ProcessGroup,
    name: Purpose = Purpose.SEQUENCE_GATHER,
) -> Tensor:
    """All tokens, [*batch, D], from every rank's piece; the ranks then do different work on them."""
    return _GatherTokens.apply(piece, batch, group, name)


def scatter_tokens(
    partial: Tensor, group: dist.ProcessGroup, name: Purpose = Purpose.SEQUENCE_SCATTER
) -> Tensor:
    """This rank's piece of the sum of every rank's [B, S, D]."""
    return _ScatterTokens.apply(partial, group, name)


def slice_tokens(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece of a tensor that is equal on all ranks."""
    return _SliceTokens.apply(full, group)


def join_tokens(piece: Tensor, batch: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """All tokens from every rank's piece; the ranks then all do the same with them."""
    return _JoinTokens.apply(piece, batch, group)


def join_columns(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole last dim from every rank's slice; the ranks then all do the same with it."""
    return _JoinColumns.apply(part, group)


def join_sequence(local: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whole sequences [B, S, ...] from every rank's tokens; the ranks then all do the same with them.

    Args:
        local: [B, local tokens, ...].
        order: For every position the place of its token among the tokens of all ranks, laid end to end.
        group: The ranks.
    """
    return _JoinSequence.apply(local, order, group)


def sum_forward(x: Tensor, group: dist.ProcessGroup, name: Purpose = Purpose.ACTIVATIONS) -> Tensor:
    """Sum over ranks; the gradient, equal on all ranks, passes unchanged."""
    return _AllReduce.apply(x, group, name, True, False)


def sum_backward(
    x: Tensor, group: dist.ProcessGroup, name: Purpose = Purpose.ACTIVATIONS
) -> Tensor:
    """The same values; the ranks' gradients are summed."""
    return _AllReduce.apply(x, group, name, False, True)


def sum_both(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Sum over ranks, forward and backward."""
    return _AllReduce.apply(x, group, name, True, True)


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, name: Purpose) -> Tensor:
    """Sum over ranks in place; no gradient."""
    with purpose(name):
        dist.all_reduce(x, group=group)
    return x


def all_to_all(
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    name: Purpose,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> Tensor:
    """Fill `out` with the rows that all ranks send this one, in their order; no gradient.

    Args:
        out: The result.
        x: Rows for rank 0, then for rank 1, ...
        group: The ranks.
        name: What for.
        receive: Rows from each rank; None: equally many.
        send: Rows for each rank.
    """
    with purpose(name):
        dist.all_to_all_single(out, x, receive, send, group=group)
    return out


def gather_rows(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Stack every rank's tensor along a new first dim; no gradient."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    with purpose(name):
        _all_gather(out, x.contiguous(), group=group)
    return out.view(group.size(), *x.shape)


def reduce_rows(rows: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """This rank's row of the sum of every rank's [ranks, ...]; no gradient."""
    return reduce_into(torch.empty_like(rows[0]), rows.flatten(0, 1), group, name)


def reduce_into(out: Tensor, rows: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Fill `out` with this rank's rows of the sum; no gradient."""
    with purpose(name):
        _reduce_scatter(out, rows, group=group)
    return out
