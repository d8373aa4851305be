"""Partial reads of tensors in safetensors and PyTorch files, which contain pretrained weights or checkpoints."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyper_parallel.backends.torch.weights.checksums import PartChecksum
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.ir import Ranges
from hyper_parallel.model import INDEX, SINGLE, list_weight_files
from hyper_parallel.received import check_regular

_CHUNK_ELEMENTS = 1 << 24
"""Maximum elements of each of two tensors compared at a time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensor in a file, as described by the file's header."""

    file: Path
    shape: tuple[int, ...]
    slices: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.read(tuple((0, 0) for _ in self.shape)).element_size() * math.prod(self.shape)

    def read(self, ranges: Ranges) -> Tensor:
        """Return the elements within `ranges`, without conversion; raise HP703 if the file cannot be read."""
        try:
            # An empty tuple of ranges reads the full tensor.
            part: Tensor = self.slices[tuple(slice(a, b) for a, b in ranges) or ...]
        except (SafetensorError, OSError) as error:
            raise WeightsUnreadable(
                f"a tensor cannot be read ({error})",
                where=str(self.file),
                hint=f"replace `{self.file.name}` by an intact copy",
            ) from None
        return part


def open_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name; bytes are read on use, unless a PyTorch file is not in zip format.

    PyTorch files are unpickled with `weights_only`, which executes no code of the file.

    Raises:
        WeightsUnreadable: HP703 when the file is missing, truncated or damaged.
    """
    if not os.path.isfile(path):  # noqa: PTH113  also False for a name that is too long
        raise WeightsUnreadable(
            "a weight file is missing",
            where=str(path),
            allowed=f"a directory with {SINGLE}, or with {INDEX} and the files it names",
            hint=f"fetch `{path.name}` again",
        )
    try:
        check_regular(path)
        stored = _mapped(path) if path.suffix == ".safetensors" else _unpickled(path)
        return {name: Stored(path, _shape(slices), slices) for name, slices in stored.items()}
    except PermissionError as error:
        raise WeightsUnreadable(
            "a weight file may not be read by this user",
            where=str(path),
            got=error.strerror,
            hint=f"chmod u+r {shlex.quote(str(path))}",
        ) from None
    except (
        OSError,
        MemoryError,
        RuntimeError,
        EOFError,
        SafetensorError,
        UnpicklingError,
    ) as error:
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise WeightsUnreadable(
            f"a weight file is truncated or damaged ({cause})",
            where=str(path),
            got=f"{path.stat().st_size} bytes",
            hint=f"replace `{path.name}` by an intact copy",
        ) from None


class WeightFiles:
    """Tensors of one model directory: one file or shards, with or without an index, safetensors or PyTorch files.

    Raises:
        WeightsUnreadable: HP703 when a file or the index is missing, damaged or outside the directory, and when two
            files have different values under one name.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        """Bytes of tensor data returned by `read` so far."""
        self.checksums: list[PartChecksum] | None = None
        """Checksums of the parts returned by `read` since this was set to a list; None: none are computed."""
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
                        hint=f"keep the files of one model only in {directory}",
                    )
        self.missing_tensors = {n: f for n, f in listing.promised.items() if n not in self.tensors}
        """Tensors that the index lists and no file contains, by name; values are the listed files."""

    def read(self, name: str, ranges: Ranges = ()) -> Tensor:
        """Return the elements of a tensor within `ranges`, without conversion; without ranges the full tensor."""
        part = self.tensors[name].read(ranges)
        self.bytes_read += part.numel() * part.element_size()
        if self.checksums is not None:
            self.checksums.append(PartChecksum.of(name, part, self.tensors[name].shape, ranges))
        return part


def same_values(first: Stored, second: Stored, dtype: torch.dtype | None = None) -> bool:
    """Return whether two stored tensors have equal shapes, dtypes and values, after a cast to `dtype` if set."""
    if first.shape != second.shape:
        return False
    a, b = first.slices, second.slices
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.data_ptr() == b.data_ptr():
        return a.stride() == b.stride()
    rows = first.shape[0] if first.shape else 1
    step = max(1, _CHUNK_ELEMENTS * rows // max(1, math.prod(first.shape)))
    for start in range(0, rows, step):
        ranges = ((start, min(start + step, rows)),) if first.shape else ()
        a, b = (t.read(ranges) for t in (first, second))
        a, b = (a, b) if dtype is None else (a.to(dtype), b.to(dtype))
        if a.dtype != b.dtype or not torch.equal(a, b):
            return False
    return True


def _mapped(path: Path) -> dict[str, Any]:
    file = safe_open(path, framework="pt", device="cpu")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping


def _unpickled(path: Path) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _shape(slices: Any) -> tuple[int, ...]:
    return tuple(slices.shape if isinstance(slices, Tensor) else slices.get_shape())
