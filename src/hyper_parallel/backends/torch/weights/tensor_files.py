"""Parts of tensors read from safetensors files (and PyTorch's own): pretrained weights, pieces of checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyper_parallel.backends.torch.weights.checksums import PartChecksum
from hyper_parallel.backends.torch.weights.shard_ranges import Run
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.model import INDEX, SINGLE, list_weight_files
from hyper_parallel.received import check_regular

_CHUNK_ELEMENTS = 1 << 24
"""Elements of two tensors that are compared at a time."""

Ranges = tuple[tuple[int, int], ...]
"""Start and stop per dim."""


def copy_overlap(
    read: Callable[[Ranges], Tensor],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    target: Tensor,
    ranges: tuple[tuple[Run, ...], ...],
) -> None:
    """Copy the intersection of a stored box of a tensor with this rank's part of it; reads nothing where there is none.

    Args:
        read: Gives elements of the box, by ranges in the box.
        offset: First index of the box, per dim of the whole tensor.
        shape: Shape of the box.
        target: This rank's part.
        ranges: The indices that it stores, as of `local_ranges`.
    """
    source: list[list[tuple[int, int]]] = [[]]
    write: list[list[slice]] = [[]]
    for start, length, runs in zip(offset, shape, ranges, strict=True):
        overlaps = [
            (max(run.start, start), min(run.stop, start + length), run)
            for run in runs
            if run.start < start + length and run.stop > start
        ]
        source = [[*r, (a - start, b - start)] for r in source for a, b, _ in overlaps]
        write = [
            [*w, slice(run.at + a - run.start, run.at + b - run.start)]
            for w in write
            for a, b, run in overlaps
        ]
    for from_, to in zip(source, write, strict=True):
        target[tuple(to)].copy_(read(tuple(from_)))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, known from the header."""

    file: Path
    shape: tuple[int, ...]
    slices: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.read(tuple((0, 0) for _ in self.shape)).element_size() * math.prod(self.shape)

    def read(self, ranges: Ranges) -> Tensor:
        """The elements within `ranges`, as they are stored.

        Raises:
            WeightsUnreadable: HP703.
        """
        try:
            # An empty tuple of ranges reads all of it.
            part: Tensor = self.slices[tuple(slice(a, b) for a, b in ranges) or ...]
        except (SafetensorError, OSError) as error:
            raise WeightsUnreadable(
                f"a tensor cannot be read ({error})", where=str(self.file)
            ) from None
        return part


def open_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name; their bytes are read when they are used.

    A PyTorch file is unpickled with `weights_only`, which runs no code of the file.

    Raises:
        WeightsUnreadable: HP703 when the file is missing, truncated or damaged.
    """
    if not os.path.isfile(path):  # noqa: PTH113  a name that is too long is no file either
        raise WeightsUnreadable(
            "a weight file is missing",
            where=str(path),
            allowed=f"a directory with {SINGLE}, or with {INDEX} and the files it names",
        )
    try:
        check_regular(path)
        stored = _mapped(path) if path.suffix == ".safetensors" else _unpickled(path)
        return {name: Stored(path, _shape(slices), slices) for name, slices in stored.items()}
    except (
        SafetensorError,
        OSError,
        MemoryError,
        RuntimeError,
        EOFError,
        UnpicklingError,
    ) as error:
        raise WeightsUnreadable(
            f"a weight file is truncated or damaged ({str(error).splitlines()[0]})",
            where=str(path),
            got=f"{path.stat().st_size} bytes",
        ) from None


class WeightFiles:
    """Tensors of one model directory: one file or shards, with or without an index, safetensors or PyTorch's own.

    Raises:
        WeightsUnreadable: HP703 when a file is missing, truncated or outside of the directory, and when two files hold
            different values of one name.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        """Bytes of tensor data handed out by `read` so far."""
        self.checksums: list[PartChecksum] | None = None
        """Checksums of the parts handed out by `read` since it was set to a list; None: they are not computed."""
        self.tensors: dict[str, Stored] = {}
        listing = list_weight_files(self.directory)
        for file in listing.files or (SINGLE,):
            path = self.directory / file
            for name, stored in open_tensors(path).items():
                first = self.tensors.setdefault(name, stored)
                if first is not stored and not same_values(first, stored):
                    raise WeightsUnreadable(
                        f"two files hold different values of `{name}`",
                        where=str(path),
                        got=str(first.file),
                        hint=f"remove the file that does not belong to the model from {directory}",
                    )
        self.ghosts = {n: f for n, f in listing.promised.items() if n not in self.tensors}
        """File in which the index places a tensor that it does not hold, by the name of the tensor."""

    def read(self, name: str, ranges: Ranges = ()) -> Tensor:
        """The elements of a tensor within `ranges`, as they are stored; none: all of it."""
        part = self.tensors[name].read(ranges)
        self.bytes_read += part.numel() * part.element_size()
        if self.checksums is not None:
            self.checksums.append(PartChecksum.of(name, part, self.tensors[name].shape, ranges))
        return part


def same_values(first: Stored, second: Stored, dtype: torch.dtype | None = None) -> bool:
    """Return whether two stored tensors are equal, in the format `dtype` if there is one; reads both in parts."""
    if first.shape != second.shape:
        return False
    a, b = first.slices, second.slices
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.data_ptr() == b.data_ptr():
        return a.stride() == b.stride()
    rows = first.shape[0] if first.shape else 1
    step = max(1, _CHUNK_ELEMENTS * rows // max(1, math.prod(first.shape)))
    for start in range(0, rows, step):
        ranges = ((start, min(start + step, rows)),) if first.shape else ()
        pair = [
            t if dtype is None else t.to(dtype) for t in (first.read(ranges), second.read(ranges))
        ]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            return False
    return True


def _mapped(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file as slices that read when they are indexed."""
    file = safe_open(path, framework="pt", device="cpu")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping


def _unpickled(path: Path) -> dict[str, Any]:
    """The tensors of a file of `torch.save`, whose bytes are read when they are used; all at once from old files."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _shape(slices: Any) -> tuple[int, ...]:
    return tuple(slices.shape if isinstance(slices, Tensor) else slices.get_shape())
