"""Attention over context-parallel ranks: ring exchange of keys and values, Ulysses, or one all-gather.

Ring. A ring position is a group of `ulysses` ranks. In round d, every position sends its keys and values to the
position d steps ahead and receives those of the position d steps behind. Meanwhile it computes on the blocks of the
previous round. Unlike in a ring of neighbours, rounds outside of a sliding window can be skipped; the bytes per round
are the same. Backward exchanges keys and values again. The gradients of a block are sent directly to its owner, which
accumulates them in float32 or wider.

Ulysses. One all-to-all before attention moves the sharding from tokens to heads, and one after attention moves it back.
Key heads are repeated if the ranks do not divide them. The hybrid uses Ulysses inside a ring position and the ring
between positions.

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

from hyper_parallel.backends.torch.collectives import gather_rows, launch_reduce_into, send_receive
from hyper_parallel.backends.torch.context.block_attention import (
    AttentionBlock,
    AttentionRules,
    merge,
    score_dtype,
)
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.pass_context import SequenceView
from hyper_parallel.backends.torch.tensor.collectives import reshard
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Interval, Purpose, sees_all, sees_some

INTERFACE = "hyper_parallel"
"""Name of `context_attention` in the attention interface of transformers."""
TRIAL = "hyper_parallel_trial"
"""Name of `context_attention` in a trial forward, for which transformers builds masks."""
ATTRIBUTE = "_hyper_parallel_context"
"""Attribute of attention modules with the `ContextState` of their model."""
KeyValueBlocks = Iterator[tuple[int, Tensor, Tensor]]
"""Tuples (ring position, keys, values) or (ring position, gradients of keys, of values); own position first."""


def register() -> None:
    """Register `context_attention` in the attention interface of transformers; may be called repeatedly."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # No entry in AttentionMaskInterface: models then build no mask, because no kernel here accepts one.
    AttentionInterface.register(INTERFACE, context_attention)
    AttentionInterface.register(TRIAL, context_attention)
    # An omitted mask is ambiguous: kernels differ in their default.
    no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    AttentionMaskInterface.register(TRIAL, lambda *sizes, **kwargs: sdpa_mask(*sizes, **kwargs | no_skip))


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
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention of this rank's tokens over all tokens; implements the attention interface of transformers.

    Args:
        module: The attention module.
        query: Queries of this rank's tokens, [B, H, S / cp, K].
        key: Keys of this rank's tokens, [B, G, S / cp, K].
        value: Values of this rank's tokens, [B, G, S / cp, V].
        attention_mask: Must be None, except in the trial forward; the mask follows from the positions of the tokens.
        dropout: Must be 0.
        scaling: Factor of the scores; None: 1 / sqrt(K).
        sliding_window: Number of visible tokens per query; None: no window.
        softcap: Cap of the scores, as in Gemma 2.
        s_aux: Logits of attention sinks [H], as in GPT-OSS.
        is_causal: Whether attention is causal; None: use the attribute `is_causal` of the module.
        unused: Further arguments that models pass and attention functions ignore.

    Returns:
        Output [B, S / cp, H, V], and None in place of attention weights.

    Raises:
        UnsupportedSharding: HP205 for an argument with an unsupported value, and for query heads that `ulysses` ranks
            do not divide.
    """
    context = getattr(module, ATTRIBUTE)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options = {"attention_mask": attention_mask, "dropout": dropout, "is_causal": causal, **unused}
    _refuse_attention(module, context, options)
    if not isinstance(context, ContextState):  # the trial forward on meta tensors
        out = context.attend(module, query, key, value, attention_mask, sliding_window, causal)
        return out, None
    view = context.running.context.view
    assert view is not None, "attention outside of a forward pass of its model"
    context.calls += 1
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    rules = AttentionRules(scale, sliding_window, softcap, view.documents, causal)
    group, ulysses = context.group, context.ulysses
    # Exchange all heads of this rank's tokens for this rank's heads of all tokens at its ring position.
    if ulysses > 1:
        query, key, value = _exchange_tokens_for_heads(context, query, key, value)
        if s_aux is not None:
            s_aux = s_aux.chunk(ulysses)[group.rank() % ulysses]
    out = _Attention.apply(query, key, value, s_aux, context, view, rules)
    if ulysses > 1:
        (out,) = reshard((out,), 2, 1, group, Purpose.TOKENS_FOR_HEADS, ulysses)
    return out.transpose(1, 2).contiguous(), None


def _exchange_tokens_for_heads(context: ContextState, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    ulysses = context.ulysses
    if query.shape[1] % ulysses:
        raise UnsupportedSharding(
            "the number of query heads is not divisible by the Ulysses degree",
            where="parallel.cp_kind",
            got=f"{query.shape[1]} heads on this rank, {ulysses} ranks",
            changes={"parallel.cp_kind": "ring", "parallel.cp_ulysses": 1},
        )
    repeats = math.lcm(key.shape[1], ulysses) // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return reshard((query, key, value), 1, 2, context.group, Purpose.HEADS_FOR_TOKENS, ulysses)


def _refuse_attention(module: nn.Module, context: Any, options: dict[str, Any]) -> None:
    running = isinstance(context, ContextState)
    packed = running and context.running.context.view.documents is not None
    refuse_first(
        type(module).__name__,
        ("attention with `attention_mask`", options["attention_mask"] is not None and running),
        ("attention with `dropout`", options["dropout"] != 0.0),
        ("attention with `is_causal=False` over packed documents", packed and not options["is_causal"]),
        ("attention with `position_bias`", options.get("position_bias") is not None),
    )


def refuse_first(model: str, *features: tuple[str, object]) -> None:
    """Raise HP205 for the first of the features (name, value) whose value is true; `model` is a type for the error."""
    for name, value in features:
        if value:
            raise UnsupportedSharding(
                f"context parallelism does not support {name}",
                where="parallel.cp",
                got=model,
                allowed="causal attention, full or with a sliding window, without dropout",
                changes={"parallel.cp": 1},
            )


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of the queries of one ring position over the keys of all positions.

    The tokens of a ring position are in one or more spans, intervals of consecutive tokens. Attention is computed in
    blocks of one query span and one key span.
    """

    view: SequenceView
    rules: AttentionRules
    position: int

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, AttentionBlock]]:
        """Yield (slice of the local queries, slice of the keys, block) for visible keys of ring position `source`.

        For each query span, the block with the keys of the same span, if any, comes first, because `merge` needs a
        visible key in every row.
        """
        query_spans, key_spans = (list(_slices(self.view.cut.spans[p])) for p in (self.position, source))
        for rows, queries in query_spans:
            for columns, keys in sorted(key_spans, key=lambda pair: pair[1] != queries):
                if not self.rules.causal:  # all tokens except padding
                    keys = (keys[0], min(keys[1], self.view.cut.seq_len))
                    columns = slice(columns.start, columns.start + max(0, keys[1] - keys[0]))
                some, every = self._visibility(queries, keys)
                if some:
                    yield rows, columns, AttentionBlock(queries, keys, self.rules, every)

    def _visibility(self, queries: Interval, keys: Interval) -> tuple[bool, bool]:
        """Return whether any key is visible to any query, and whether all keys are visible to all queries."""
        if not self.rules.causal:
            return keys[0] < keys[1], True
        window, bounds = self.rules.window, self.view.bounds
        some, every = sees_some(queries, keys, window), sees_all(queries, keys, window)
        if bounds:
            documents = list(zip(bounds[queries], bounds[keys], strict=True))
            some = some and any(q[0] <= k[1] for q, k in documents)
            every = every and all(q[0] == q[1] == k[0] == k[1] for q, k in documents)
        return some, every

    def forward(self, q: Tensor, width: int, blocks: KeyValueBlocks) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over the keys in `blocks`, in `score_dtype`; values have `width` features."""
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=score_dtype(q.dtype))
        out = lse.new_zeros(*lse.shape, width)
        for source, k, v in blocks:
            for rows, columns, block in self.blocks(source):
                result = block.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns])
                if block.queries == block.keys:
                    out[:, :, rows], lse[:, :, rows] = result
                else:
                    merge(out[:, :, rows], lse[:, :, rows], *result)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, saved: tuple[Tensor, ...], dq: Tensor, blocks: KeyValueBlocks
    ) -> KeyValueBlocks:
        """Add the gradient of the local queries `q` to `dq`; yield the gradients of keys and values of `blocks`.

        `grad` is the gradient of the output, and `saved` is (out, lse, delta), see `AttentionBlock.backward`.
        """
        for source, k, v in blocks:
            dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
            for rows, columns, block in self.blocks(source):
                row_data = (x[:, :, rows] for x in saved)
                keys, values = k[:, :, columns], v[:, :, columns]
                grads = block.backward(grad[:, :, rows], q[:, :, rows], keys, values, *row_data)
                slices = (rows, columns, columns)
                for total, part, block_grad in zip((dq, dk, dv), slices, grads, strict=True):
                    total[:, :, part] += block_grad
            yield source, dk, dv


def _slices(spans: tuple[Interval, ...]) -> Iterator[tuple[slice, Interval]]:
    start = 0
    for span in spans:
        stop = start + span[1] - span[0]
        yield slice(start, stop), span
        start = stop


class _Attention(torch.autograd.Function):
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
        ring = RingAttention(view, rules, context.ring_position)
        out, lse = ring.forward(q, v.shape[3], _key_value_blocks(context, ring, k, v))
        if sinks is not None:
            # A sink adds to the softmax denominator only.
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        ctx.context, ctx.ring = context, ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        context, ring = ctx.context, ctx.ring
        dq, d_sinks = torch.zeros_like(q, dtype=lse.dtype), None
        delta = (grad.to(lse.dtype) * out).sum(-1)
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        name = Purpose.KEY_VALUE_GRADIENTS
        positions = context.ring_size if context.gather_keys else 1
        # Gradients of the keys of all positions, or of this position with the gradients received from others.
        rows = lse.new_zeros(positions, k.numel() + v.numel())
        in_flight: list[tuple[Tensor, Callable[[], None]]] = []

        def accumulate_received() -> None:
            while in_flight:
                received, wait = in_flight.pop()
                wait()
                rows[0] += received

        blocks = _key_value_blocks(context, ring, k, v)
        for source, dk, dv in ring.backward(grad, q, (out, lse, delta), dq, blocks):
            flat = _pack(dk, dv)
            if context.gather_keys:
                rows[source] = flat
            elif source == ring.position:
                rows[0] += flat
            else:
                accumulate_received()
                distance = source - ring.position
                in_flight.append(_exchange(context, flat.to(k.dtype), distance, name))
        accumulate_received()
        local_grads = rows[0]
        if context.gather_keys:
            local_grads = torch.empty_like(local_grads)
            group = context.group
            launch_reduce_into(local_grads, rows.flatten(), group, name, async_op=False)()
        dk, dv = _unpack(local_grads, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def _pack(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(flat: Tensor, *like: Tensor) -> Iterator[Tensor]:
    parts = flat.split([t.numel() for t in like])
    return (part.view(t.shape) for part, t in zip(parts, like, strict=True))


def _key_value_blocks(context: ContextState, ring: RingAttention, k: Tensor, v: Tensor) -> KeyValueBlocks:
    """Yield (ring position, keys, values), own position first.

    Gathered keys are yielded for all positions. A ring skips positions outside of the sliding window; the next keys are
    in flight while the caller uses the current ones.
    """
    name, ring_size = Purpose.KEYS_AND_VALUES, context.ring_size
    if context.gather_keys:
        rows = gather_rows(_pack(k, v), context.group, name)
        for distance in range(ring_size):
            source = (ring.position - distance) % ring_size
            keys, values = _unpack(rows[source], k, v)
            yield source, keys, values
        return
    distances = ring.view.cut.distances(ring.rules.window)
    local = _pack(k, v) if distances else k
    keys, values, source = k, v, ring.position
    for distance in distances:
        received, wait = _exchange(context, local, distance, name)
        yield source, keys, values
        wait()
        keys, values = _unpack(received, k, v)
        source = (ring.position - distance) % ring_size
    yield source, keys, values


def _exchange(context: ContextState, flat: Tensor, distance: int, name: Purpose) -> tuple[Tensor, Callable[[], None]]:
    """Send `flat` to the ring position `distance` steps ahead, and receive from behind; results of `send_receive`."""
    ulysses = context.ulysses
    to, source = (
        (context.ring_position + d) % context.ring_size * ulysses + context.group.rank() % ulysses
        for d in (distance, -distance)
    )
    return send_receive(flat, to, source, context.group, name)
