"""The part of a parameter that this rank stores, as index ranges of the whole parameter.

`local_ranges` turns the placements of a DTensor into runs of consecutive indices per dim, so that weights can be cut
from a full tensor or read from a file without any communication. A dim that tensor parallelism and FSDP both split
(`_StridedShard`) may give several runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import UnsupportedSharding

_Split = tuple[int, int, int]
"""Degree of a mesh axis that splits a dim, blocks it splits separately (1: the whole), and this rank's place."""


@dataclass(frozen=True, slots=True)
class Run:
    """Indices `start` to `stop` of a dim of the whole tensor, stored from index `at` of the local tensor."""

    start: int
    stop: int
    at: int


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, without autograd; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_ranges(tensor: Tensor, name: str = "tensor") -> tuple[tuple[Run, ...], ...]:
    """Runs of indices that this rank stores, for each dim.

    Raises:
        UnsupportedSharding: The tensor is partial, or its uneven split has no unambiguous placement.
    """
    splits: dict[int, list[_Split]] = {}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise UnsupportedSharding(
                    f"`{name}` is partial over a mesh axis; weights must be sharded or replicated",
                    got=tensor.placements,
                )
            dim = getattr(placement, "dim", None)
            if dim is not None:
                blocks = getattr(placement, "split_factor", 1)
                rank = mesh.size(mesh_dim) if coordinate is None else coordinate[mesh_dim]
                splits.setdefault(dim, []).append((mesh.size(mesh_dim), blocks, rank))
        for dim, split in splits.items():
            size = tensor.shape[dim]
            if not _unambiguous(size, tuple((d, b) for d, b, _ in split)):
                raise UnsupportedSharding(
                    f"dim {dim} of `{name}`, of size {size}, is split unevenly by two mesh axes",
                    got=tensor.placements,
                    allowed="sizes that the product of the two degrees divides",
                )
    return tuple(_runs(size, tuple(splits.get(dim, ()))) for dim, size in enumerate(tensor.shape))


def copy_full(tensor: Tensor, full: Tensor, name: str = "tensor") -> None:
    """Copy into `tensor` the part of `full` that this rank stores; the dtype of `tensor` is kept."""
    for dim, runs in enumerate(local_ranges(tensor, name)):
        if len(runs) == 1 and runs[0].stop - runs[0].start == full.shape[dim]:
            continue
        pieces = [full.narrow(dim, run.start, run.stop - run.start) for run in runs]
        full = torch.cat(pieces, dim) if pieces else full.narrow(dim, 0, 0)
    local(tensor).detach().copy_(full)


def _stored(indices: Tensor, splits: Sequence[_Split]) -> Tensor:
    """What one rank stores of a dim, in the order in which DTensor reads its placements."""
    for degree, blocks, rank in splits:
        indices = torch.cat([_chunk(block, degree, rank) for block in indices.chunk(blocks)])
    return indices


@functools.lru_cache(maxsize=256)  # many parameters of thousands of ranks have few sizes
def _unambiguous(size: int, splits: tuple[tuple[int, int], ...]) -> bool:
    """Whether every rank stores the same indices when FSDP, applied last, splits the part of tensor parallelism.

    Args:
        size: Of the dim.
        splits: Degree and blocks of each axis that splits it.
    """
    degrees = [degree for degree, _ in splits]
    if all(blocks == 1 for _, blocks in splits) or size % math.prod(degrees) == 0:
        return True
    indices = torch.arange(size)
    inner = [k for k, (_, blocks) in enumerate(splits) if blocks == 1]
    outer = [k for k, (_, blocks) in enumerate(splits) if blocks > 1]
    for ranks in itertools.product(*(range(degree) for degree in degrees)):
        read = _stored(indices, [(d, b, r) for (d, b), r in zip(splits, ranks, strict=True)])
        held = indices
        for k in inner + outer[::-1]:
            held = _chunk(held, degrees[k], ranks[k])
        if not torch.equal(read, held):
            return False
    return True


def _chunk(indices: Tensor, degree: int, rank: int) -> Tensor:
    chunks = indices.chunk(degree)
    return chunks[rank] if rank < len(chunks) else indices[:0]


@functools.lru_cache(maxsize=256)
def _runs(size: int, splits: tuple[_Split, ...]) -> tuple[Run, ...]:
    """What this rank stores of a dim."""
    indices = _stored(torch.arange(size), splits)
    if not len(indices):
        return ()
    ends = (indices[1:] != indices[:-1] + 1).nonzero().flatten() + 1
    bounds = [0, *ends.tolist(), len(indices)]
    return tuple(
        Run(int(indices[a]), int(indices[b - 1]) + 1, a) for a, b in itertools.pairwise(bounds)
    )
