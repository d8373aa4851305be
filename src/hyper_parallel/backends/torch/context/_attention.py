"""Attention over the ranks of context parallelism: rounds of key and value exchange, Ulysses, or one gather.

Ring. In round d every place sends its keys and values to the place d further on and gets those of the place d before,
while it computes with what came in the round before. Sending straight to who needs them, instead of passing them on
from neighbour to neighbour, moves the same bytes per round and lets rounds that a sliding window hides be left out.
Backward exchanges keys and values again; gradients of a block go straight back to its owner, which adds them up in
float32 or wider, so that no gradient is rounded more than once.

Ulysses. One all-to-all trades tokens for heads before attention, one trades them back after it. With fewer key heads
than ranks, key heads are repeated. The hybrid does that among the ranks of a place, and the ring between places.

Sources: Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention (balance); Jacobs et al. 2023,
DeepSpeed Ulysses; Fang and Zhao 2024, USP (hybrid); Llama 3 report, section 3.3.2 (gathered keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch._collectives import (
    all_to_all,
    gather_rows,
    paired,
    reduce_into,
    send_receive,
)
from hyper_parallel.backends.torch.context._block_attention import (
    AttentionBlock,
    AttentionRules,
    merge,
    wide,
)
from hyper_parallel.backends.torch.context._state import ContextState, SequenceView
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Interval, Purpose, sees_all, sees_some

INTERFACE = "hyper_parallel"
"""Name of our function in the attention interface of transformers."""
ATTRIBUTE = "_hyper_parallel_context"
"""Attribute of attention modules that holds the `ContextState` of their model."""


def register() -> None:
    """Make the attention interface of transformers know our function; doing it again changes nothing."""
    from transformers import AttentionInterface

    # No entry in AttentionMaskInterface: models then build no mask, which no kernel here would take.
    AttentionInterface.register(INTERFACE, context_attention)


@torch.compiler.disable
def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers for this rank's tokens of cut sequences.

    Query [B, H, local tokens, D], key and value [B, G, local tokens, D or Dv] give [B, local tokens, H, Dv] and no
    weights. `softcap` is Gemma 2's, `s_aux` [H] are the logits of GPT-OSS's attention sinks, `others` what models pass
    besides and no attention function uses. Masks follow from the positions.
    """
    context: ContextState = getattr(module, ATTRIBUTE)
    view = context.view
    assert view is not None, "attention outside of a forward pass of its model"
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    given = {
        "attention_mask": attention_mask is not None,
        "dropout": dropout != 0.0,
        "is_causal=False": not causal,
        "position_bias": others.get("position_bias") is not None,
    }
    for name, wrong in given.items():
        if wrong:
            raise UnsupportedSharding(
                f"context parallelism does not know attention with `{name}`",
                where=type(module).__name__,
                hint="parallel.cp=1",
            )
    context.calls += 1
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    rules = AttentionRules(scale, sliding_window, softcap, view.documents)
    if context.ulysses > 1:
        query, key, value = _repeated(query, key, value, context.ulysses)
        query, key, value = _trade_heads_for_tokens(context, query, key, value)
        if s_aux is not None:
            s_aux = s_aux.chunk(context.ulysses)[context.group.rank() % context.ulysses]
    out = _Attention.apply(query, key, value, s_aux, context, view, rules)
    if context.ulysses > 1:
        out = _trade_tokens_for_heads(context, out)
    return out.transpose(1, 2).contiguous(), None


def _repeated(q: Tensor, k: Tensor, v: Tensor, ulysses: int) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value heads repeated until Ulysses ranks divide them."""
    heads = math.lcm(k.shape[1], ulysses)
    if q.shape[1] % ulysses:
        raise UnsupportedSharding(
            "Ulysses needs query heads that its ranks divide",
            got=f"{q.shape[1]} heads on this rank, {ulysses} ranks",
            hint="parallel.cp_kind=ring",
        )
    times = heads // k.shape[1]
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return q, k, v


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The pairs of query and key spans of one place of the ring, and how to compute them."""

    view: SequenceView
    rules: AttentionRules
    place: int

    def pairs(self, other: int) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """Visible blocks with the keys of another place, and the slices of the local queries and keys they are about.

        For each queries the diagonal comes first, so that every row has seen a key after it.
        """
        mine, theirs = self.view.cut.spans[self.place], self.view.cut.spans[other]
        for at, queries in _slices(mine):
            visible = [(s, keys) for s, keys in _slices(theirs) if self._visible(queries, keys)]
            for there, keys in sorted(visible, key=lambda pair: pair[1] != queries):
                seen = self._whole(queries, keys)
                yield at, there, AttentionBlock(queries, keys, self.rules, seen)

    def _visible(self, queries: Interval, keys: Interval) -> bool:
        bounds = self.view.bounds
        if not sees_some(queries, keys, self.rules.window):
            return False
        return not bounds or any(
            first <= last
            for (first, _), (_, last) in zip(bounds[queries], bounds[keys], strict=True)
        )

    def _whole(self, queries: Interval, keys: Interval) -> bool:
        bounds = self.view.bounds
        if not sees_all(queries, keys, self.rules.window):
            return False
        return not bounds or all(
            q[0] == q[1] == k[0] == k[1] for q, k in zip(bounds[queries], bounds[keys], strict=True)
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, other: int, out: Tensor, lse: Tensor
    ) -> None:
        """Join the attention over the keys of a place into `out` and `lse`."""
        for at, there, block in self.pairs(other):
            more = block.forward(q[:, :, at], k[:, :, there], v[:, :, there])
            if block.queries == block.keys:
                out[:, :, at], lse[:, :, at] = more
            else:
                merge(out[:, :, at], lse[:, :, at], *more)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        other: int,
        dq: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add to `dq` what the keys of a place give, and return their gradients; `saved` is (out, lse, delta)."""
        dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
        for at, there, block in self.pairs(other):
            rows = (x[:, :, at] for x in saved)
            grads = block.backward(
                grad[:, :, at], q[:, :, at], k[:, :, there], v[:, :, there], *rows
            )
            dq[:, :, at] += grads[0]
            dk[:, :, there] += grads[1]
            dv[:, :, there] += grads[2]
        return dk, dv


def _slices(spans: tuple[Interval, ...]) -> Iterator[tuple[slice, Interval]]:
    start = 0
    for span in spans:
        stop = start + span[1] - span[0]
        yield slice(start, stop), span
        start = stop


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all places of the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        context: ContextState,
        view: SequenceView,
        rules: AttentionRules,
    ) -> Tensor:
        blocks = _Blocks(view, rules, context.group.rank() // context.ulysses)
        exact = wide(q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=exact)
        lse = q.new_empty(q.shape[:3], dtype=exact)
        for other, keys, values in _arriving(context, blocks, k, v):
            blocks.forward(q, keys, values, other, out, lse)
        if sinks is not None:
            # A sink takes part in the softmax and gives nothing.
            total = torch.logaddexp(lse, sinks.to(exact)[:, None])
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        ctx.context, ctx.blocks = context, blocks
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        context, blocks = ctx.context, ctx.blocks
        delta = (grad.to(lse.dtype) * out).sum(-1)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        d_sinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        returns = _Returns(context, blocks, k, v, lse.dtype)
        for other, keys, values in _arriving(context, blocks, k, v):
            dk, dv = blocks.backward(grad, q, keys, values, (out, lse, delta), other, dq)
            returns.add(other, dk, dv)
        dk, dv = returns.finish()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def _pack(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(flat: Tensor, *like: Tensor) -> list[Tensor]:
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _arriving(
    context: ContextState, blocks: _Blocks, k: Tensor, v: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values of this place, then of the others as they come; the next exchange runs meanwhile."""
    if context.gathers:
        rows = gather_rows(_pack(k, v), context.group, Purpose.KEYS_AND_VALUES)
        for distance in range(context.ring):
            other = (blocks.place - distance) % context.ring
            keys, values = _unpack(rows[other], k, v)
            yield other, keys, values
        return
    distances = blocks.view.cut.distances(blocks.rules.window)
    mine = _pack(k, v) if distances else None
    current, other = (k, v), blocks.place
    for distance in distances:
        assert mine is not None
        came, wait = _exchange(context, mine, distance, Purpose.KEYS_AND_VALUES)
        yield other, current[0], current[1]
        wait()
        keys, values = _unpack(came, k, v)
        current, other = (keys, values), (blocks.place - distance) % context.ring
    yield other, current[0], current[1]


class _Returns:
    """Gradients of keys and values on their way to the place that owns them."""

    def __init__(
        self, context: ContextState, blocks: _Blocks, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        self.context, self.place, self.like = context, blocks.place, (k, v)
        size = k.numel() + v.numel()
        self.own = k.new_zeros(size, dtype=dtype)
        self.rows = (
            k.new_empty(context.ring, size, dtype=dtype) if context.gathers else self.own[:0]
        )
        self.pending: tuple[Tensor, Any] | None = None

    def add(self, other: int, dk: Tensor, dv: Tensor) -> None:
        """Send the gradients of a place's block home, or add this place's own."""
        if self.context.gathers:
            self.rows[other] = _pack(dk, dv)
        elif other == self.place:
            self.own += _pack(dk, dv)
        else:
            self._wait()
            flat = _pack(dk, dv).to(self.like[0].dtype)
            name = Purpose.KEY_VALUE_GRADIENTS
            self.pending = _exchange(self.context, flat, other - self.place, name)

    def finish(self) -> list[Tensor]:
        """The gradients of this place's keys and values."""
        self._wait()
        if self.context.gathers:
            flat, name = self.rows.flatten(), Purpose.KEY_VALUE_GRADIENTS
            reduce_into(self.own, flat, self.context.group, name)
        return _unpack(self.own, *self.like)

    def _wait(self) -> None:
        if self.pending is not None:
            came, wait = self.pending
            wait()
            self.own += came
            self.pending = None


def _exchange(
    context: ContextState, flat: Tensor, distance: int, name: Purpose
) -> tuple[Tensor, Any]:
    """Send to the place `distance` further on the ring, receive from the one as far back; and how to wait for it."""
    group, ring, ulysses = context.group, context.ring, context.ulysses
    place, inner = divmod(group.rank(), ulysses)
    to, source = ((place + d) % ring * ulysses + inner for d in (distance, -distance))
    return send_receive(flat, to, source, group, name)


def _trade_heads_for_tokens(context: ContextState, *whole: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, K] of all heads to [B, H / u, u S, K]: this rank's heads of all the place's tokens."""
    return paired(lambda *x: _to_tokens(context, *x), lambda *g: _to_heads(context, *g), *whole)  # type: ignore[no-any-return]


def _trade_tokens_for_heads(context: ContextState, part: Tensor) -> Tensor:
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
