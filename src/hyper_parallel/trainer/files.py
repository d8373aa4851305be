"""File output of a run: checksums and identity of files, and checks before writing."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.errors import OutputNotWritable, written
from hyper_parallel.ir import Timeline
from hyper_parallel.owned_folder import unused_path
from hyper_parallel.serde import encode, write_text


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline as JSON."""
    write_text(path, json.dumps(encode(timeline)))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Read a file, and return its size and checksum."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class Damaged(Exception):
    """Missing, truncated or altered file; the message begins with the path of the file."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")


def check_files(directory: Path, entries: Mapping[str, FileEntry], contents: Iterable[str] = ()) -> None:
    """Check the size of each file in `entries`, and the checksum of each file in `contents`, by relative path.

    Raises:
        Damaged: For the first file that is missing, unreadable or different.
    """
    for name, entry in sorted(entries.items()):
        check_size(directory / name, entry.size_bytes)
    for name in contents:
        path = directory / name
        try:
            same = FileEntry.of(path) == entries[name]
        except OSError as error:
            raise Damaged(path, f"not readable ({error.strerror})") from None
        if not same:
            raise Damaged(path, "content differs from its checksum")


def check_size(path: Path, num_bytes: int) -> None:
    """Raise Damaged if a file is missing or does not have `num_bytes` bytes."""
    if not path.is_file():
        raise Damaged(path, "missing")
    if (size := path.stat().st_size) != num_bytes:
        raise Damaged(path, f"{size} bytes instead of {num_bytes}")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files with relative paths `names` from directory `source` to `target`; skip missing files."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


@contextmanager
def tensors_written(path: Path) -> Iterator[None]:
    """Remove tensor file `path` and raise OutputNotWritable (HP105) if the context fails to write the file."""
    from safetensors import SafetensorError

    try:
        with written(path):
            try:
                yield
            except SafetensorError as error:  # for example a full disk
                raise OSError(f"{error!s:.200}") from error
    except OutputNotWritable:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def inode(path: Path, *, follow_links: bool = True) -> tuple[int, int] | None:
    """Return (device, inode) of a file or directory, equal for all hard links; None if it is missing or unreadable."""
    try:
        status = path.stat(follow_symlinks=follow_links)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_writable(directory: Path, key: str) -> None:
    """Check that a directory can be created and written, without leaving files behind.

    `key` is the recipe key or command-line option that names the directory, such as `output_dir`.

    Raises:
        OutputNotWritable: HP105 with the reason.
    """
    target = existing = directory.absolute()
    # os.path treats an overlong path as missing.
    while not os.path.exists(existing) and existing != existing.parent:  # noqa: PTH110
        existing = existing.parent
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"no permission to write {existing}"
    else:
        problem = _try_to_create(target.relative_to(existing), existing)
    if not problem:
        return
    equals = " " if key.startswith("--") else "="
    other = shlex.quote(str(unused_path(Path(tempfile.gettempdir()) / "hyper-parallel")))
    raise OutputNotWritable(
        f"the directory of `{key}` cannot be written",
        where=f"{key}{equals}{directory!s:.500}",
        got=problem,
        hint=f"{key}{equals}{other}, or another directory that you can write",
    )


def _try_to_create(path: Path, parent: Path) -> str:
    """Try to create `path` in a temporary subdirectory of `parent`; return the reason of a failure, or ""."""
    if path == Path():
        return ""
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=parent) as probe:
            (Path(probe) / path).mkdir(parents=True)
    except OSError as error:
        return f"{parent / path!s:.500}: {error.strerror}"
    except RecursionError:
        return "nested too deep"
    return ""
