"""Data files: what a file holds by its name, compressed files, files that describe a data set, and near names."""

from __future__ import annotations

import difflib
import gzip
import io
import itertools
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from hyper_parallel.errors import MissingDependency, NoData

KINDS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
"""What a file holds, by its suffix; every other file is text."""
_COMPRESSED: Final = (".gz", ".zst")
_UNREAD: Final = (".zip", ".bz2", ".xz", ".arrow", ".xlsx")
_SUFFIXES: Final = frozenset((*KINDS, *_COMPRESSED, *_UNREAD, ".txt", ".text", ".md", ".yaml"))
"""Suffixes of files; a name that ends with one of them is no name on a hub."""
_DESCRIPTIONS: Final = frozenset(
    (
        "readme", "license", "licence", "notice", "citation", "changelog", "authors", "contributing", "dataset_info",
        "dataset_infos", "dataset_dict", "dataset_card", "data_card", "state",
    )
)  # fmt: skip
"""Names, without suffix, of files that describe the data beside them."""
_MOST_NAMES: Final = 5000
_MOST_TRIED: Final = 5
"""Near names whose files are opened."""
_MISSPELT: Final = 0.75
"""Likeness of names of which one is a misspelling of the other."""
_WINDOW_BYTES: Final = 2**27
"""Memory that decompressing zstd may take; the largest of the tool's own default."""


def inner_name(path: Path) -> Path:
    """Return the name of a file without the suffix of its compression."""
    return path.with_suffix("") if path.suffix in _COMPRESSED else path


def kind_of(path: Path) -> str:
    """Return what a file holds: a value of `KINDS`, or text."""
    return KINDS.get(inner_name(path).suffix, "text")


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a file by its suffix."""
    return Path(name).suffix.lower() in _SUFFIXES


def describes(path: Path) -> bool:
    """Return whether a file describes the data beside it (README.md, LICENSE, dataset_info.json)."""
    return path.name.partition(".")[0].lower() in _DESCRIPTIONS


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a data file for reading, decompressed where its name says that it is compressed.

    Readers bound how much they take of it: a record, or a piece of text.

    Raises:
        NoData: HP602 for a damaged compressed file.
        MissingDependency: HP602 without the package that decompresses it.
    """
    if path.suffix not in _COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    try:
        with path.open("rb") as packed:
            opened: Any = (
                _zstd(packed, path) if path.suffix == ".zst" else gzip.GzipFile(fileobj=packed)
            )
            with io.BufferedReader(opened) as file:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise _damaged(path, error) from error


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a data file of UTF-8 text; arguments and errors as of `open_bytes`."""
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


def _damaged(path: Path, error: Exception) -> NoData:
    return NoData("a compressed data file is damaged", where=str(path), got=str(error)[:120])


def line_command(path: Path, number: int) -> str:
    """Return the command that shows a line of a file."""
    tool = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix)
    name = shlex.quote(str(path))
    return f"{tool} {name} | sed -n {number}p" if tool else f"sed -n {number}p {name}"


def nearest(
    path: Path, folders: Iterable[Path] = (), fits: Callable[[Path], bool] = lambda _: True
) -> Path | None:
    """Return the file or folder that was probably meant by a missing one.

    Misspelt names come first, then near ones; of each those in the same folder, then those of data files in the working
    directory and the folders in it, then those in further folders. One that does not fit is the last choice.

    Args:
        path: The missing path.
        folders: Further folders to search.
        fits: Whether a path can be read for the purpose.
    """
    places = [path.parent.iterdir()] if path.parent.is_dir() else []
    places += [_below(Path.cwd()), *(folder.iterdir() for folder in folders if folder.is_dir())]
    near: list[Path] = []
    for place in places:
        names: dict[str, Path] = {}
        for found in itertools.islice(place, _MOST_NAMES):
            names.setdefault(found.name, found)
        close = difflib.get_close_matches(path.name, names, n=_MOST_TRIED)
        near += sorted((names[name] for name in close), key=lambda one: -_likeness(one, path))
    misspelt = [one for one in near if _likeness(one, path) > _MISSPELT]
    ordered = dict.fromkeys([*misspelt, *near])
    chosen = next((one for one in itertools.islice(ordered, 2 * _MOST_TRIED) if fits(one)), None)
    chosen = chosen or next(iter(misspelt), None)
    return None if chosen is None else _shown(chosen)


def _likeness(path: Path, other: Path) -> float:
    """Return how near two names are without their suffixes, between 0 and 1."""
    stems = (one.name.partition(".")[0] for one in (path, other))
    return difflib.SequenceMatcher(None, *stems).ratio()


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _below(root: Path) -> Iterator[Path]:
    """Yield data files in a folder and in its folders."""
    for folder in (root, *(p for p in sorted(root.iterdir()) if p.is_dir())):
        if folder.name.startswith(".") and folder != root:
            continue
        try:
            names = sorted(folder.iterdir())
        except OSError:
            continue
        yield from (name for name in names if is_file_name(name.name) and name.is_file())
