"""Data files: kinds of content by suffix, refused formats, decompression, and shell commands for hints."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from hyper_parallel.errors import MissingDependency, NoData

KINDS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".jsonlines": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
"""Kind of content by file suffix in lower case; files with other suffixes are text."""
_COMPRESSED: Final = (".gz", ".zst")
_PACKED: Final[Mapping[str, str]] = {
    ".zip": "unzip -d {folder} {file}",
    ".tar": "tar -xf {file} -C {folder}",
    ".tgz": "tar -xzf {file} -C {folder}",
    ".7z": "7z x -o{folder} {file}",
    ".bz2": "bunzip2 -c {file} > {target}",
    ".xz": "unxz -c {file} > {target}",
    ".lz4": "unlz4 -c {file} > {target}",
}
"""Shell command that unpacks a file, by suffix; `target` is the name of the file in `folder` without this suffix."""
_TABLES: Final[Mapping[str, str]] = {
    ".arrow": "datasets.Dataset.from_file",
    ".feather": "pandas.read_feather",
    ".orc": "pandas.read_orc",
    ".xlsx": "pandas.read_excel",
    ".xls": "pandas.read_excel",
}
"""Function that reads a file into an object with a method `to_parquet`, by suffix of the file."""
_BINARY: Final = (
    ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".pt", ".safetensors", ".db", ".sqlite", ".pdf", ".docx",
)  # fmt: skip
"""Suffixes of binary files for which there is no conversion command."""
_UNREAD: Final = (*_PACKED, *_TABLES, *_BINARY)
_SUFFIXES: Final = frozenset((*KINDS, *_COMPRESSED, *_UNREAD, ".txt", ".text", ".md", ".yaml"))
"""Suffixes of files; a source with one of them is not a name on the Hugging Face Hub."""
_DESCRIPTIONS: Final = frozenset(
    (
        "readme", "license", "licence", "notice", "citation", "changelog", "authors", "contributing", "dataset_info",
        "dataset_infos", "dataset_dict", "dataset_card", "data_card", "state",
    )
)  # fmt: skip
"""Names, without suffix, of files that describe the data in their folder."""
_SPLITS: Final = frozenset(("test", "testing", "eval", "evaluation", "val", "valid", "validation", "dev"))
"""Words in names of files that hold evaluation data; the library `datasets` recognizes the same words."""
_LONGEST_FIRST_LINE: Final = 2**20
"""Maximum bytes of a file's first line that are parsed as a record."""
_MOST_LISTED: Final = 20
"""Maximum number of files that a hint lists."""
_WINDOW_BYTES: Final = 2**27
"""Maximum window of zstd decompression in bytes, the default limit of the `zstd` tool."""


def inner_suffix(path: Path) -> str:
    """Return the suffix of a file in lower case; for a compressed file, the suffix before `.gz` or `.zst`."""
    inner = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return inner.suffix.lower()


def kind_of(path: Path) -> str:
    """Return the kind of a file by its suffix: `json`, `parquet`, `csv` or `text`."""
    return KINDS.get(inner_suffix(path), "text")


def refuse_unread(path: Path) -> None:
    """Raise if a file's suffix names an unsupported format, which would otherwise be read as text.

    Raises:
        NoData: HP602; the hint has a command that converts the file, if one is known for its suffix.
    """
    suffix, command = ".tar" if path.stem.lower().endswith(".tar") else path.suffix.lower(), None
    if suffix not in _UNREAD:
        return
    folder = free_path("converted")
    if suffix in _PACKED:
        target = shlex.quote(str(folder / path.stem))
        command = _PACKED[suffix].format(file=shlex.quote(str(path)), folder=folder, target=target)
    elif function := _TABLES.get(suffix):
        target = json.dumps(str(folder / f"{path.stem}.parquet"))
        code = f"{function}({json.dumps(str(path))}).to_parquet({target})"
        command = shlex.join(["python", "-c", f"import {function.partition('.')[0]}; {code}"])
    raise NoData(
        "a data file has a format that is not supported",
        where=str(path),
        got=suffix,
        allowed=f"{', '.join(KINDS)}, text; all but .parquet also with {' or '.join(_COMPRESSED)}",
        # If the converted file were in the folder of the source, the folder would hold files of several types.
        hint=command
        and f"convert the files into a new folder, then set `data.source` to it: mkdir -p {folder} && {command}",
    )


def refuse_other_target(path: Path, *, is_source: bool) -> None:
    """Raise if a file is a symbolic link to a file with the suffix of another format.

    Otherwise an error message could disclose a line of a private file as column names. `is_source` tells whether the
    file is the whole source; otherwise it is in the directory of the source.

    Raises:
        NoData: HP602 with the target of the link.
    """
    target = Path(os.path.realpath(path))
    if inner_suffix(target) in _SUFFIXES and kind_of(target) != kind_of(path):
        raise NoData(
            "a data file is a link to a file of a different format",
            where=str(path),
            got=str(target),
            allowed=f"a file of format {kind_of(path)}",
            hint={"data.source": target}
            if is_source
            else f"remove the link, or give it a name that ends in {inner_suffix(target)}",
        )


def refuse_splits(root: Path, files: Sequence[Path]) -> None:
    """Raise if file names in a directory suggest both training data (`train`) and evaluation data (`test`).

    All files of a directory are one source, so the evaluation data would be trained on. Text files are not checked.
    `files` lists the data files below `root`, at least one, all of one kind.

    Raises:
        NoData: HP602 with one file of each split.
    """
    if kind_of(files[0]) == "text":
        return
    names = {file.relative_to(root).as_posix(): file for file in files}
    words = {name: {*re.split(r"[\W_\d]+", name.lower())} for name in names}
    trained = [name for name in names if "train" in words[name]]
    held_out = [name for name in names if words[name] & _SPLITS and name not in trained]
    if trained and held_out:
        raise NoData(
            "the data directory holds several splits, but all files of a directory are one source",
            where=f"data.source: {root}",
            got=[trained[0], held_out[0]],
            allowed="a file, a directory with one split, or a list of sources",
            changes={"data.split": "train"},
        )


def json_record(path: Path) -> dict[str, Any] | None:
    """Return the first line of a file as a dict if it is a nonempty JSON object of at most 1 MiB; else None.

    Errors are those of `open_bytes`.
    """
    with open_bytes(path) as file:
        line = file.readline(_LONGEST_FIRST_LINE)
    try:
        record = json.loads(line) if line.lstrip()[:1] == b"{" else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record else None


def is_file_name(name: str) -> bool:
    """Return whether a name has a known file suffix, of a supported format or not."""
    return Path(name).suffix.lower() in _SUFFIXES


def describes(path: Path) -> bool:
    """Return whether a file, by its name, describes the data in its folder, such as README.md or LICENSE."""
    return path.name.partition(".")[0].lower() in _DESCRIPTIONS


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a data file for reading; decompress `.gz` and `.zst` files.

    The decompressed size is not limited, so callers must limit the size of each read.

    Raises:
        OSError: The file cannot be read.
        NoData: HP602 for a compressed file that cannot be decompressed.
        MissingDependency: HP501 when the package `zstandard` is needed and not installed.
    """
    compression = path.suffix.lower()
    if compression not in _COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    try:
        with path.open("rb") as packed:
            opened: Any = _zstd(packed, path) if compression == ".zst" else gzip.GzipFile(fileobj=packed)
            with io.BufferedReader(opened) as file:
                yield file
    except Exception as error:
        is_of_zstd = type(error).__module__.partition(".")[0] == "zstandard"
        if not is_of_zstd and not isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
            raise
        raise NoData(
            "a compressed data file cannot be decompressed",
            where=str(path),
            got=str(error)[:120] or type(error).__name__,
            hint="fetch the file again, or compress it without the option `--long` of zstd"
            if is_of_zstd
            else "fetch or compress the file again",
        ) from error


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a data file as UTF-8 text; `newline` is as for `open`, and errors are those of `open_bytes`."""
    with (
        open_bytes(path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text,  # type: ignore[arg-type]
    ):
        yield text


def _zstd(packed: IO[bytes], path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependency(
            "reading a file that is compressed with zstd needs the package `zstandard`",
            where=str(path),
            hint="pip install zstandard",
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    return decompressor.stream_reader(packed, read_across_frames=True)


def free_path(path: str | Path) -> Path:
    """Return `path` or, if it exists, the path with a number added to its name; for outputs of commands in hints."""
    path = Path(path)
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def line_command(path: Path, number: int) -> str:
    """Return a shell command that prints line `number` of a file, which may be compressed."""
    return pipe_command(path, f"sed -n {number}p")


def pipe_command(path: Path, command: str) -> str:
    """Return a shell command that runs `command` on the decompressed content of a file."""
    tool = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix.lower())
    name = shlex.quote(str(path))
    return f"{tool} {name} | {command}" if tool else f"{command} {name}"


def several_paths(text: str) -> list[str]:
    """Return the paths in a comma-separated list, or the paths that match a pattern (`part-*.jsonl`).

    The result is [] if one of the paths does not exist or needs quotes in a shell, or if there are more than 20.
    """
    parts = [part.strip() for part in text.split(",")]
    pattern = Path(text)
    if len(parts) == 1 and "*" in pattern.name:
        matches = itertools.islice(pattern.parent.glob(pattern.name), _MOST_LISTED + 1)
        parts = sorted(map(str, matches))
    plain = all(re.fullmatch(r"[\w./~-]+", part) and Path(part).exists() for part in parts)
    return parts if plain and 0 < len(parts) <= _MOST_LISTED else []
