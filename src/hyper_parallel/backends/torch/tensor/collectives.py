"""Differentiable collectives of tensor parallelism on local tensors, along one dim.

    gather   all-gather; ranks then compute different values         backward: scatter
    scatter  reduce-scatter                                          backward: gather
    join     all-gather; all ranks then compute the same values      backward: this rank's slice
    reshard  all-to-all from slices of one dim to slices of another  backward: the inverse all-to-all

The slices of all ranks have equal sizes, because tokens are padded before they are sharded, see `TokenGrid`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import (
    all_to_all,
    launch_gather_rows,
    launch_reduce_into,
    paired,
)
from hyper_parallel.backends.torch.in_flight import CollectiveLauncher, collective
from hyper_parallel.ir import Purpose


def padded(tokens: Tensor, rows: int) -> Tensor:
    """Pad tokens [..., T, C] with zeros to [..., rows, C], T <= rows; return the input itself if T equals `rows`."""
    missing = rows - tokens.shape[-2]
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def gather(x: Tensor, dim: int, group: ProcessGroup, name: Purpose) -> Tensor:
    """Gather slices along a dim from all ranks; backward is a reduce-scatter, for ranks that use different results."""
    return collective(*gather_pair(dim, group, name), x)  # type: ignore[no-any-return]


def gather_pair(dim: int, group: ProcessGroup, name: Purpose) -> tuple[CollectiveLauncher, CollectiveLauncher]:
    """Return launchers of an all-gather along a dim and of its backward, a reduce-scatter, for `PendingCollective`."""
    back = partial(_launch_scatter, dim=dim, group=group, name=name.backward)
    return partial(_launch_gather, dim=dim, group=group, name=name), back


def scatter(x: Tensor, dim: int, group: ProcessGroup, name: Purpose, *, leads_to_start: bool = False) -> Tensor:
    """Reduce-scatter along a dim; backward is an all-gather. `leads_to_start` is that of `PendingCollective.finish`."""
    return collective(*scatter_pair(dim, group, name), x, leads_to_start=leads_to_start)  # type: ignore[no-any-return]


def scatter_pair(dim: int, group: ProcessGroup, name: Purpose) -> tuple[CollectiveLauncher, CollectiveLauncher]:
    """Return launchers of a reduce-scatter along a dim and of its backward, an all-gather, for `PendingCollective`."""
    back = partial(_launch_gather, dim=dim, group=group, name=name.backward)
    return partial(_launch_scatter, dim=dim, group=group, name=name), back


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Gather slices along a dim from all ranks; backward selects this rank's slice of a gradient equal on all ranks."""

    def select_slice(grad: Tensor) -> Tensor:
        return grad.chunk(group.size(), dim)[group.rank()].contiguous()

    def whole(x: Tensor) -> Tensor:
        result: Tensor = _launch_gather(x, dim, group, Purpose.LOGITS, async_op=False)()
        return result

    return paired(whole, select_slice, x)  # type: ignore[no-any-return]


def reshard(
    tensors: tuple[Tensor, ...],
    shard_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: Purpose,
    neighbours: int | None = None,
) -> tuple[Tensor, ...]:
    """Move the sharding of tensors from dim `gather_dim` to dim `shard_dim` with one all-to-all.

    Args:
        tensors: Local shards along dim `gather_dim`.
        shard_dim: Dim that is sharded afterwards; not negative, with a size divisible by the number of ranks.
        gather_dim: Dim that is gathered; not negative.
        group: Process group.
        name: Purpose of the collective.
        neighbours: Size of the subgroups of consecutive ranks that exchange with each other; None: the entire group.
    """
    ranks = group.size() if neighbours is None else neighbours

    def exchange(shard_dim: int, gather_dim: int, name: Purpose, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = [x.unflatten(shard_dim, (ranks, -1)).movedim(shard_dim, 0) for x in tensors]
        rows = [p.reshape(ranks, -1) for p in parts]
        send = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        received = torch.empty_like(send)
        if ranks == group.size():
            all_to_all(received, send, group, name)
        else:
            first = group.rank() // ranks * ranks
            splits = [0] * group.size()
            splits[first : first + ranks] = [send.shape[1]] * ranks
            all_to_all(received.view(-1), send.view(-1), group, name, splits, splits)
        columns = received.split([r.shape[1] for r in rows], dim=1)
        return tuple(
            c.view(p.shape).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)
            for c, p in zip(columns, parts, strict=True)
        )

    forward = partial(exchange, shard_dim, gather_dim, name)
    return paired(forward, partial(exchange, gather_dim, shard_dim, name.backward), *tensors)  # type: ignore[no-any-return]


def _launch_gather(x: Tensor, dim: int, group: ProcessGroup, name: Purpose, *, async_op: bool) -> Callable[[], Tensor]:
    dim %= x.dim()
    wait = launch_gather_rows(x, group, name, async_op=async_op)
    return lambda: wait().movedim(0, dim).flatten(dim, dim + 1)


def _launch_scatter(x: Tensor, dim: int, group: ProcessGroup, name: Purpose, *, async_op: bool) -> Callable[[], Tensor]:
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim % x.dim(), 0).contiguous()
    out = parts.new_empty(parts.shape[1:])
    return launch_reduce_into(out, parts.flatten(0, 1), group, name, async_op=async_op)
