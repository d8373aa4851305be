"""Collectives of tensor parallelism on local tensors along one dim, with the one that their gradient goes through.

    gather   a slice on each rank -> the whole, on which ranks work differently    backward: scatter
    scatter  a summand on each    -> this rank's slice of the sum                  backward: gather
    join     a slice on each      -> the whole, on which all ranks do the same     backward: a rank's own slice
    reshard  slices of one dim    -> slices of another dim, all-to-all             backward: the way back

Slices are equal: tokens are padded before they are cut, see `TokenGrid`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import (
    all_to_all,
    gather_rows,
    paired,
    reduce_into,
)
from hyper_parallel.ir import Purpose


def piece_size(num_tokens: int, degree: int) -> int:
    """Tokens of one rank's piece: ceil(num_tokens / degree)."""
    return -(-num_tokens // degree)


def padded(tokens: Tensor, rows: int) -> Tensor:
    """[..., T, C] with zero rows behind, up to `rows`; itself when it has as many."""
    missing = rows - tokens.shape[-2]
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def gather(x: Tensor, dim: int, group: ProcessGroup, name: Purpose) -> Tensor:
    """The whole of a dim from every rank's slice; the ranks then do different work on it."""
    back = partial(_scatter, dim=dim, group=group, name=name.backward)
    return paired(partial(_gather, dim=dim, group=group, name=name), back, x)


def scatter(x: Tensor, dim: int, group: ProcessGroup, name: Purpose) -> Tensor:
    """This rank's slice of a dim of the sum of every rank's tensor."""
    back = partial(_gather, dim=dim, group=group, name=name.backward)
    return paired(partial(_scatter, dim=dim, group=group, name=name), back, x)


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The whole of a dim from every rank's slice; the ranks then all do the same with it."""

    def own(grad: Tensor) -> Tensor:
        return grad.chunk(group.size(), dim)[group.rank()].contiguous()

    return paired(partial(_gather, dim=dim, group=group, name=Purpose.LOGITS), own, x)


def reshard(
    tensors: tuple[Tensor, ...],
    cut: int,
    whole: int,
    group: ProcessGroup,
    name: Purpose,
    neighbours: int | None = None,
) -> tuple[Tensor, ...]:
    """Tensors of which each rank has a slice of dim `whole`, with a slice of dim `cut` instead; in one call.

    Only as many `neighbours` in the group exchange with each other; None: all of it.
    """
    ranks = group.size() if neighbours is None else neighbours

    def exchange(cut: int, whole: int, name: Purpose, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = [x.unflatten(cut, (ranks, -1)).movedim(cut, 0) for x in tensors]
        rows = [p.reshape(ranks, -1) for p in parts]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        came = torch.empty_like(sent)
        if ranks == group.size():
            all_to_all(came, sent, group, name)
        else:
            first = group.rank() // ranks * ranks
            splits = [0] * group.size()
            splits[first : first + ranks] = [sent.shape[1]] * ranks
            all_to_all(came.view(-1), sent.view(-1), group, name, splits, splits)
        columns = came.split([r.shape[1] for r in rows], dim=1)
        return tuple(
            c.view(p.shape).movedim(0, whole).flatten(whole, whole + 1)
            for c, p in zip(columns, parts, strict=True)
        )

    forward = partial(exchange, cut, whole, name)
    return paired(forward, partial(exchange, whole, cut, name.backward), *tensors)  # type: ignore[no-any-return]


def _gather(x: Tensor, dim: int, group: ProcessGroup, name: Purpose) -> Tensor:
    dim %= x.dim()
    return gather_rows(x, group, name).movedim(0, dim).flatten(dim, dim + 1)


def _scatter(x: Tensor, dim: int, group: ProcessGroup, name: Purpose) -> Tensor:
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim % x.dim(), 0).contiguous()
    return reduce_into(parts.new_empty(parts.shape[1:]), parts.flatten(0, 1), group, name)
