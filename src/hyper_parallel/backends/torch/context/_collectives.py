"""Ulysses: all-to-alls that trade heads for tokens before attention, and tokens for heads after it.

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch._collectives import all_to_all
from hyper_parallel.backends.torch.context._apply import Context
from hyper_parallel.ir import Purpose

_TO_TOKENS: Final = Purpose.HEADS_FOR_TOKENS
_TO_HEADS: Final = Purpose.TOKENS_FOR_HEADS


def trade_heads_for_tokens(context: Context, *whole: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, D] of all heads to [B, H / u, u S, D]: this rank's heads of all the place's tokens."""
    return _TradeTokens.apply(context, *whole)  # type: ignore[no-any-return]


def trade_tokens_for_heads(context: Context, part: Tensor) -> Tensor:
    """[B, H / u, u S, D] back to [B, H, S, D]."""
    return _TradeHeads.apply(context, part)


def _trade(context: Context, parts: list[Tensor], name: Purpose) -> list[Tensor]:
    """All-to-all among the Ulysses ranks of a place, in one call for several tensors of [ulysses, ...]."""
    group, ulysses = context.group, context.ulysses
    send = torch.cat([p.reshape(ulysses, -1) for p in parts], dim=1)
    came = torch.empty_like(send)
    if ulysses == group.size():
        all_to_all(came, send, group, name)
    else:
        first = group.rank() // ulysses * ulysses
        splits = [0] * group.size()
        splits[first : first + ulysses] = [send.shape[1]] * ulysses
        all_to_all(came.view(-1), send.view(-1), group, name, splits, splits)
    widths = [p[0].numel() for p in parts]
    return [c.view(p.shape) for c, p in zip(came.split(widths, dim=1), parts, strict=True)]


def _to_tokens(context: Context, *whole: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, D] of all heads to [B, H / u, u S, D]: this rank's heads of all the place's tokens."""
    u = context.ulysses
    came = _trade(context, [x.unflatten(1, (u, -1)).transpose(0, 1) for x in whole], _TO_TOKENS)
    return tuple(c.permute(1, 2, 0, 3, 4).flatten(2, 3) for c in came)


def _to_heads(context: Context, *parts: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `_to_tokens`."""
    u = context.ulysses
    came = _trade(
        context, [x.unflatten(2, (u, -1)).permute(2, 0, 1, 3, 4) for x in parts], _TO_HEADS
    )
    return tuple(c.transpose(0, 1).flatten(1, 2) for c in came)


class _TradeTokens(torch.autograd.Function):
    """Queries, keys and values: other heads away, other tokens in."""

    @staticmethod
    def forward(ctx: Any, context: Context, *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return _to_tokens(context, *whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_heads(ctx.context, *grads)


class _TradeHeads(torch.autograd.Function):
    """The output: other tokens away, other heads in."""

    @staticmethod
    def forward(ctx: Any, context: Context, part: Tensor) -> Tensor:
        ctx.context = context
        return _to_heads(context, part)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _to_tokens(ctx.context, grad)[0]
