"""The part of a parameter that this rank stores, as index ranges of the whole parameter.

`local_ranges` turns the placements of a DTensor into runs of consecutive indices per dim, so that weights can be cut
from a full tensor or read from a file without any communication. A dim that tensor parallelism and FSDP both split
(`_StridedShard`) may give several runs.
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
    return tuple(_runs(_stored(n, splits.get(dim, ()))) for dim, n in enumerate(tensor.shape))


def copy_full(tensor: Tensor, full: Tensor, name: str = "tensor") -> None:
    """Copy into `tensor` the part of `full` that this rank stores; the dtype of `tensor` is kept."""
    for dim, runs in enumerate(local_ranges(tensor, name)):
        if len(runs) == 1 and runs[0].stop - runs[0].start == full.shape[dim]:
            continue
        pieces = [full.narrow(dim, run.start, run.stop - run.start) for run in runs]
        full = torch.cat(pieces, dim) if pieces else full.narrow(dim, 0, 0)
    local(tensor).detach().copy_(full)


def _stored(size: int, splits: Iterable[_Split]) -> list[range]:
    """What one rank stores of a dim, in the order in which DTensor reads its placements."""
    held = [range(size)]
    for degree, blocks, rank in splits:
        held = [
            piece
            for block in range(blocks)
            for piece in _chunk(_chunk(held, blocks, block), degree, rank)
        ]
    return held


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
    inner = [k for k, (_, blocks) in enumerate(splits) if blocks == 1]
    outer = [k for k, (_, blocks) in enumerate(splits) if blocks > 1]
    for ranks in itertools.product(*(range(degree) for degree in degrees)):
        read = _stored(size, [(d, b, r) for (d, b), r in zip(splits, ranks, strict=True)])
        held = [range(size)]
        for k in inner + outer[::-1]:
            held = _chunk(held, degrees[k], ranks[k])
        if _runs(read) != _runs(held):
            return False
    return True


def _chunk(pieces: Sequence[range], count: int, number: int) -> list[range]:
    """A chunk of some indices, as `torch.chunk` cuts them: the last ones may be shorter, or empty."""
    length = -(-sum(map(len, pieces)) // count)
    start, found = number * length, []
    for piece in pieces:
        found.append(piece[max(start, 0) : max(start + length, 0)])
        start -= len(piece)
    return [part for part in found if part]


def _runs(pieces: Iterable[range]) -> tuple[Run, ...]:
    """The same, those that follow each other as one."""
    runs: list[Run] = []
    at = 0
    for piece in pieces:
        if runs and runs[-1].stop == piece.start:
            runs[-1] = Run(runs[-1].start, piece.stop, runs[-1].at)
        elif piece:
            runs.append(Run(piece.start, piece.stop, at))
        at += len(piece)
    return tuple(runs)
