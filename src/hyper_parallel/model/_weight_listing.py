"""Weight files of a model directory, and detection of tied embeddings that differ in the files; without a framework."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.received import Limits, check_regular, read_json

logger = logging.getLogger(__name__)

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_FORMATS: Final = ((SINGLE, INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
"""(single file, index file) of each supported format, in the search order of transformers."""

_HEAD: Final = re.compile(
    r"(^|\.)(lm_head(\.decoder|\.out_proj)?|cls\.predictions\.decoder|generator_lm_head|output_projection"
    r"|embed_out|proj_out|pred_layer\.proj|lm_loss|output|decoder|head)\.weight$"
)
_EMBEDDING: Final = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings?|embeddings|tok_embeddings|embed_in|tokens_embed|shared"
    r"|transformer\.w)\.weight$"
)
"""Patterns for the names of heads (`_HEAD`) and input embeddings in transformers classes that tie the two."""
_INSIDE: Final = re.compile(r"\.\d+\.|^mtp\b")
"""Pattern for names inside decoder or multi-token-prediction layers; a head or embedding there is not the model's."""
_MAX_HEADER_BYTES: Final = 100_000_000  # limit of the safetensors library
_INDEX_LIMITS: Final = Limits(num_bytes=_MAX_HEADER_BYTES, num_elements=2_000_000)
"""Limits of an index file, which lists the tensors of all weight files, as their headers do."""
_MAX_COUNT_DIGITS: Final = 6  # a larger count in a shard's name is not used
_CHUNK_BYTES: Final = 1 << 24
_MALFORMED: Final = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""Errors of parsing a JSON text, and of converting a value that does not have the expected form."""


@dataclass(frozen=True, slots=True)
class WeightListing:
    """Weight files of a directory.

    Attributes:
        files: Sorted file names; a listed file may be missing.
        index: Name of the index file; None without an index.
        promised: File name of each tensor in the index, by tensor name; {} without an index.
    """

    files: tuple[str, ...]
    index: str | None
    promised: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Tensor of a safetensors file: dtype in the file's notation (`BF16`), shape, bytes [start, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def list_weight_files(directory: Path) -> WeightListing:
    """Return the weight files of a directory; empty when there are none.

    Search order: a single file, then an index, then shards without an index; safetensors before PyTorch's format.

    Raises:
        WeightsUnreadable: HP703 if an index is damaged or names a file elsewhere, or shards without one are incomplete.
    """
    for single, index in _FORMATS:
        if (directory / single).is_file():
            return WeightListing((single,), None, {})
        if (directory / index).is_file():
            promised = _read_index(directory / index)
            return WeightListing(tuple(sorted({*promised.values()})), index, promised)
        stem, _, suffix = single.rpartition(".")
        shards = sorted(f.name for f in directory.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            return WeightListing(_complete(directory, shards), None, {})
    return WeightListing((), None, {})


def read_tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file.

    A file starts with the length of its header (8 bytes, little endian), then the header as JSON: name to dtype, shape
    and byte range; the data follows. Source: safetensors format description, `README.md` of the library.

    Raises:
        WeightsUnreadable: HP703 when the file cannot be read, is shorter than its header states, or has an invalid
            header.
    """
    try:
        check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
                raise _corrupt(path, f"{size} bytes, header of {length} bytes")
            raw = file.read(length)
    except OSError as error:
        raise _corrupt(path, str(error)) from error
    data = 8 + length
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {
            str(name): TensorInfo(
                str(t["dtype"]),
                tuple(int(s) for s in t["shape"]),
                *(data + int(t["data_offsets"][k]) for k in (0, 1)),
            )
            for name, t in header.items()
        }
        if any(not data <= t.start <= t.end for t in tensors.values()):
            raise ValueError("a byte range is invalid")
    except _MALFORMED as error:
        raise _corrupt(path, f"header: {error!r}") from error
    end = max((t.end for t in tensors.values()), default=data)
    if end > size:
        raise _corrupt(path, f"{size} bytes, {end} expected")
    return tensors


def with_files_ties(values: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return the values of a config, with head and embedding untied if their bytes in safetensors files differ.

    Only tensors of equal shape and dtype are compared. A warning is logged if the config states the tie. Transformers
    also unties head and embedding in this case.
    """
    if values.get("tie_word_embeddings") is False:
        return values
    try:
        files = [f for f in list_weight_files(directory).files if f.endswith(".safetensors")]
        outer_tensors = {
            name: (f, info)
            for f in files
            for name, info in read_tensor_infos(directory / f).items()
            if not _INSIDE.search(name)
        }
    except WeightsUnreadable:  # raised again by the reader of the weights
        return values
    tables = [(n, *match) for n, match in outer_tensors.items() if _EMBEDDING.search(n)]
    for head, (file, info) in outer_tensors.items():
        if (match := _HEAD.search(head)) is None:
            continue
        # A head inside a submodule can be tied only to an embedding of that submodule.
        part = head[: match.start(2)]
        alike = [t for t in tables if t[0] != head and t[0].startswith(part) and t[2].shape == info.shape]
        if not alike or any(
            info.dtype != embedding.dtype
            or _same_bytes(_place(directory / file, info), _place(directory / embedding_file, embedding))
            for _, embedding_file, embedding in alike
        ):
            continue
        if "tie_word_embeddings" in values:  # without the key, the default applies: untied for many classes
            _warn_once(str(directory), head, alike[0][0])
        parts = {k: v for k, v in values.items() if isinstance(v, Mapping) and "tie_word_embeddings" in v}
        untied = {k: {**v, "tie_word_embeddings": False} for k, v in parts.items()}
        return {**values, **untied, "tie_word_embeddings": False}
    return values


@lru_cache
def _warn_once(directory: str, head: str, embedding: str) -> None:
    """Log, once per process and its forks, that head and embedding are not tied although the config ties them."""
    logger.warning(
        "%s: the config ties `%s` to `%s`, but the files hold different values: the two are not tied",
        directory, head, embedding,
    )  # fmt: skip


_Place = tuple[str, int, int, int]
"""(file, modification time in ns, first byte, end byte)."""


def _place(path: Path, info: TensorInfo) -> _Place:
    return str(path), path.stat().st_mtime_ns, info.start, info.end


@lru_cache(maxsize=64)  # a config is read several times, also in forked ranks
def _same_bytes(first: _Place, second: _Place) -> bool:
    remaining = first[3] - first[2]
    if remaining != second[3] - second[2]:
        return False
    with Path(first[0]).open("rb") as a, Path(second[0]).open("rb") as b:
        a.seek(first[2])
        b.seek(second[2])
        while remaining > 0:
            count = min(remaining, _CHUNK_BYTES)
            if a.read(count) != b.read(count):
                return False
            remaining -= count
    return True


def _complete(directory: Path, shards: list[str]) -> tuple[str, ...]:
    """Return the names of all shards, whose number is part of each name; raise HP703 if a shard is missing."""
    stem, suffix = shards[0].split("-")[0], shards[0].rpartition(".")[2]
    count = shards[0].rpartition("-of-")[2].partition(".")[0]
    if not count.isdecimal() or len(count) > _MAX_COUNT_DIGITS:
        return tuple(shards)
    expected = [f"{stem}-{n:0{len(count)}d}-of-{count}.{suffix}" for n in range(1, int(count) + 1)]
    if missing := [name for name in expected if name not in shards]:
        raise WeightsUnreadable(
            f"weight files are missing ({len(missing)} of {int(count)}), and there is no index",
            where=str(directory),
            got=missing[:3],
            hint=f"fetch `{missing[0]}`{' and the other missing files' if len(missing) > 1 else ''} again",
        )
    return tuple(expected)


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor; raise HP703 if the index is damaged or names a file elsewhere."""
    try:
        weight_map: Any = read_json(path, _INDEX_LIMITS)["weight_map"]
        files = {str(k): v for k, v in weight_map.items()}
        outside = [f for f in files.values() if Path(f).name != f or "\\" in f]
    except (OSError, *_MALFORMED) as error:
        raise _corrupt(path, repr(error)) from error
    if outside:
        raise WeightsUnreadable(
            "the index names a file outside of its directory",
            where=str(path),
            got=outside[0],
            allowed="names of files in the directory of the index",
            hint=f"fetch `{path.name}` again from where the model was published",
        )
    return files


def _corrupt(path: Path, got: str) -> WeightsUnreadable:
    return WeightsUnreadable(
        f"the weight file `{path.name}` is truncated, corrupt or unreadable",
        where=str(path),
        got=got,
        hint=f"fetch `{path.name}` again",
    )
