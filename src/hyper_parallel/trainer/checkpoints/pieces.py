"""Blocks of tensors that a rank saves, and the safetensors file that it writes them to."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hyper_parallel.backends.torch.weights.shard_ranges import local, local_boxes
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import Box
from hyper_parallel.trainer.checkpoints.index import Piece, checksum, header, piece_key
from hyper_parallel.units import DTYPES

Resident = Callable[[Tensor], Tensor]
"""Function that returns the detached current values of a local tensor, which a memory plan may have offloaded."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rectangular block (box) of a tensor in this rank's memory.

    Attributes:
        box: Tensor name and ranges of the block; equal on all ranks that have the same elements.
        dtype: Dtype of the tensor.
        read: Function that returns the elements of the block.
    """

    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the elements."""
        return self.box.size * self.dtype.itemsize

    def copy_to_host(self) -> StatePart:
        """Return a part that reads from a new copy of the elements in host memory."""
        data = self.read().to("cpu", copy=True)
        return replace(self, read=lambda: data)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def check_dtype(dtype: str | None, allowed: Collection[str]) -> None:
    """Raise BadValue (HP102) for an unsupported value of the command-line option `--dtype`; None is supported."""
    if dtype is not None and dtype not in allowed:
        raise BadValue(
            f"this command does not support the dtype `{dtype}` for weights",
            where="--dtype",
            got=dtype,
            allowed=[*allowed],
            changes={"--dtype": "float32"},
        )


def parts_of(tensors: Mapping[str, Tensor], resident: Resident = torch.Tensor.detach) -> list[StatePart]:
    """Return the blocks of each tensor that this rank has; their elements are read later, by `StatePart.read`.

    Raises:
        UnsupportedSharding: HP205 for a partial tensor, or a dim that several mesh axes split unevenly.
        BadValue: HP102 for a dtype that safetensors does not support.
    """
    parts = []
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in DTYPES:
            raise BadValue(
                f"`{name}` cannot be saved: its dtype is not supported",
                got=dtype_name(tensor.dtype),
                allowed=", ".join(DTYPES),
                hint="convert the tensor: `tensor.to(torch.float32)`",
            )
        for part in local_boxes(tensor, name):
            read = partial(_read, resident, local(tensor), part.index)
            parts.append(StatePart(part.box, tensor.dtype, read))
    return parts


def _read(resident: Resident, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
    return resident(tensor)[index]


def write_pieces(path: Path, parts: Sequence[StatePart]) -> list[tuple[str, Piece]]:
    """Write the parts to a safetensors file and fsync it; return (tensor name, piece) for each part."""
    # Larger element sizes come first, which aligns every piece.
    parts = sorted(parts, key=lambda p: (-p.dtype.itemsize, p.box))
    first = header([(piece_key(p.box.name, p.box.offset), dtype_name(p.dtype), p.box.shape) for p in parts])
    written, begin = [], len(first)
    with path.open("wb") as file:
        file.write(first)
        for part in parts:
            box, end = part.box, begin + part.num_bytes
            data = part.read().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(data)
            written.append((box.name, Piece(path.name, box.offset, box.shape, begin, end, checksum(data))))
            begin = end
        file.flush()
        os.fsync(file.fileno())
    return written
