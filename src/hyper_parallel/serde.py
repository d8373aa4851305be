"""JSON encoding of the core's frozen dataclasses, by pydantic, and writers of files: atomic, new, or appending.

`encode` turns a dataclass into plain JSON values; `decode` builds the dataclass from them. Types are strict: a text is
not converted to a number. Pydantic's adapters are built at first use, because building them is slow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from hyper_parallel.errors import abbreviated
from hyper_parallel.received import LimitExceeded, Limits, check_value, read_json

T = TypeVar("T")
Extra = Literal["allow", "forbid"]

_NO_FEWER: Final = 1 << 62
_DECODED: Final = Limits(num_bytes=_NO_FEWER, num_elements=_NO_FEWER)
"""Limits of a value in memory: only nesting depth and integer size."""
_PROBLEMS: Final = {"unexpected_keyword_argument": "unknown key", "missing": "missing"}
"""Messages for pydantic's error types; other types keep pydantic's message."""

_MOST_PROBLEMS: Final = 1000
"""Maximum number of problems that an error describes; above it, only their number, because describing them is slow."""


class DecodeError(ValueError):
    """Error for a JSON value that does not fit the requested type."""


def encode(value: Any) -> Any:
    """Convert a dataclass to plain JSON values, including fields that have their default."""
    return to_jsonable_python(value)


def decode(cls: type[T], data: Any, *, extra: Extra = "forbid") -> T:
    """Build `cls` from JSON values; at every level, unknown keys are errors, or accepted with `extra="allow"`.

    Raises:
        DecodeError: For values that do not fit `cls`. The text names the path of the first, such as `$.a[0]`; above
            1000 values, it contains only their number.
    """
    try:
        check_value(data, _DECODED)
    except LimitExceeded as error:
        raise DecodeError(f"$: {error}") from None
    return _validate(cls, data, extra)


def read(cls: type[T], path: Path, limits: Limits, *, extra: Extra = "forbid") -> T:
    """Build `cls` from a JSON file within limits; arguments as in `decode`.

    Raises:
        DecodeError: The file is not JSON, exceeds a limit or does not fit; see `decode`.
        OSError: The file cannot be read.
    """
    try:
        data = read_json(path, limits)
    except ValueError as error:  # LimitExceeded, JSONDecodeError and UnicodeDecodeError
        raise DecodeError(str(error)) from None
    return _validate(cls, data, extra)


def _validate(cls: type[T], data: Any, extra: Extra) -> T:
    adapter: TypeAdapter[T] = _adapter(cls)  # type: ignore[arg-type]  # classes are hashable
    try:
        return adapter.validate_json(json.dumps(data), strict=True, extra=extra)
    except ValidationError as error:
        if (count := error.error_count()) > _MOST_PROBLEMS:  # describing a problem takes a kilobyte
            raise DecodeError(f"$: {count:,} values do not fit") from None
        first = error.errors(include_url=False)[0]
        path = "$" + "".join(f"[{p}]" if isinstance(p, int) else f".{p:.80}" for p in first["loc"])
        problem = _PROBLEMS.get(first["type"]) or f"{first['msg']}, got {abbreviated(first['input'])}"
        raise DecodeError(f"{path}: {problem}") from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`prefix` and dotted key, value) of each leaf of nested dicts; an empty dict is a leaf."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old or the new content, never a part.

    A symbolic link to a file is replaced, not followed. A device or pipe, also behind a link, is written directly. An
    error removes the temporary file and is raised; a killed process may leave `.NAME.PROCESS.part`. The file is not
    flushed to the disk.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with create_file(partial) as file:
            file.write(text)
        partial.replace(path)
    except (OSError, UnicodeError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def create_file(path: Path) -> TextIOWrapper:
    """Create a text file and open it; an existing file or link of that name is unlinked first, not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, flags, 0o666), "w", encoding="utf-8")


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk, so that files created or renamed in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_file(path: Path) -> TextIOWrapper:
    """Open a text file to append to, and create it if it is missing; raise OSError for a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
