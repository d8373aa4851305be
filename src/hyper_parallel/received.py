"""Bounded readers for JSON and text files of untrusted origin.

A file must be a regular file within limits on bytes, nesting, elements and numbers, so a damaged or hostile file costs
a bounded amount of time and memory. Callers convert `LimitExceeded` to the coded error of their format.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1024**2
_MOST_OPENED: Final = 1_000_000
"""Bracket count above which a text is not parsed, unless `num_elements` is larger; strings may contain brackets too."""
_MOST_LINKS: Final = 40
"""Maximum number of links that are followed, as in Linux."""
_CACHED_REPOSITORY: Final = ("models--", "datasets--", "spaces--")
"""First part of the name of a repository's folder in the cache of the Hugging Face hub."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one file and on the value in it.

    Attributes:
        num_bytes: Maximum bytes of the file, and characters of all texts in the value together; a text counts at each
            use.
        num_elements: Maximum number of members of all objects and lists together; a container that a YAML alias repeats
            counts at each use.
        depth: Maximum nesting of objects and lists.
        integer_bits: Maximum size of an integer, in bits.
        finite: Whether to refuse NaN and infinities, which Python's JSON reader accepts.
    """

    num_bytes: int = 16 * _MIB
    num_elements: int = 1_000_000
    depth: int = 50
    integer_bits: int = 64
    finite: bool = False


class LimitExceeded(ValueError):
    """Error for a file or value that exceeds one of its `Limits`, and for a path that is not a regular file."""


def read_bytes(path: Path, limits: Limits) -> bytes:
    """Return the content of a regular file.

    Raises:
        LimitExceeded: The path is a device or pipe, or the file is larger than `limits.num_bytes`.
        OSError: The file cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe blocks until a writer opens it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(21, "Is a directory", str(path))
            raise LimitExceeded("not a regular file")
        content = file.read(limits.num_bytes + 1)
    if len(content) > limits.num_bytes:
        size = max(status.st_size, len(content))
        raise LimitExceeded(f"{size:,} bytes, more than {limits.num_bytes:,}")
    return content


def check_regular(path: Path) -> None:
    """Raise OSError unless a path is a regular file or a link to one; some libraries would block on a pipe."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: Path, limits: Limits) -> str:
    """Return the UTF-8 text of a regular file; raise the errors of `read_bytes`, or UnicodeDecodeError."""
    return read_bytes(path, limits).decode("utf-8")


def holds_text(path: Path, text: str) -> bool:
    """Return whether a regular file contains exactly this text in UTF-8; raise OSError if it cannot be read."""
    content = text.encode()
    try:
        return read_bytes(path, Limits(num_bytes=len(content))) == content
    except LimitExceeded:
        return False


def parse_json(
    text: str | bytes,
    limits: Limits,
    object_of: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text.
        limits: Limits of the text and its value.
        object_of: Function that returns the value of an object from its (key, value) pairs; None: a dict.

    Raises:
        LimitExceeded: The text or its value exceeds a limit.
        ValueError: The text is not JSON (`json.JSONDecodeError`) or cannot be decoded (`UnicodeDecodeError`).
    """
    if len(text) > limits.num_bytes:
        raise LimitExceeded(f"{len(text):,} bytes, more than {limits.num_bytes:,}")
    if _num_opened(text) > max(limits.num_elements, _MOST_OPENED):
        raise LimitExceeded(f"more than {limits.num_elements:,} elements")
    try:
        value = json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise LimitExceeded(f"nested deeper than {limits.depth}") from None
    check_value(value, limits)
    return value


def _num_opened(text: str | bytes) -> int:
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def read_json(path: Path, limits: Limits) -> Any:
    """Return the value of a JSON file; raise the errors of `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limits), limits)


def check_value(value: Any, limits: Limits) -> None:
    """Raise LimitExceeded for the first limit that a value of dicts, lists, texts and numbers exceeds.

    A value that a YAML alias repeats is counted at each use. The check stops at the first exceeded limit.
    """
    stack: list[Iterator[Any]] = [iter((value,))]
    num_elements_left, num_chars_left = limits.num_elements, limits.num_bytes
    while stack:
        for item in stack[-1]:
            if isinstance(item, (str, bytes)):
                num_chars_left -= len(item)
                if num_chars_left < 0:
                    raise LimitExceeded(f"more than {limits.num_bytes:,} characters of text")
            elif isinstance(item, (dict, list, tuple, set, frozenset)):
                if len(stack) > limits.depth:
                    raise LimitExceeded(f"nested deeper than {limits.depth}")
                num_elements_left -= len(item)
                if num_elements_left < 0:
                    raise LimitExceeded(f"more than {limits.num_elements:,} elements")
                stack.append(chain(item, item.values()) if isinstance(item, dict) else iter(item))
                break
            else:
                _check_number(item, limits)
        else:
            stack.pop()


def _check_number(value: Any, limits: Limits) -> None:
    if isinstance(value, int):
        if value.bit_length() > limits.integer_bits:
            raise LimitExceeded(f"an integer of more than {limits.integer_bits} bits")
    elif limits.finite and isinstance(value, float) and not math.isfinite(value):
        raise LimitExceeded(f"{value} is not a finite number")


def outside_target(path: Path, folder: Path) -> Path | None:
    """Return the target of a symbolic link in a folder if it is outside the folder; else None.

    Links are followed to the end. If the folder is in the cache of the Hugging Face hub, the blobs of its repository
    count as inside, because a snapshot consists of links to blobs.
    """
    # Unlike `Path.resolve`, `realpath` does not raise for a loop of links; opening the file does.
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    cached = (p / "blobs" for p in root.parents if p.name.startswith(_CACHED_REPOSITORY))
    allowed_roots = (root, *cached)
    return None if any(target.is_relative_to(root_folder) for root_folder in allowed_roots) else target


def foreign_target(path: Path, folder: Path) -> Path | None:
    """Return the target of `path` if it is outside `folder` and the symbolic links to it are not allowed; else None.

    Allowed are two kinds of links that are common in folders with models: a link to a file of the same name, and a link
    to a blob in the cache of the Hugging Face hub. A link to a file of another name is not allowed, nor is a link in
    place of a folder: exports copy files of received folders, so such a link could publish any file.
    """
    if outside_target(path, folder) is None:
        return None
    root, place = Path(os.path.abspath(folder)), Path(os.path.abspath(path))  # noqa: PTH100
    leaves = False
    for _ in range(_MOST_LINKS):
        if not place.is_symlink() or (not leaves and outside_target(place.parent, folder) is not None):
            break
        place = Path(os.path.abspath(place.parent / place.readlink()))  # noqa: PTH100
        if place.is_relative_to(root):
            continue
        leaves = True
        if place.parts[-2:-1] == ("blobs",) and place.parts[-3].startswith(_CACHED_REPOSITORY):
            return None
        if place.name != path.name:
            return place
    return None if leaves else Path(os.path.realpath(path))


def names_outside(name: str) -> bool:
    """Return whether a file name may lead outside its folder, such as a URL, an absolute path or a path with `..`."""
    parts = name.replace("\\", "/").split("/")
    return "://" in name or "::" in name or ".." in parts or parts[0] in ("", "~") or "\0" in name


@contextmanager
def bounded_heap(num_bytes: int) -> Iterator[None]:
    """Limit the growth of this process's heap to `num_bytes` in a context; larger allocations raise MemoryError.

    Intended for libraries that decompress a received file. Mapped files do not count. The limit applies to all
    threads, so use it for a single read. No effect on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    limit_bytes = pages * resource.getpagesize() + num_bytes
    limits = [limit for limit in (limit_bytes, before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
