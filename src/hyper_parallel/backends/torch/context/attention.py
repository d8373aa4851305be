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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch.collectives import gather_rows, reduce_into, send_receive
from hyper_parallel.backends.torch.context.block_attention import (
    AttentionBlock,
    AttentionRules,
    merge,
    wide,
)
from hyper_parallel.backends.torch.context.state import ContextState, SequenceView
from hyper_parallel.backends.torch.tensor.collectives import reshard
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Interval, Purpose, sees_all, sees_some

INTERFACE = "hyper_parallel"
"""Name of our function in the attention interface of transformers."""
TRIAL = "hyper_parallel_trial"
"""The same for a trial, with the masks that models build."""
ATTRIBUTE = "_hyper_parallel_context"
"""Attribute of attention modules that holds the `ContextState` of their model."""
Arriving = Iterator[tuple[int, Tensor, Tensor]]
"""Places of the ring with their keys and values, this one first; or with the gradients of those."""


def register() -> None:
    """Make the attention interface of transformers know our function; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # No entry in AttentionMaskInterface: models then build no mask, which no kernel here would take.
    AttentionInterface.register(INTERFACE, context_attention)
    AttentionInterface.register(TRIAL, context_attention)
    # A mask that is left out says less than one: kernels differ in what they do then.
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    AttentionMaskInterface.register(TRIAL, lambda *sizes, **more: sdpa_mask(*sizes, **more | never))


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
    context = getattr(module, ATTRIBUTE)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    given = {"attention_mask": attention_mask, "dropout": dropout, "is_causal": causal, **others}
    _refuse_attention(module, context, given)
    if not isinstance(context, ContextState):  # a trial
        out = context.attend(module, query, key, value, attention_mask, sliding_window, causal)
        return out, None
    view = context.view
    assert view is not None, "attention outside of a forward pass of its model"
    context.calls += 1
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    rules = AttentionRules(scale, sliding_window, softcap, view.documents, causal)
    group, ulysses = context.group, context.ulysses
    if ulysses > 1:  # this rank's heads of all the place's tokens, and back
        if query.shape[1] % ulysses:
            raise UnsupportedSharding(
                "Ulysses needs query heads that its ranks divide",
                got=f"{query.shape[1]} heads on this rank, {ulysses} ranks",
                hint="parallel.cp_kind=ring",
            )
        times = math.lcm(key.shape[1], ulysses) // key.shape[1]
        if times > 1:
            key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        whole = (query, key, value)
        query, key, value = reshard(whole, 1, 2, group, Purpose.HEADS_FOR_TOKENS, ulysses)
        if s_aux is not None:
            s_aux = s_aux.chunk(ulysses)[group.rank() % ulysses]
    out = _Attention.apply(query, key, value, s_aux, context, view, rules)
    if ulysses > 1:
        (out,) = reshard((out,), 2, 1, group, Purpose.TOKENS_FOR_HEADS, ulysses)
    return out.transpose(1, 2).contiguous(), None


def _refuse_attention(module: nn.Module, context: Any, given: dict[str, Any]) -> None:
    """Refuse attention that is more than causal with windows and documents, or of all tokens."""
    running = isinstance(context, ContextState)
    packed = running and context.view.documents is not None
    for name, wrong in (
        ("attention_mask", given["attention_mask"] is not None and running),
        ("dropout", given["dropout"] != 0.0),
        ("is_causal=False", packed and not given["is_causal"]),
        ("position_bias", given.get("position_bias") is not None),
    ):
        if wrong:
            raise UnsupportedSharding(
                f"context parallelism does not know attention with `{name}`",
                where=type(module).__name__,
                hint="parallel.cp=1",
            )


@dataclass(frozen=True, slots=True)
class PlaceAttention:
    """Attention of the queries of one place of the ring over the keys of any place, in blocks of spans."""

    view: SequenceView
    rules: AttentionRules
    place: int

    def blocks(self, other: int) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """Visible blocks with the keys of another place, and the slices of the local queries and keys they are about.

        For each queries the diagonal comes first, so that every row has seen a key after it.
        """
        mine, theirs = (list(_slices(self.view.cut.spans[p])) for p in (self.place, other))
        for at, queries in mine:
            for there, keys in sorted(theirs, key=lambda pair: pair[1] != queries):
                if not self.rules.causal:  # all tokens, padding left out
                    keys = (keys[0], min(keys[1], self.view.cut.seq_len))
                    there = slice(there.start, there.start + max(0, keys[1] - keys[0]))
                some, every = self._seen(queries, keys)
                if some:
                    yield at, there, AttentionBlock(queries, keys, self.rules, every)

    def _seen(self, queries: Interval, keys: Interval) -> tuple[bool, bool]:
        """Whether some query sees some key, and whether each sees all."""
        if not self.rules.causal:
            return keys[0] < keys[1], True
        window, bounds = self.rules.window, self.view.bounds
        some, every = sees_some(queries, keys, window), sees_all(queries, keys, window)
        if bounds:
            documents = list(zip(bounds[queries], bounds[keys], strict=True))
            some = some and any(q[0] <= k[1] for q, k in documents)
            every = every and all(q[0] == q[1] == k[0] == k[1] for q, k in documents)
        return some, every

    def forward(self, q: Tensor, width: int, arriving: Arriving) -> tuple[Tensor, Tensor]:
        """Output, of the values' width, and lse over all places that arrive, in `wide` format."""
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide(q.dtype))
        out = lse.new_zeros(*lse.shape, width)
        for other, k, v in arriving:
            for at, there, block in self.blocks(other):
                more = block.forward(q[:, :, at], k[:, :, there], v[:, :, there])
                if block.queries == block.keys:
                    out[:, :, at], lse[:, :, at] = more
                else:
                    merge(out[:, :, at], lse[:, :, at], *more)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, saved: tuple[Tensor, ...], dq: Tensor, arriving: Arriving
    ) -> Arriving:
        """Add to `dq` what the keys of every place give, and give their gradients place by place.

        `saved` is (out, lse, delta), as a block's backward takes them.
        """
        for other, k, v in arriving:
            dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
            for at, there, block in self.blocks(other):
                rows = (x[:, :, at] for x in saved)
                keys, values = k[:, :, there], v[:, :, there]
                grads = block.backward(grad[:, :, at], q[:, :, at], keys, values, *rows)
                for total, cut, more in zip((dq, dk, dv), (at, there, there), grads, strict=True):
                    total[:, :, cut] += more
            yield other, dk, dv


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
        own = PlaceAttention(view, rules, context.place)
        out, lse = own.forward(q, v.shape[3], _arriving(context, own, k, v))
        if sinks is not None:
            # A sink takes part in the softmax and gives nothing.
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        ctx.context, ctx.own = context, own
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        context, own = ctx.context, ctx.own
        dq, d_sinks = torch.zeros_like(q, dtype=lse.dtype), None
        delta = (grad.to(lse.dtype) * out).sum(-1)
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        name, places = Purpose.KEY_VALUE_GRADIENTS, context.ring if context.gathers else 1
        # Gradients of the keys of every place, or of this one, to which the others send theirs.
        rows = lse.new_zeros(places, k.numel() + v.numel())
        coming: list[tuple[Tensor, Callable[[], None]]] = []

        def add_what_came() -> None:
            while coming:
                came, wait = coming.pop()
                wait()
                rows[0] += came

        arriving = _arriving(context, own, k, v)
        for other, dk, dv in own.backward(grad, q, (out, lse, delta), dq, arriving):
            flat = _pack(dk, dv)
            if context.gathers:
                rows[other] = flat
            elif other == own.place:
                rows[0] += flat
            else:
                add_what_came()
                coming.append(_exchange(context, flat.to(k.dtype), other - own.place, name))
        add_what_came()
        mine = rows[0]
        if context.gathers:
            mine = reduce_into(torch.empty_like(mine), rows.flatten(), context.group, name)
        dk, dv = _unpack(mine, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def _pack(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(flat: Tensor, *like: Tensor) -> Iterator[Tensor]:
    parts = flat.split([t.numel() for t in like])
    return (part.view(t.shape) for part, t in zip(parts, like, strict=True))


def _arriving(context: ContextState, own: PlaceAttention, k: Tensor, v: Tensor) -> Arriving:
    """Keys and values of this place, then of the others as they come; the next exchange runs meanwhile."""
    name, ring = Purpose.KEYS_AND_VALUES, context.ring
    if context.gathers:
        rows = gather_rows(_pack(k, v), context.group, name)
        for distance in range(ring):
            other = (own.place - distance) % ring
            keys, values = _unpack(rows[other], k, v)
            yield other, keys, values
        return
    distances = own.view.cut.distances(own.rules.window)
    mine = _pack(k, v) if distances else k
    keys, values, other = k, v, own.place
    for distance in distances:
        came, wait = _exchange(context, mine, distance, name)
        yield other, keys, values
        wait()
        keys, values = _unpack(came, k, v)
        other = (own.place - distance) % ring
    yield other, keys, values


def _exchange(
    context: ContextState, flat: Tensor, distance: int, name: Purpose
) -> tuple[Tensor, Callable[[], None]]:
    """Send to the place `distance` further on the ring, receive from the one as far back; and how to wait for it."""
    inner = context.group.rank() % context.ulysses
    to, source = (
        (context.place + d) % context.ring * context.ulysses + inner for d in (distance, -distance)
    )
    return send_receive(flat, to, source, context.group, name)
