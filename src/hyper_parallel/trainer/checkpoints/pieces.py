"""Writing of the pieces of a state: each box of a tensor is written once, by one of the ranks that have it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hyper_parallel.backends.torch.weights.shard_ranges import local, local_boxes
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import Box
from hyper_parallel.trainer.checkpoints.index import (
    DTYPES,
    Piece,
    checksum,
    header,
    piece_key,
)

Resident = Callable[[Tensor], Tensor]
"""Function that returns a local tensor, detached, with its current bytes on any tier."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Box of a tensor in this rank's memory.

    Attributes:
        box: The box, equal on all ranks with the same elements.
        dtype: Dtype of the tensor.
        read: Returns the elements.
    """

    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.box.size * self.dtype.itemsize

    def copied(self) -> StatePart:
        """Return the part with a private copy of its elements in host memory."""
        data = self.read().to("cpu", copy=True)
        return replace(self, read=lambda: data)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without the prefix `torch.`."""
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parts_of(
    tensors: Mapping[str, Tensor], resident: Resident = torch.Tensor.detach
) -> list[StatePart]:
    """Return this rank's parts of each tensor; elements are read on demand from their current tier.

    Raises:
        UnsupportedSharding: HP205 for a split that boxes cannot express.
        BadValue: HP102 for a dtype that safetensors does not support.
    """
    parts = []
    for name, tensor in tensors.items():
        if dtype_name(tensor) not in DTYPES:
            raise BadValue(
                f"`{name}` cannot be saved: its dtype is not supported",
                got=dtype_name(tensor),
                allowed=", ".join(DTYPES),
            )
        for part in local_boxes(tensor, name):
            read = partial(_read, resident, local(tensor), part.index)
            parts.append(StatePart(part.box, tensor.dtype, read))
    return parts


def _read(resident: Resident, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
    return resident(tensor)[index]


def write_pieces(path: Path, parts: Sequence[StatePart]) -> list[tuple[str, Piece]]:
    """Write a safetensors file, flushed to the disk, and return tensor name and position of each piece."""
    # Larger element sizes first, so that each piece is aligned.
    parts = sorted(parts, key=lambda p: (-p.dtype.itemsize, p.box))
    first = header(
        [(piece_key(p.box.name, p.box.offset), _name(p.dtype), p.box.shape) for p in parts]
    )
    written, begin = [], len(first)
    with path.open("wb") as file:
        file.write(first)
        for part in parts:
            box, end = part.box, begin + part.num_bytes
            data = part.read().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(data)
            written.append(
                (box.name, Piece(path.name, box.offset, box.shape, begin, end, checksum(data)))
            )
            begin = end
        file.flush()
        os.fsync(file.fileno())
    return written
