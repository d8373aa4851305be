"""Ulysses: heads are traded for tokens before attention, and tokens for heads after it, in one all-to-all each.

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.backends.torch._collectives import all_to_all, paired
from hyper_parallel.backends.torch.context._state import ContextState
from hyper_parallel.ir import Purpose


def trade_heads_for_tokens(context: ContextState, *whole: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, K] of all heads to [B, H / u, u S, K]: this rank's heads of all the place's tokens."""
    return paired(lambda *x: _to_tokens(context, *x), lambda *g: _to_heads(context, *g), *whole)  # type: ignore[no-any-return]


def trade_tokens_for_heads(context: ContextState, part: Tensor) -> Tensor:
    """[B, H / u, u S, K] back to [B, H, S, K]."""
    return paired(lambda x: _to_heads(context, x)[0], lambda g: _to_tokens(context, g)[0], part)  # type: ignore[no-any-return]


def _trade(context: ContextState, parts: list[Tensor], name: Purpose) -> list[Tensor]:
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


def _to_tokens(context: ContextState, *whole: Tensor) -> tuple[Tensor, ...]:
    parts = [x.unflatten(1, (context.ulysses, -1)).transpose(0, 1) for x in whole]
    came = _trade(context, parts, Purpose.HEADS_FOR_TOKENS)
    return tuple(c.permute(1, 2, 0, 3, 4).flatten(2, 3) for c in came)


def _to_heads(context: ContextState, *parts: Tensor) -> tuple[Tensor, ...]:
    parts = tuple(x.unflatten(2, (context.ulysses, -1)).permute(2, 0, 1, 3, 4) for x in parts)
    came = _trade(context, list(parts), Purpose.TOKENS_FOR_HEADS)
    return tuple(c.transpose(0, 1).flatten(1, 2) for c in came)
