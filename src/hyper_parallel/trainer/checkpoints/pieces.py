"""Writing the pieces of a state: each box of a tensor once, by one of the ranks that hold it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hyper_parallel.backends.torch.weights.shard_ranges import local, local_ranges
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.checkpoints.index import (
    DTYPES,
    Piece,
    checksum,
    header,
    piece_bytes,
    piece_key,
)

Place = tuple[str, tuple[int, ...]]
"""Name of a tensor, and the first index of the box."""


AtHome = Callable[[Tensor], Tensor]
"""Gives a local tensor, detached, on its bytes, wherever they are."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor that this rank holds.

    Attributes:
        name: Name of the tensor.
        offset: First index of the box.
        shape: Its shape.
        dtype: Number format.
        read: Gives its elements.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def box(self) -> Place:
        """What is equal on all ranks that hold the same elements."""
        return self.name, self.offset

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copied(self) -> HeldBox:
        """The same in memory of the host that nobody else writes."""
        data = self.read().to("cpu", copy=True)
        return replace(self, read=lambda: data)


def dtype_name(tensor: Tensor) -> str:
    """`float32` of torch.float32."""
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parts_of(tensors: Mapping[str, Tensor], at_home: AtHome = torch.Tensor.detach) -> list[HeldBox]:
    """The boxes that this rank holds of each tensor, read where its bytes are when they are wanted.

    Raises:
        UnsupportedSharding: HP205 for a split that boxes cannot express.
        BadValue: HP102 for a dtype that safetensors has not.
    """
    found = []
    for name, tensor in tensors.items():
        if dtype_name(tensor) not in DTYPES:
            raise BadValue(
                f"`{name}` cannot be saved", got=dtype_name(tensor), allowed=", ".join(DTYPES)
            )
        for box in itertools.product(*local_ranges(tensor, name)):
            shape = tuple(run.stop - run.start for run in box)
            begin, at = tuple(run.start for run in box), tuple(run.at for run in box)
            read = partial(_read, at_home, local(tensor), at, shape)
            found.append(HeldBox(name, begin, shape, tensor.dtype, read))
    return found


def _read(at_home: AtHome, held: Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    data = at_home(held)
    for dim, (begin, length) in enumerate(zip(at, shape, strict=True)):
        data = data.narrow(dim, begin, length)
    return data


def owners(held: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """The rank that writes each box, such that ranks write about the same number of bytes.

    Args:
        held: Bytes of every box, per rank.
    """
    holders: dict[Place, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    filled, result = [0] * len(held), {}
    # What only one rank holds comes first; of the rest the largest.
    order = sorted(holders, key=lambda b: (len(holders[b]) > 1, -held[holders[b][0]][b], b))
    for box in order:
        rank = min(holders[box], key=lambda r: filled[r])
        result[box] = rank
        filled[rank] += held[rank][box]
    return result


def write_pieces(path: Path, parts: Sequence[HeldBox]) -> list[tuple[str, Piece]]:
    """Write a safetensors file, flushed to the disk; name of the tensor and place of each piece."""
    # Elements of more bytes first, so that each piece is aligned.
    parts = sorted(parts, key=lambda p: (-p.dtype.itemsize, p.box))
    dtypes = [_name(p.dtype) for p in parts]
    first = header(
        [
            (piece_key(p.name, p.offset), dtype, p.shape)
            for p, dtype in zip(parts, dtypes, strict=True)
        ]
    )
    written, at = [], len(first)
    with path.open("wb") as file:
        file.write(first)
        for part, dtype in zip(parts, dtypes, strict=True):
            shape = part.shape
            end = at + piece_bytes(dtype, shape)
            data = part.read().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(data)
            written.append(
                (part.name, Piece(path.name, part.offset, shape, at, end, checksum(data)))
            )
            at = end
        file.flush()
        os.fsync(file.fileno())
    return written
