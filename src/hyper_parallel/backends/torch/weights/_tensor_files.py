"""Parts of tensors read from safetensors files (and PyTorch's own): pretrained weights, pieces of checkpoints."""

from __future__ import annotations

import json
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

from hyper_parallel.backends.torch.weights._ranges import Run
from hyper_parallel.errors import WeightsUnreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FORMATS = ((INDEX, SINGLE), ("pytorch_model.bin.index.json", "pytorch_model.bin"))
"""Index and single file of the formats that are read; the first that is there is taken."""

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
        stored = _mapped(path) if path.suffix == ".safetensors" else _unpickled(path)
        return {name: Stored(path, _shape(slices), slices) for name, slices in stored.items()}
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise WeightsUnreadable(
            f"a weight file is truncated or damaged ({str(error).splitlines()[0]})",
            where=str(path),
            got=f"{path.stat().st_size} bytes",
        ) from None


class WeightFiles:
    """The tensors of one model directory: one file or shards with their index, safetensors or PyTorch's own.

    Raises:
        WeightsUnreadable: HP703 when a file is missing or truncated, lies elsewhere, or lacks a tensor that the index
            promises.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        """Bytes of tensor data handed out by `read` so far."""
        self.tensors: dict[str, Stored] = {}
        there = [pair for pair in _FORMATS if any((self.directory / n).is_file() for n in pair)]
        self._index_file, single = (there or _FORMATS)[0]
        promised = self._index()
        for file in sorted({*promised.values()}) if promised else [single]:
            path = self.directory / file
            for name, stored in open_tensors(path).items():
                if name in self.tensors:
                    raise WeightsUnreadable(
                        f"`{name}` is in two files", where=str(path), got=self.tensors[name].file
                    )
                self.tensors[name] = stored
        for name, file in promised.items():
            if name not in self.tensors:
                raise WeightsUnreadable(
                    f"`{file}` has no tensor `{name}`, which the index places there",
                    where=str(self.directory / self._index_file),
                )

    def read(self, name: str, ranges: Ranges = ()) -> Tensor:
        """The elements of a tensor within `ranges`, as they are stored; none: all of it."""
        part = self.tensors[name].read(ranges)
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _index(self) -> dict[str, str]:
        path = self.directory / self._index_file
        if not path.is_file():
            return {}
        try:
            promised = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
            outside = [f for f in promised.values() if Path(f).name != f or "\\" in f]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsUnreadable(f"the index is damaged ({error})", where=str(path)) from None
        if outside:
            raise WeightsUnreadable(
                "the index names a file outside of its directory",
                where=str(path),
                got=outside[0],
                allowed="names of files beside the index",
            )
        return promised


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
