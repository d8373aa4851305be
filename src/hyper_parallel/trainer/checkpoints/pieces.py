"""Writing of the pieces of a state: each box of a tensor is written once, by one of the ranks that have it."""

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


Resident = Callable[[Tensor], Tensor]
"""Function that returns a local tensor, detached, with its current bytes on any tier."""


@dataclass(frozen=True, slots=True)
class LocalBox:
    """Box of a tensor in this rank's memory.

    Attributes:
        name: Name of the tensor.
        offset: First index of the box.
        shape: Shape of the box.
        dtype: Dtype of the tensor.
        read: Returns the elements.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def box(self) -> Place:
        """Key that is equal on all ranks with the same elements."""
        return self.name, self.offset

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copied(self) -> LocalBox:
        """Return the box with a private copy of its elements in host memory."""
        data = self.read().to("cpu", copy=True)
        return replace(self, read=lambda: data)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without the prefix `torch.`."""
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parts_of(
    tensors: Mapping[str, Tensor], resident: Resident = torch.Tensor.detach
) -> list[LocalBox]:
    """Return this rank's boxes of each tensor; elements are read on demand from their current tier.

    Raises:
        UnsupportedSharding: HP205 for a split that boxes cannot express.
        BadValue: HP102 for a dtype that safetensors does not support.
    """
    boxes = []
    for name, tensor in tensors.items():
        if dtype_name(tensor) not in DTYPES:
            raise BadValue(
                f"`{name}` cannot be saved", got=dtype_name(tensor), allowed=", ".join(DTYPES)
            )
        for box in itertools.product(*local_ranges(tensor, name)):
            shape = tuple(run.stop - run.start for run in box)
            begin, offsets = tuple(run.start for run in box), tuple(run.local_start for run in box)
            read = partial(_read, resident, local(tensor), offsets, shape)
            boxes.append(LocalBox(name, begin, shape, tensor.dtype, read))
    return boxes


def _read(
    resident: Resident, tensor: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    data = resident(tensor)
    for dim, (begin, length) in enumerate(zip(offsets, shape, strict=True)):
        data = data.narrow(dim, begin, length)
    return data


def owners(box_bytes: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """Return the writing rank of each box, balanced by bytes.

    Args:
        box_bytes: Bytes of every box, per rank.
    """
    candidates: dict[Place, list[int]] = {}
    for rank, boxes in enumerate(box_bytes):
        for box in boxes:
            candidates.setdefault(box, []).append(rank)
    filled, result = [0] * len(box_bytes), {}
    # Boxes of a single rank first, then replicated boxes by decreasing size.
    order = sorted(
        candidates, key=lambda b: (len(candidates[b]) > 1, -box_bytes[candidates[b][0]][b], b)
    )
    for box in order:
        rank = min(candidates[box], key=lambda r: filled[r])
        result[box] = rank
        filled[rank] += box_bytes[rank][box]
    return result


def write_pieces(path: Path, parts: Sequence[LocalBox]) -> list[tuple[str, Piece]]:
    """Write a safetensors file, flushed to the disk, and return tensor name and position of each piece."""
    # Larger element sizes first, so that each piece is aligned.
    parts = sorted(parts, key=lambda p: (-p.dtype.itemsize, p.box))
    dtypes = [_name(p.dtype) for p in parts]
    first = header(
        [
            (piece_key(p.name, p.offset), dtype, p.shape)
            for p, dtype in zip(parts, dtypes, strict=True)
        ]
    )
    written, begin = [], len(first)
    with path.open("wb") as file:
        file.write(first)
        for part, dtype in zip(parts, dtypes, strict=True):
            shape = part.shape
            end = begin + piece_bytes(dtype, shape)
            data = part.read().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(data)
            written.append(
                (part.name, Piece(path.name, part.offset, shape, begin, end, checksum(data)))
            )
            begin = end
        file.flush()
        os.fsync(file.fileno())
    return written
