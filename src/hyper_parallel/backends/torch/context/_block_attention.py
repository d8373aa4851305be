"""Attention of one block of queries over one block of keys, with what is needed to join blocks.

A block returns its output and the logarithm of its softmax denominator ("lse") per query and head; outputs of several
key blocks are joined with `merge`. The backward of a block takes the lse of the whole row, so that every block's
probabilities are those of the whole softmax and no block needs another.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, FlashAttention, algorithms 1 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.ir import Interval

_SCORES = 1 << 24
"""Scores computed at a time, which bounds the temporaries of the plain kernel."""


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What a query sees and how its scores are made.

    Attributes:
        scale: Factor of the products of queries and keys.
        window: Tokens each query sees, itself included; None: all before it.
        softcap: Scores are softcap * tanh(score / softcap); None: as they are.
        documents: [B, S] number of the document of every position of a sequence, or None for one document.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    documents: Tensor | None = None

    def hidden(self, queries: Interval, keys: Interval, device: torch.device) -> Tensor:
        """[B or 1, queries, keys]: True where a query does not see a key."""
        q = torch.arange(*queries, device=device).unsqueeze(1)
        k = torch.arange(*keys, device=device)
        mask = k > q
        if self.window is not None:
            mask |= q - k >= self.window
        mask = mask.unsqueeze(0)
        if self.documents is not None:
            of_queries = self.documents[:, slice(*queries)].unsqueeze(2)
            mask = mask | (of_queries != self.documents[:, slice(*keys)].unsqueeze(1))
        return mask


def wide(dtype: torch.dtype) -> torch.dtype:
    """Format of scores and sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Interval,
    keys: Interval,
    rules: AttentionRules,
    all_seen: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of one block by plain matrix products.

    Args:
        q: [B, H, queries, D].
        k: [B, G, keys, D] with G a divisor of H; head h uses key head h // (H / G).
        v: [B, G, keys, Dv].
        queries: Positions of the queries.
        keys: Positions of the keys.
        rules: Masks and scores.
        all_seen: Every query sees every key, so no mask is made.

    Returns:
        Output [B, H, queries, Dv] and lse [B, H, queries], both in `wide` format; a query that sees none of the keys
        has zeros and minus infinity.
    """
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide(q.dtype))
    lse = q.new_empty(q.shape[:3], dtype=out.dtype)
    for rows, cols in _tiles(q, queries, keys, rules, all_seen):
        scores, _ = _scores(q, k, queries, keys, rows, cols, rules, all_seen)
        part = torch.logsumexp(scores, dim=-1, keepdim=True)
        # A row that sees nothing would be exp(-inf + inf).
        p = scores.sub_(part.masked_fill(part == -torch.inf, 0.0)).exp_()
        out[:, :, rows] = _ungroup(p @ v[:, :, cols].to(p.dtype), q.shape[1])
        lse[:, :, rows] = _ungroup(part, q.shape[1]).squeeze(-1)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Interval,
    keys: Interval,
    rules: AttentionRules,
    all_seen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block.

    Args:
        grad: Gradient of the output, [B, H, queries, Dv].
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        lse: Of the whole row, all key blocks joined, [B, H, queries].
        delta: Sum over Dv of grad times the whole output, [B, H, queries].
        queries: As in `forward`.
        keys: As in `forward`.
        rules: As in `forward`.
        all_seen: As in `forward`.

    Returns:
        Gradients of q, k and v in `wide` format.
    """
    heads, groups, exact = q.shape[1], k.shape[1], wide(q.dtype)
    dq = torch.zeros_like(q, dtype=exact)
    dk, dv = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
    for rows, cols in _tiles(q, queries, keys, rules, all_seen):
        scores, slope = _scores(q, k, queries, keys, rows, cols, rules, all_seen)
        p = scores.sub_(_group(lse[:, :, rows].unsqueeze(-1), groups)).exp_()
        g = _group(grad[:, :, rows], groups).to(exact)
        dv[:, :, cols] += p.transpose(-1, -2) @ g
        ds = g @ v[:, :, cols].to(exact).transpose(-1, -2)
        ds.sub_(_group(delta[:, :, rows].unsqueeze(-1), groups)).mul_(p).mul_(rules.scale)
        if slope is not None:
            ds.mul_(slope)
        dq[:, :, rows] = _ungroup(ds @ k[:, :, cols].to(exact), heads)
        dk[:, :, cols] += ds.transpose(-1, -2) @ _group(q[:, :, rows], groups).to(exact)
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Join another block's output into `out` and `lse`, in place; every row of `lse` is finite."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.add_(more * (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _tiles(
    q: Tensor, queries: Interval, keys: Interval, rules: AttentionRules, all_seen: bool
) -> Iterator[tuple[slice, slice]]:
    """Rows of queries with the keys that some of them may see, as slices of the block."""
    count = queries[1] - queries[0]
    per_row = q.shape[0] * q.shape[1] * (keys[1] - keys[0])
    # A masked block is worth cutting also where it is small: half of a causal one is never computed.
    rows = max(1, min(count, _SCORES // per_row))
    if not all_seen:
        rows = min(rows, max(128, -(-count // 8)))
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        first, last = keys
        if not all_seen:
            last = min(last, queries[0] + stop)
            if rules.window is not None:
                first = max(first, queries[0] + start - rules.window + 1)
        if first < last:
            yield slice(start, stop), slice(first - keys[0], last - keys[0])
        else:
            yield slice(start, stop), slice(0, 0)


def _scores(
    q: Tensor,
    k: Tensor,
    queries: Interval,
    keys: Interval,
    rows: slice,
    cols: slice,
    rules: AttentionRules,
    all_seen: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, G, (H / G) rows, cols], minus infinity where masked; and the slope of the cap, if there is one."""
    exact, slope = wide(q.dtype), None
    grouped = _group(q[:, :, rows], k.shape[1]).to(exact)
    scores = (grouped @ k[:, :, cols].to(exact).transpose(-1, -2)).mul_(rules.scale)
    if rules.softcap is not None:
        capped = scores.div_(rules.softcap).tanh_()
        slope = 1.0 - capped.square()
        scores = capped.mul_(rules.softcap)
    if not all_seen:
        hidden = rules.hidden(
            (queries[0] + rows.start, queries[0] + rows.stop),
            (keys[0] + cols.start, keys[0] + cols.stop),
            q.device,
        )
        by_head = scores.unflatten(2, (-1, rows.stop - rows.start))
        by_head.masked_fill_(hidden[:, None, None], -torch.inf)
    return scores, slope


def _group(x: Tensor, groups: int) -> Tensor:
    """[B, H, S, D] as [B, G, (H / G) S, D]: the queries of one key head are the rows of one matrix."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _ungroup(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_group`."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)
