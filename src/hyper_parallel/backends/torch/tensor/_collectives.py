"""Collectives of two-dimensional tensor parallelism on local tensors: along features, and between the two cuts.

    gather_features   [..., C] on each rank  -> [..., g C]         backward: reduce-scatter
    scatter_features  [..., g C] summands    -> [..., C] of the sum  backward: all-gather
    tokens_to_features / features_to_tokens   [1, n, g C] <-> [1, g n, C], an all-to-all; each is the other's backward

Tokens are gathered and scattered by `backends.torch._collectives`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch._collectives import all_to_all, gather_rows, reduce_into
from hyper_parallel.ir import Purpose


def _gather(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    parts = gather_rows(x.reshape(-1, x.shape[-1]), group, name)
    return parts.transpose(0, 1).reshape(*x.shape[:-1], -1)


def _scatter(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    ranks = group.size()
    parts = x.reshape(-1, ranks, x.shape[-1] // ranks).transpose(0, 1).contiguous()
    out = parts.new_empty(parts.shape[1:])
    reduce_into(out, parts.view(-1, parts.shape[-1]), group, name)
    return out.view(*x.shape[:-1], -1)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part r of the first dim goes to rank r; the parts of all ranks come back in their order."""
    return all_to_all(torch.empty_like(parts), parts, group, Purpose.RELAYOUT)


def _to_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, n, C] of this rank's tokens to [1, g n, C / g] of all tokens, this rank's features."""
    ranks = group.size()
    parts = x.reshape(x.shape[-2], ranks, x.shape[-1] // ranks).transpose(0, 1).contiguous()
    return _all_to_all(parts, group).view(1, -1, parts.shape[-1])


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [1, g n, C / g] to [1, n, C]."""
    ranks = group.size()
    parts = x.reshape(ranks, x.shape[-2] // ranks, x.shape[-1]).contiguous()
    return _all_to_all(parts, group).transpose(0, 1).reshape(1, parts.shape[1], -1)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
        ctx.group, ctx.purpose = group, name
        return _gather(x, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad, ctx.group, ctx.purpose.backward), None, None


class _ScatterFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
        ctx.group, ctx.purpose = group, name
        return _scatter(x, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.purpose.backward), None, None


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_features: bool) -> Tensor:
        ctx.group, ctx.to_features = group, to_features
        return (_to_features if to_features else _to_tokens)(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.to_features else _to_features)(grad, ctx.group), None, None


def gather_features(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """The whole last dim from every rank's slice; the ranks then do different work on it."""
    return _GatherFeatures.apply(x, group, name)


def scatter_features(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """This rank's slice of the last dim of the sum of every rank's tensor."""
    return _ScatterFeatures.apply(x, group, name)


def tokens_to_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's tokens with all features, [1, n, C], to all tokens with a rank's features, [1, g n, C / g]."""
    return _Relayout.apply(x, group, True)


def features_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens with a rank's features, [1, g n, C / g], to a rank's tokens with all features, [1, n, C]."""
    return _Relayout.apply(x, group, False)
