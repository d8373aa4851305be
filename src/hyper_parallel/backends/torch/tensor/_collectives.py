"""Collectives of tensor parallelism on local tensors: along tokens, along features, and between the two cuts.

Activations between blocks are a shard of the tokens: `B` sequences of `S` tokens are one list of B*S tokens, cut into
equal pieces of ceil(B*S / tp); the last pieces are padded. A piece has the shape [1, piece, D], so that modules written
for [B, S, D] accept it. Cutting the list instead of every sequence needs no copy on either side of a collective, and no
divisibility.

    gather_tokens     [1, piece, D] on each rank -> [B, S, D] on every rank     backward: reduce-scatter
    scatter_tokens    [B, S, D] summands         -> [1, piece, D] of their sum  backward: all-gather
    slice_tokens      [B, S, D] equal on ranks   -> [1, piece, D]               backward: own part, zero elsewhere
    gather_features   [..., C] on each rank      -> [..., g C]                  backward: reduce-scatter
    scatter_features  [..., g C] summands        -> [..., C] of the sum         backward: all-gather
    tokens_to_features / features_to_tokens      [1, n, g C] <-> [1, g n, C], all-to-all; each is the other's backward

A consumer that every rank repeats gives equal gradients on all of them: `join_tokens` and `join_columns` gather for it,
and backward keeps a rank's own.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch._collectives import (
    all_to_all,
    gather_rows,
    paired,
    reduce_into,
)
from hyper_parallel.ir import Purpose


def piece_size(num_tokens: int, degree: int) -> int:
    """Tokens of one rank's piece: ceil(num_tokens / degree)."""
    return -(-num_tokens // degree)


def gather_tokens(
    piece: Tensor,
    batch: tuple[int, ...],
    group: ProcessGroup,
    name: Purpose = Purpose.SEQUENCE_GATHER,
) -> Tensor:
    """All tokens, [*batch, D], from every rank's piece; the ranks then do different work on them."""
    gather = partial(_gather_tokens, batch=batch, group=group, name=name)
    return paired(gather, partial(_scatter_tokens, group=group, name=name.backward), piece)


def scatter_tokens(
    partial_sum: Tensor, group: ProcessGroup, name: Purpose = Purpose.SEQUENCE_SCATTER
) -> Tensor:
    """This rank's piece of the sum of every rank's [B, S, D]."""
    batch = tuple(partial_sum.shape[:-1])
    back = partial(_gather_tokens, batch=batch, group=group, name=name.backward)
    return paired(partial(_scatter_tokens, group=group, name=name), back, partial_sum)


def slice_tokens(full: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's piece of a tensor that is equal on all ranks."""
    batch = tuple(full.shape[:-1])

    def back(grad: Tensor) -> Tensor:
        rows = grad.shape[-2]
        out = grad.new_zeros(group.size() * rows, grad.shape[-1])
        start = group.rank() * rows
        out[start : start + rows] = grad[0]
        return out[: math.prod(batch)].view(*batch, -1)

    return paired(lambda x: _own_tokens(x, group).clone(), back, full)


def join_tokens(piece: Tensor, batch: tuple[int, ...], group: ProcessGroup) -> Tensor:
    """All tokens from every rank's piece; the ranks then all do the same with them."""
    gather = partial(_gather_tokens, batch=batch, group=group, name=Purpose.LOGITS)
    return paired(gather, partial(_own_tokens, group=group), piece)


def join_columns(part: Tensor, group: ProcessGroup) -> Tensor:
    """The whole last dim from every rank's slice; the ranks then all do the same with it."""

    def join(x: Tensor) -> Tensor:
        parts = gather_rows(x, group, Purpose.LOGITS)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], -1)

    def own(grad: Tensor) -> Tensor:
        return grad.chunk(group.size(), dim=-1)[group.rank()].contiguous()

    return paired(join, own, part)


def gather_features(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """The whole last dim from every rank's slice; the ranks then do different work on it."""
    back = partial(_scatter_features, group=group, name=name.backward)
    return paired(partial(_gather_features, group=group, name=name), back, x)


def scatter_features(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """This rank's slice of the last dim of the sum of every rank's tensor."""
    back = partial(_gather_features, group=group, name=name.backward)
    return paired(partial(_scatter_features, group=group, name=name), back, x)


def tokens_to_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """A rank's tokens with all features, [1, n, C], to all tokens with a rank's features, [1, g n, C / g]."""
    return paired(partial(_to_features, group=group), partial(_to_tokens, group=group), x)


def features_to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """All tokens with a rank's features, [1, g n, C / g], to a rank's tokens with all features, [1, n, C]."""
    return paired(partial(_to_tokens, group=group), partial(_to_features, group=group), x)


def padded(tokens: Tensor, rows: int) -> Tensor:
    """[T, C] with zero rows behind, up to `rows`; itself when it has as many."""
    missing = rows - tokens.shape[0]
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens.contiguous()


def _gather_tokens(
    piece: Tensor, batch: tuple[int, ...], group: ProcessGroup, name: Purpose
) -> Tensor:
    rows = piece.shape[-2]
    out = gather_rows(piece.reshape(rows, -1), group, name).flatten(0, 1)
    num_tokens = math.prod(batch)
    if num_tokens != out.shape[0]:
        out = out[:num_tokens]
    return out.view(*batch, -1)


def _scatter_tokens(partial_sum: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    flat = partial_sum.reshape(-1, partial_sum.shape[-1])
    rows = piece_size(flat.shape[0], group.size())
    out = flat.new_empty(rows, flat.shape[1])
    return reduce_into(out, padded(flat, rows * group.size()), group, name).unsqueeze(0)


def _own_tokens(full: Tensor, group: ProcessGroup) -> Tensor:
    flat = full.reshape(-1, full.shape[-1])
    rows = piece_size(flat.shape[0], group.size())
    return padded(flat[group.rank() * rows : (group.rank() + 1) * rows], rows).unsqueeze(0)


def _gather_features(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    parts = gather_rows(x.reshape(-1, x.shape[-1]), group, name)
    return parts.transpose(0, 1).reshape(*x.shape[:-1], -1)


def _scatter_features(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    ranks = group.size()
    parts = x.reshape(-1, ranks, x.shape[-1] // ranks).transpose(0, 1).contiguous()
    out = parts.new_empty(parts.shape[1:])
    return reduce_into(out, parts.view(-1, parts.shape[-1]), group, name).view(*x.shape[:-1], -1)


def _to_features(x: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    parts = x.reshape(x.shape[-2], ranks, x.shape[-1] // ranks).transpose(0, 1).contiguous()
    out = all_to_all(torch.empty_like(parts), parts, group, Purpose.RELAYOUT)
    return out.view(1, -1, parts.shape[-1])


def _to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    parts = x.reshape(ranks, x.shape[-2] // ranks, x.shape[-1]).contiguous()
    out = all_to_all(torch.empty_like(parts), parts, group, Purpose.RELAYOUT)
    return out.transpose(0, 1).reshape(1, parts.shape[1], -1)
