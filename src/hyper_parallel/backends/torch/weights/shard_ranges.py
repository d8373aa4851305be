"""Shard of a parameter on this rank: its index ranges, as runs per dim or as boxes, and copies into it.

`local_runs` converts the placements of a DTensor into runs of consecutive indices per dim. A dim that both tensor
parallelism and FSDP shard (`_StridedShard`) may have several runs. A box has one index range per dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Box, LocalBox, Runs, boxes, runs_of_splits, transfers

_S = TypeVar("_S")


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd; return a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_runs(tensor: Tensor, name: str = "tensor") -> tuple[Runs, ...]:
    """Return, for each dim, the runs of consecutive indices on this rank; for a plain tensor, one run of all indices.

    Raises:
        UnsupportedSharding: HP205 when the tensor is partial, or the placement of its uneven shards is ambiguous.
    """
    splits: list[list[tuple[int, int, int]]] = [[] for _ in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise UnsupportedSharding(
                    f"`{name}` is partial over a mesh axis; weights must be sharded or replicated",
                    got=tensor.placements,
                    allowed="Shard and Replicate",
                    hint=f"call `redistribute` on `{name}`",
                )
            dim = getattr(placement, "dim", None)
            if dim is not None:
                blocks = getattr(placement, "split_factor", 1)
                rank = mesh.size(mesh_dim) if coordinate is None else coordinate[mesh_dim]
                splits[dim].append((mesh.size(mesh_dim), blocks, rank))
    result = []
    for dim, size in enumerate(tensor.shape):
        runs = runs_of_splits(size, splits[dim])
        if runs is None:
            raise UnsupportedSharding(
                f"dim {dim} of `{name}`, of size {size}, is split unevenly by several mesh axes",
                got=tensor.placements,
                allowed="sizes that the product of their degrees divides",
                hint="lower the degree of one of these axes, such as parallel.dp_shard or parallel.tp",
            )
        result.append(runs)
    return tuple(result)


def local_boxes(tensor: Tensor, name: str) -> list[LocalBox]:
    """Return the boxes that this rank's shard consists of; errors as in `local_runs`."""
    return boxes(name, local_runs(tensor, name))


def select(full: Tensor, runs: Sequence[Runs]) -> Tensor:
    """Return the elements of a full tensor within the runs of each dim; a view if each dim has one run."""
    for dim, ranges in enumerate(runs):
        if ranges == ((0, full.shape[dim]),):
            continue
        pieces = [full.narrow(dim, start, stop - start) for start, stop in ranges]
        full = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [full.narrow(dim, 0, 0)], dim)
    return full


def copy_full(tensor: Tensor, full: Tensor, name: str = "tensor") -> None:
    """Copy this rank's shard of `full` into `tensor`, with a cast to its dtype; errors as in `local_runs`."""
    local(tensor).detach().copy_(select(full, local_runs(tensor, name)))


def copy_parts(
    target: Tensor,
    own: Sequence[LocalBox],
    sources: Iterable[tuple[_S, Box]],
    read: Callable[[_S, Box], Tensor],
) -> None:
    """Fill this rank's shard of a tensor from stored boxes; sources that do not overlap the shard are not read.

    Args:
        target: Local tensor.
        own: Boxes of the shard, see `local_boxes`.
        sources: Pairs of a source, such as a file, and its box of the full tensor.
        read: Function that returns the elements of a box that is inside of a source's box.
    """
    for source, to, box in transfers(sources, [(part, part.box) for part in own]):
        index = tuple(slice(start, stop) for start, stop in box.within(to.box))
        target[to.index][index].copy_(read(source, box))
