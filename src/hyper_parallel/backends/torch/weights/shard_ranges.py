"""Shard of a parameter on this rank, as index ranges of the full parameter.

`local_ranges` converts the placements of a DTensor into runs of consecutive indices per dim. With them a rank slices
its weights from a full tensor or reads them from a file without communication. A dim that tensor parallelism and FSDP
both shard (`_StridedShard`) may have several runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import UnsupportedSharding

_Split = tuple[int, int, int]
"""Degree of a mesh axis that shards a dim, number of blocks it shards separately, and this rank's index."""


@dataclass(frozen=True, slots=True)
class Run:
    """Indices `start` to `stop` of a dim of the full tensor, stored from index `local_start` of the local tensor."""

    start: int
    stop: int
    local_start: int


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd; a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_ranges(tensor: Tensor, name: str = "tensor") -> tuple[tuple[Run, ...], ...]:
    """Return the runs of indices on this rank for each dim.

    Raises:
        UnsupportedSharding: The tensor is partial, or the placement of its uneven shards is ambiguous.
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
    return tuple(_runs(_stored(n, splits.get(dim, ()))) for dim, n in enumerate(tensor.shape))


def copy_full(tensor: Tensor, full: Tensor, name: str = "tensor") -> None:
    """Copy this rank's shard of `full` into `tensor`, with a cast to its dtype."""
    for dim, runs in enumerate(local_ranges(tensor, name)):
        if len(runs) == 1 and runs[0].stop - runs[0].start == full.shape[dim]:
            continue
        pieces = [full.narrow(dim, run.start, run.stop - run.start) for run in runs]
        full = torch.cat(pieces, dim) if pieces else full.narrow(dim, 0, 0)
    local(tensor).detach().copy_(full)


def _stored(size: int, splits: Iterable[_Split]) -> list[range]:
    """Return the indices of a dim on one rank, with placements applied in DTensor's order."""
    stored = [range(size)]
    for degree, blocks, rank in splits:
        stored = [
            piece
            for block in range(blocks)
            for piece in _chunk(_chunk(stored, blocks, block), degree, rank)
        ]
    return stored


@functools.lru_cache(maxsize=256)  # many parameters of thousands of ranks have few sizes
def _unambiguous(size: int, splits: tuple[tuple[int, int], ...]) -> bool:
    """Return whether DTensor's order and FSDP applied last to the tensor-parallel shard store equal indices per rank.

    Args:
        size: Size of the dim.
        splits: Degree and blocks of each axis that shards the dim.
    """
    degrees = [degree for degree, _ in splits]
    if all(blocks == 1 for _, blocks in splits) or size % math.prod(degrees) == 0:
        return True
    inner = [k for k, (_, blocks) in enumerate(splits) if blocks == 1]
    outer = [k for k, (_, blocks) in enumerate(splits) if blocks > 1]
    for ranks in itertools.product(*(range(degree) for degree in degrees)):
        read = _stored(size, [(d, b, r) for (d, b), r in zip(splits, ranks, strict=True)])
        stored = [range(size)]
        for k in inner + outer[::-1]:
            stored = _chunk(stored, degrees[k], ranks[k])
        if _runs(read) != _runs(stored):
            return False
    return True


def _chunk(pieces: Sequence[range], count: int, number: int) -> list[range]:
    """Return one chunk of some indices by the rule of `torch.chunk`: the last chunks may be shorter or empty."""
    length = -(-sum(map(len, pieces)) // count)
    start, parts = number * length, []
    for piece in pieces:
        parts.append(piece[max(start, 0) : max(start + length, 0)])
        start -= len(piece)
    return [part for part in parts if part]


def _runs(pieces: Iterable[range]) -> tuple[Run, ...]:
    """Return runs for some ranges, with adjacent ranges merged."""
    runs: list[Run] = []
    local_start = 0
    for piece in pieces:
        if runs and runs[-1].stop == piece.start:
            runs[-1] = Run(runs[-1].start, piece.stop, runs[-1].local_start)
        elif piece:
            runs.append(Run(piece.start, piece.stop, local_start))
        local_start += len(piece)
    return tuple(runs)
