"""JSON in and out for the frozen dataclasses of the core, by pydantic; files that a reader never sees half of.

`encode` turns a dataclass into plain JSON values; `decode` builds the dataclass back. Types are strict (no text becomes
a number), unknown keys are refused, and an error names the dotted path of the value. Adapters are built on first use:
a command that reads no file pays nothing for them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

T = TypeVar("T")

_DEEPEST: Final = 50  # files of this package are nested less than ten deep
_PROBLEMS: Final = {"unexpected_keyword_argument": "unknown key", "missing": "missing"}
"""Our words for pydantic's error types; the others are printed as pydantic says them."""


class DecodeError(ValueError):
    """A JSON value does not fit the type it is read into."""


def encode(value: Any) -> Any:
    """Plain JSON values of a dataclass; fields that hold their default are kept, so a file is complete."""
    return to_jsonable_python(value)


def decode(cls: type[T], data: Any) -> T:
    """Build `cls` from JSON values.

    Raises:
        DecodeError: With the dotted path of the first value that does not fit.
    """
    if not _counts(data):
        raise DecodeError("$: an integer of more than 64 bits, or nested too deep")
    adapter: TypeAdapter[T] = _adapter(cls)  # type: ignore[arg-type]  # classes are hashable
    try:
        return adapter.validate_json(json.dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "$" + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        problem = _PROBLEMS.get(first["type"]) or f"{first['msg']}, got {first['input']!r}"
        raise DecodeError(f"{path}: {problem}") from error


def _counts(data: Any, depth: int = 0) -> bool:
    """Whether all integers are of sizes that can be computed with."""
    if isinstance(data, (dict, list)):
        values = data.values() if isinstance(data, dict) else data
        return depth < _DEEPEST and all(_counts(value, depth + 1) for value in values)
    return not isinstance(data, int) or data.bit_length() <= 64


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def write_text(path: Path, text: str) -> None:
    """Write a file under another name and rename it into place: a reader sees the old or the new one, never a half.

    A link under either name is replaced, not followed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    with create_file(partial) as file:
        file.write(text)
    partial.replace(path)


def create_file(path: Path) -> TextIOWrapper:
    """Open a new text file; a file or link of that name is unlinked first, so nothing is written through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, flags, 0o666), "w", encoding="utf-8")


def append_file(path: Path) -> TextIOWrapper:
    """Open a text file to append to; a symbolic link raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
