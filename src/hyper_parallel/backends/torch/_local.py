"""The part of a parameter that this rank stores, as index ranges of the whole parameter.

`local_ranges` turns the placements of a DTensor into runs of consecutive indices per dim, so that weights can be cut
from a full tensor or read from a file without any communication. A dim that tensor parallelism and FSDP both split
(`_StridedShard`) may give several runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import UnsupportedSharding


@dataclass(frozen=True, slots=True)
class Run:
    """Indices `start` to `stop` of a dim of the whole tensor, stored from index `at` of the local tensor."""

    start: int
    stop: int
    at: int


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor this rank stores, without autograd: the local part of a DTensor, otherwise the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_ranges(tensor: Tensor, name: str = "tensor") -> tuple[tuple[Run, ...], ...]:
    """Runs of indices that this rank stores, for each dim.

    Raises:
        UnsupportedSharding: The tensor is partial, or its uneven split has no unambiguous placement.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise UnsupportedSharding(
                    f"`{name}` is partial over a mesh axis; weights must be sharded or replicated",
                    got=tensor.placements,
                )
            dim = getattr(placement, "dim", None)
            if dim is None:
                continue
            degree = tensor.device_mesh.size(mesh_dim)
            rank = None if coordinate is None else coordinate[mesh_dim]
            blocks = indices[dim].chunk(getattr(placement, "split_factor", 1))
            indices[dim] = torch.cat([_chunk(block, degree, rank) for block in blocks])
        stored = tuple(local_tensor(tensor).shape)
        if stored != tuple(len(i) for i in indices):
            raise UnsupportedSharding(
                f"`{name}` of shape {tuple(tensor.shape)} is split unevenly by two mesh axes",
                got=f"local shape {stored} for placements {tensor.placements}",
                allowed="sizes that the product of the two degrees divides",
            )
    return tuple(_runs(i.tolist()) for i in indices)


def copy_full(tensor: Tensor, full: Tensor, name: str = "tensor") -> None:
    """Copy into `tensor` the part of `full` that this rank stores; the dtype of `tensor` is kept."""
    for dim, runs in enumerate(local_ranges(tensor, name)):
        if len(runs) == 1 and runs[0].stop - runs[0].start == full.shape[dim]:
            continue
        pieces = [full.narrow(dim, run.start, run.stop - run.start) for run in runs]
        full = torch.cat(pieces, dim) if pieces else full.narrow(dim, 0, 0)
    local_tensor(tensor).copy_(full)


def _chunk(indices: Tensor, degree: int, rank: int | None) -> Tensor:
    chunks = indices.chunk(degree)
    return chunks[rank] if rank is not None and rank < len(chunks) else indices[:0]


def _runs(indices: list[int]) -> tuple[Run, ...]:
    starts = [k for k, i in enumerate(indices) if k == 0 or i != indices[k - 1] + 1]
    ends = [*starts[1:], len(indices)]
    return tuple(
        Run(indices[a], indices[b - 1] + 1, a) for a, b in zip(starts, ends, strict=True) if b > a
    )
