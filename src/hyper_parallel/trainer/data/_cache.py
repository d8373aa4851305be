"""Data cache: directories named by a hash of all inputs that determine their content, published by one rename.

Each directory is one cache entry. Its `meta.json` lists size and SHA-256 of every data file. Opening an entry checks
the sizes of all files, and the checksums of files up to 256 MiB; checksums of larger files would take seconds. An entry
whose files do not match this list is rebuilt. A lock file serializes processes that open the same entry: the first
builds the entry, the others wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_parallel.errors import OutputNotWritable, written
from hyper_parallel.owned_folder import (
    MARKER,
    Replacement,
    read_marker,
    remove_files,
)
from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import decode, encode, write_text
from hyper_parallel.topology import cache_dir
from hyper_parallel.trainer.data.data_files import free_path
from hyper_parallel.trainer.files import Damaged, FileEntry, check_files, check_writable
from hyper_parallel.units import MiB

logger = logging.getLogger(__name__)

_META = "meta.json"
_CHECKSUM_LIMIT_BYTES = 256 * MiB


def cache_root(directory: str | None) -> Path:
    """Return the cache directory: `directory` or, if it is None, the folder `data` in this package's user cache.

    The directory may not exist yet.

    Raises:
        OutputNotWritable: HP105 when the directory is not writable.
    """
    root = (Path(directory) if directory else cache_dir() / "data").expanduser().absolute()
    check_writable(root, "data.cache_dir")
    return root


def digest(value: Any) -> str:
    """Return the first 24 hexadecimal digits of a JSON value's SHA-256, for the name of a cache entry."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def entry(root: Path, key: str, build: Callable[[Path], dict[str, Any] | None]) -> tuple[Path, dict[str, Any]]:
    """Return the cache entry `root/key` and its metadata; build the entry if it is absent or damaged.

    `build` fills the given directory and may return metadata; its errors are raised unchanged. `key` is a hash of all
    inputs of the content. The returned metadata has the key `cached`, False if this call built the entry.

    Raises:
        OutputNotWritable: HP105 when the entry cannot be written, or a damaged entry cannot be deleted.
    """
    from filelock import FileLock

    target = root / key
    with written(root):
        root.mkdir(parents=True, exist_ok=True)
    with written(root), FileLock(root / f"{key}.lock"):
        meta = _intact(target)
        if meta is not None:
            return target, meta | {"cached": True}
        _remove_entry(target)
        folder = Replacement(target, "cache", "an entry of the data cache")
        partial = folder.open()
        with folder.discarded_on_error():
            meta = build(partial) or {}
            files = sorted(_files(partial) - {MARKER})
            meta["files"] = encode({name: FileEntry.of(partial / name) for name in files})
            write_text(partial / _META, json.dumps(meta, indent=1))
            folder.publish()
        return target, meta | {"cached": False}


def _files(directory: Path) -> set[str]:
    below = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(directory).as_posix() for path in below}


def _remove_entry(directory: Path) -> None:
    """Remove a damaged entry; raise OutputNotWritable (HP105) if it has unknown files or cannot be deleted."""
    marker = read_marker(directory)
    names = {MARKER, _META, *((marker.files or {}) if marker else ())}
    if unknown := sorted(_files(directory) - names):
        raise OutputNotWritable(
            "an entry of the data cache contains unknown files, so it cannot be rebuilt",
            where=str(directory),
            got=unknown[:3],
            hint=shlex.join(["mv", str(directory), str(free_path(Path(f"{directory}.moved")))]),
        )
    if left := remove_files(directory, names.__contains__):
        raise OutputNotWritable(
            "a damaged entry of the data cache cannot be deleted, so it cannot be rebuilt",
            where=str(directory),
            got=left[:3],
            hint="delete this entry, or choose another folder with `data.cache_dir`",
        )


@contextmanager
def byte_bar(name: str, total_bytes: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if `show`; yield a function that advances the bar by a number of bytes.

    `total_bytes` may be an estimate: at the end, the total is set to the bytes counted.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not show) as bars:
        task = bars.add_task(name, total=total_bytes)
        yield lambda num_bytes: bars.advance(task, num_bytes)
        bars.update(task, total=bars.tasks[0].completed)


def _intact(directory: Path) -> dict[str, Any] | None:
    """Return the metadata of an intact entry; None if the entry is absent or damaged."""
    if not directory.is_dir():
        return None
    try:
        meta: dict[str, Any] = read_json(directory / _META, Limits())
        files = decode(dict[str, FileEntry], meta["files"])
        small = [n for n, file in files.items() if file.size_bytes <= _CHECKSUM_LIMIT_BYTES]
        check_files(directory, files, small)
    except (Damaged, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cache entry %s is damaged (%s) and is rebuilt", directory, error)
        return None
    return meta
