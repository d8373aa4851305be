"""Index of a checkpoint: file, bytes and position of every stored piece of a tensor. Imports no framework.

Each rank writes at most one safetensors file. A tensor in such a file is a *piece*: a rectangular block (*box*) of a
full tensor. The JSON index gives, for every piece, its position in the full tensor, its bytes in the file and their
checksum. Checkpoints contain no executable code (no pickle).
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from hyper_parallel import serde
from hyper_parallel.ir import AXES, Box, divided_dims, tile
from hyper_parallel.received import Limits
from hyper_parallel.trainer.files import Damaged, check_size
from hyper_parallel.units import DTYPE_BYTES, DTYPES, MiB

INDEX = "index.json"
MODEL: Final = "model."
SLOTS: Final = "optimizer.state."
"""Prefixes of tensor names: model, and optimizer state."""

_FILE: Final = re.compile(r"rank_\d{5,}\.safetensors")
_SMALL_BYTES: Final = 16 * MiB
_BYTES_PER_HEADER_BYTE: Final = 8
"""Maximum ratio of the size of a piece's index entry to the size of its entry in the safetensors header."""
_MAX_DIMS: Final = 64
"""Maximum number of dims in torch and numpy."""
_MAX_SHARDED_DIMS: Final = len(AXES)
"""Maximum number of sharded dims: the number of mesh axes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored rectangular block of a tensor: position, bytes from `begin` up to `end` in `file`, and their checksum."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3: str

    def box(self, name: str) -> Box:
        """Return the block as a `Box` of tensor `name`."""
        return Box.at(name, self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape and dtype of a full tensor, and the pieces that cover it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Parameter group of an optimizer: names of its parameters, and hyperparameters such as the learning rate."""

    parameters: tuple[str, ...]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Index:
    """Index of a checkpoint: tensors by name, non-tensor optimizer state by name, and parameter groups."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Any] = field(default_factory=dict)
    groups: tuple[StoredGroup, ...] = ()

    def by_file(self) -> dict[str, list[tuple[str, str, Piece]]]:
        """Return a dict from file name to its pieces as (key in the file, dtype, piece), in the order of the bytes."""
        files: dict[str, list[tuple[str, str, Piece]]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                entry = piece_key(name, piece.offset), tensor.dtype, piece
                files.setdefault(piece.file, []).append(entry)
        for entries in files.values():
            entries.sort(key=lambda entry: (entry[2].begin, entry[2].end, entry[0]))
        return files


def piece_key(name: str, offset: tuple[int, ...]) -> str:
    """Return the key of a piece in its safetensors file: tensor name and offset, for example `model.norm.weight[0]`."""
    return f"{name}[{','.join(map(str, offset))}]"


def piece_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a piece."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


def header(pieces: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file with the given tensors (key, dtype, shape), in this order.

    Format: eight bytes of length, then JSON, padded with blanks (documentation of safetensors).
    """
    entries, begin = {}, 0
    for key, dtype, shape in pieces:
        end = begin + piece_bytes(dtype, shape)
        entries[key] = {"dtype": DTYPES[dtype][0], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def checksum(data: Any) -> str:
    """Return the 128-bit XXH3 checksum of bytes, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(data))


def encode_index(index: Index) -> str:
    """Return the index as JSON text."""
    return json.dumps(serde.encode(index), separators=(",", ":"))


def read_index(checkpoint: Path) -> Index:
    """Read the index of a checkpoint, and check that its pieces cover every tensor and match the file sizes.

    Raises:
        Damaged: The index is not readable, its pieces or parameter groups are invalid, or the size of a file differs.
    """
    path = checkpoint / INDEX
    try:
        num_bytes = most_index_bytes(checkpoint)
        # Most of the bytes are names and checksums, so there are fewer JSON elements than 1 per 8 bytes.
        limits = Limits(num_bytes, num_elements=num_bytes // 8)
        index = serde.read(Index, path, limits)
    except (OSError, ValueError) as error:
        raise Damaged(path, f"not readable as an index ({error})") from None
    for name, tensor in index.tensors.items():
        if problem := _problem(tensor):
            raise Damaged(path, f"`{name}`: {problem}")
    if problem := _group_problem(index):
        raise Damaged(path, problem)
    for file, entries in index.by_file().items():
        if not _FILE.fullmatch(file):
            raise Damaged(path, f"{file[:80]!r} is not the name of a file of pieces")
        begin = len(_header_of(entries))
        for key, dtype, piece in entries:
            if piece.begin != begin or piece.end != begin + piece_bytes(dtype, piece.shape):
                raise Damaged(path, f"bytes {piece.begin} to {piece.end} of {file} are not `{key}`")
            begin = piece.end
        check_size(checkpoint / file, begin)
    return index


def most_index_bytes(checkpoint: Path) -> int:
    """Return an upper bound on the bytes of a valid index: 16 MiB or, if larger, 8 times the safetensors headers.

    Raise Damaged for a file that cannot be read.
    """
    header_bytes, path = 0, checkpoint / INDEX
    try:
        if path.stat().st_size <= _SMALL_BYTES:
            return _SMALL_BYTES
        for path in checkpoint.glob("rank_*.safetensors"):
            with path.open("rb") as file:
                declared = int.from_bytes(file.read(8), "little")
            header_bytes += min(declared, path.stat().st_size)
    except OSError as error:
        raise Damaged(path, f"not readable ({error.strerror})") from None
    return max(_SMALL_BYTES, _BYTES_PER_HEADER_BYTE * header_bytes)


def check_pieces(checkpoint: Path, index: Index, share: tuple[int, int] = (0, 1)) -> None:
    """Compare the headers and piece checksums of the safetensors files with the index.

    With `share` (i, n), read only every n-th piece; the shares of all i in 0..n-1 cover all pieces.

    Raises:
        Damaged: A file differs from the index; the error names the first such file.
    """
    for number, (file, entries) in enumerate(sorted(index.by_file().items())):
        path, first = checkpoint / file, _header_of(entries)
        own = entries[(share[0] - number) % share[1] :: share[1]]
        try:
            with (
                path.open("rb") as stream,
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                if view[: len(first)] != first:
                    raise Damaged(path, "the header differs from the index")
                for key, _, piece in own:
                    with view[piece.begin : piece.end] as part:
                        if checksum(part) != piece.xxh3:
                            raise Damaged(path, f"`{key}` differs from its checksum")
        except (OSError, ValueError) as error:
            raise Damaged(path, f"not readable ({error})") from None


def _header_of(entries: Iterable[tuple[str, str, Piece]]) -> bytes:
    return header([(key, dtype, piece.shape) for key, dtype, piece in entries])


def _problem(tensor: StoredTensor) -> str:
    """Return an error text for the dtype, dims or pieces of a tensor, or "" if the pieces cover each element once."""
    if tensor.dtype not in DTYPES:
        return f"unknown dtype {tensor.dtype[:80]!r}"
    dims = len(tensor.shape)
    if dims > _MAX_DIMS:
        return f"{dims} dims, more than {_MAX_DIMS}"
    full, boxes = Box.full("", tensor.shape), list[Box]()
    for piece in tensor.pieces:
        if len(piece.offset) != dims or len(piece.shape) != dims:
            return f"a piece at {piece.offset} has another number of dims"
        boxes.append(piece.box(""))
        if min(piece.shape, default=1) < 1 or not full.contains(boxes[-1]):
            return f"a piece at {piece.offset} of shape {piece.shape} is outside of {tensor.shape}"
    if not tensor.pieces:
        empty = min(tensor.shape, default=1) == 0
        return "" if empty else f"the pieces do not fill {tensor.shape}"
    if sum(box.size for box in boxes) != full.size:
        return f"the pieces do not fill {tensor.shape}"
    divided = len(divided_dims(full, boxes))
    if divided > _MAX_SHARDED_DIMS:
        return f"pieces divide {divided} dims, more than {_MAX_SHARDED_DIMS}"
    return "" if tile(full, boxes) else f"pieces overlap in {tensor.shape}"


def _group_problem(index: Index) -> str:
    """Return an error text for the optimizer's parameter groups, or "" if they are valid."""
    grouped: set[str] = set()
    for group in index.groups:
        for name in group.parameters:
            if MODEL + name not in index.tensors:
                return f"the optimizer has a group for `{name}`, which is not stored"
            if name in grouped:
                return f"two groups of the optimizer hold `{name}`"
            grouped.add(name)
    for full in itertools.chain(index.tensors, index.values):
        name = full.removeprefix(SLOTS).rpartition(".")[0]
        if full.startswith(SLOTS) and name not in grouped:
            return f"`{full}` belongs to no group of the optimizer"
    return ""
