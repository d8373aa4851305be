"""Read parts of tensors from a Hugging Face directory of safetensors files.

Opening a directory reads the index and the headers only; `read` then touches just the elements asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyper_parallel.errors import WeightsUnreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, known from the header."""

    file: Path
    shape: tuple[int, ...]
    slices: Any


class SafetensorsDirectory:
    """The tensors of one model directory: `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        WeightsUnreadable: HP703 when a file is missing or truncated, or lacks a tensor that the index promises.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        """Bytes of tensor data handed out by `read` so far."""
        self.tensors: dict[str, Stored] = {}
        promised = self._index()
        for file in sorted({*promised.values()}) if promised else [SINGLE]:
            self._open(self.directory / file)
        for name, file in promised.items():
            if name not in self.tensors:
                raise WeightsUnreadable(
                    f"`{file}` has no tensor `{name}`, which the index places there",
                    where=str(self.directory / INDEX),
                )

    def read(self, name: str, ranges: tuple[tuple[int, int], ...]) -> Tensor:
        """The elements of a tensor within `ranges` (start, stop per dim), as they are stored."""
        entry = self.tensors[name]
        try:
            # An empty tuple of ranges reads a scalar.
            part: Tensor = entry.slices[tuple(slice(a, b) for a, b in ranges) or ...]
        except (SafetensorError, OSError) as error:
            raise WeightsUnreadable(
                f"`{name}` cannot be read ({error})", where=str(entry.file)
            ) from None
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsUnreadable(f"the index is damaged ({error})", where=str(path)) from None

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise WeightsUnreadable(
                "a weight file is missing",
                where=str(path),
                allowed=f"a directory with {SINGLE}, or with {INDEX} and the files it names",
            )
        try:
            file = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                slices = file.get_slice(name)
                shape = tuple(slices.get_shape())
                if name in self.tensors:
                    raise WeightsUnreadable(
                        f"`{name}` is in two files", where=str(path), got=self.tensors[name].file
                    )
                self.tensors[name] = Stored(path, shape, slices)
        except (SafetensorError, OSError) as error:
            raise WeightsUnreadable(
                f"a weight file is truncated or damaged ({error})",
                where=str(path),
                got=f"{path.stat().st_size} bytes",
            ) from None
