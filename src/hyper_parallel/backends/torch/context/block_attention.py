"""Attention of one block of queries over one block of keys, and the merge of blocks.

Each block returns its output and the log-sum-exp of its scores (`lse`) per query and head. `merge` combines the results
for several key blocks. The backward of a block uses the lse over all key blocks. Its probabilities are then those of
the complete softmax, and the backward passes of blocks are independent.

A block runs on torch's flash attention kernels for CPU and CUDA if they support it, otherwise on matrix products.

Shapes: B batch, H query heads, G key heads (a divisor of H; head h uses key head h // (H / G)), Q queries of the block,
N keys of the block, K head dim, V head dim of the values.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, FlashAttention, algorithms 1 and 4; Dao 2023,
FlashAttention-2; Liu et al. 2023, Ring Attention, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.ir import Interval

_SCORES = 1 << 24
"""Maximum number of scores computed at a time without a fused kernel, if one query does not have more."""
_FORMATS = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32),
}
"""Dtypes that the flash attention kernel of a device type supports."""
_LARGEST_HEAD = 256  # features of a head; limit of FlashAttention-2 kernels


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Mask and score function of attention."""

    scale: float
    window: int | None = None
    """Number of visible tokens per query, itself included; None: all preceding tokens."""
    softcap: float | None = None
    """Cap of scores, softcap * tanh(score / softcap); None: uncapped."""
    documents: Tensor | None = None
    """Document index of every position, [B, S]; None: one document per sequence."""
    causal: bool = True
    """False: every key of the sequence is visible to every query."""

    def hidden(self, queries: Interval, keys: Interval, device: torch.device) -> Tensor:
        """Return the causal mask [B or 1, Q, N] of a block, True where a key is not visible to a query."""
        q = torch.arange(*queries, device=device).unsqueeze(1)
        k = torch.arange(*keys, device=device)
        mask = k > q
        if self.window is not None:
            mask |= q - k >= self.window
        mask = mask.unsqueeze(0)
        if self.documents is not None:
            query_documents = self.documents[:, slice(*queries)].unsqueeze(2)
            mask = mask | (query_documents != self.documents[:, slice(*keys)].unsqueeze(1))
        return mask


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and accumulators for inputs of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's output into `out` and `lse` in place; in every row, `lse` or `block_lse` must be finite."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.add_(block_out * (block_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Block of attention: an interval of query positions and an interval of key positions."""

    queries: Interval
    keys: Interval
    rules: AttentionRules
    all_seen: bool
    """True if all keys are visible to all queries, so that no mask is needed."""

    def fused(self, q: Tensor, v: Tensor) -> bool:
        """Return whether the fused kernel computes this block."""
        rules, width = self.rules, q.shape[3]
        plain_causal = rules.window is None and rules.documents is None
        return (
            q.dtype in _FORMATS.get(q.device.type, ())
            and (self.all_seen or (self.queries == self.keys and plain_causal))
            and rules.softcap is None
            and width == v.shape[3]
            and width <= _LARGEST_HEAD
            and width % 8 == 0
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [B, H, Q, V] and lse [B, H, Q] for queries, keys and values, in `score_dtype`.

        Output and lse of a query without visible keys are zero and minus infinity.
        """
        if self.fused(q, v):
            return self._fused_forward(q, k, v)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=score_dtype(q.dtype))
        lse = q.new_empty(q.shape[:3], dtype=out.dtype)
        for rows, cols in self._tiles(q):
            scores, _ = self._scores(q, k, rows, cols)
            part = torch.logsumexp(scores, dim=-1, keepdim=True)
            # A row without visible keys would be exp(-inf + inf).
            p = scores.sub_(part.masked_fill(part == -torch.inf, 0.0)).exp_()
            out[:, :, rows] = _ungroup(p @ v[:, :, cols].to(p.dtype), q.shape[1])
            lse[:, :, rows] = _ungroup(part, q.shape[1]).squeeze(-1)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the block's q, k and v, in `score_dtype`.

        `out` and `lse` are those of all key blocks, and `delta` [B, H, Q] is the sum of grad * out over V.
        """
        if self.fused(q, v):
            return self._fused_backward(grad, q, k, v, out, lse)
        heads, groups, exact = q.shape[1], k.shape[1], score_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=exact)
        dk, dv = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        for rows, cols in self._tiles(q):
            scores, slope = self._scores(q, k, rows, cols)
            p = scores.sub_(_group(lse[:, :, rows].unsqueeze(-1), groups)).exp_()
            g = _group(grad[:, :, rows], groups).to(exact)
            dv[:, :, cols] += p.transpose(-1, -2) @ g
            ds = g @ v[:, :, cols].to(exact).transpose(-1, -2)
            ds.sub_(_group(delta[:, :, rows].unsqueeze(-1), groups)).mul_(p).mul_(self.rules.scale)
            if slope is not None:
                ds.mul_(slope)
            dq[:, :, rows] = _ungroup(ds @ k[:, :, cols].to(exact), heads)
            dk[:, :, cols] += ds.transpose(-1, -2) @ _group(q[:, :, rows], groups).to(exact)
        return dq, dk, dv

    def _tiles(self, q: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield (slice of queries, slice of the keys that may be visible to them), each with a bounded size."""
        (first_query, last_query), (first_key, last_key) = self.queries, self.keys
        count = last_query - first_query
        per_row = q.shape[0] * q.shape[1] * (last_key - first_key)
        # Tiling pays for small masked blocks too: nearly half of a causal block is never computed.
        rows = max(1, min(count, _SCORES // per_row))
        if not self.all_seen:
            rows = min(rows, max(128, -(-count // 8)))
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            first, last = self.keys
            if not self.all_seen:
                last = min(last, first_query + stop)
                if self.rules.window is not None:
                    first = max(first, first_query + start - self.rules.window + 1)
            yield slice(start, stop), slice(first - first_key, max(first, last) - first_key)

    def _scores(self, q: Tensor, k: Tensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Return the scores [B, G, (H / G) rows, cols], -inf if masked, and the derivative of the softcap or None."""
        exact, slope, softcap = score_dtype(q.dtype), None, self.rules.softcap
        grouped = _group(q[:, :, rows], k.shape[1]).to(exact)
        scores = (grouped @ k[:, :, cols].to(exact).transpose(-1, -2)).mul_(self.rules.scale)
        if softcap is not None:
            capped = scores.div_(softcap).tanh_()
            slope = 1.0 - capped.square()
            scores = capped.mul_(softcap)
        if not self.all_seen:
            queries = (self.queries[0] + rows.start, self.queries[0] + rows.stop)
            keys = (self.keys[0] + cols.start, self.keys[0] + cols.stop)
            hidden = self.rules.hidden(queries, keys, q.device)
            by_head = scores.unflatten(2, (-1, rows.stop - rows.start))
            by_head.masked_fill_(hidden[:, None, None], -torch.inf)
        return scores, slope

    def _fused_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ops, scale, causal = torch.ops.aten, self.rules.scale, not self.all_seen
        if q.device.type == "cpu":
            k, v = _same_heads(q, k, v)
            out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        else:
            out, lse, *_ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out.to(score_dtype(q.dtype)), lse

    def _fused_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ops, scale, causal = torch.ops.aten, self.rules.scale, not self.all_seen
        groups, exact = k.shape[1], score_dtype(q.dtype)
        lse = lse.contiguous()  # kernels ignore its strides
        if q.device.type == "cpu":
            dq, dk, dv = ops._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, *_same_heads(q, k, v), out, lse, 0.0, causal, scale=scale
            )
            if dk.shape[1] != groups:
                dk, dv = (x.unflatten(1, (groups, -1)).to(exact).sum(2) for x in (dk, dv))
        else:
            # The kernel does not read it without dropout.
            rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
            dq, dk, dv = ops._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state,
                scale=scale,
            )  # fmt: skip
        return dq.to(exact), dk.to(exact), dv.to(exact)


def _group(x: Tensor, groups: int) -> Tensor:
    """Reshape [B, H, Q, K] to [B, G, (H / G) Q, K], so that all queries of one key head form one matrix."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _ungroup(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
