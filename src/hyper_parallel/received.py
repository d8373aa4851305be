"""Bounded readers for files that somebody else may have written.

A file is refused before anything is built from it when it is no regular file, or exceeds a limit on bytes, nesting,
elements or numbers. All JSON and text from outside of a process is read through this module, so a damaged or hostile
file costs a bounded amount of time and memory. Callers turn `LimitExceeded` into the coded error of their format.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1024**2
_MOST_OPENED: Final = 1_000_000
"""Brackets in a text from which on objects and lists are not built at all; texts in it may hold some, too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one file and on the value in it.

    Attributes:
        num_bytes: Size of the file.
        num_elements: Members of all objects and lists together; a shared (aliased) container counts at each use.
        depth: Nesting of objects and lists.
        integer_bits: Size of an integer.
        finite: Refuse NaN and infinities, which Python's JSON reader accepts.
    """

    num_bytes: int = 16 * _MIB
    num_elements: int = 1_000_000
    depth: int = 50
    integer_bits: int = 64
    finite: bool = False


class LimitExceeded(ValueError):
    """A file or a value is beyond one of its `Limits`; the message names the limit."""


def read_bytes(path: Path, limits: Limits) -> bytes:
    """Return the content of a regular file.

    Raises:
        LimitExceeded: The path is a device, pipe or socket, or the file is larger than `limits.num_bytes`.
        OSError: The file cannot be read.
    """
    # A pipe would block in open() until somebody writes to it.
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


def read_text(path: Path, limits: Limits) -> str:
    """Return the UTF-8 text of a regular file.

    Raises:
        LimitExceeded: As `read_bytes`.
        OSError: The file cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    return read_bytes(path, limits).decode("utf-8")


def parse_json(text: str | bytes, limits: Limits) -> Any:
    """Return the value of a JSON text.

    Raises:
        LimitExceeded: The text or its value exceeds a limit.
        ValueError: The text is not JSON (`json.JSONDecodeError`) or not UTF-8.
    """
    if len(text) > limits.num_bytes:
        raise LimitExceeded(f"{len(text):,} bytes, more than {limits.num_bytes:,}")
    if _num_opened(text) > max(limits.num_elements, _MOST_OPENED):
        raise LimitExceeded(f"more than {limits.num_elements:,} elements")
    try:
        value = json.loads(text)
    except RecursionError:
        raise LimitExceeded(f"nested deeper than {limits.depth}") from None
    check_value(value, limits)
    return value


def _num_opened(text: str | bytes) -> int:
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def read_json(path: Path, limits: Limits) -> Any:
    """Return the value of a JSON file; raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limits), limits)


def check_value(value: Any, limits: Limits) -> None:
    """Check a value of dicts, lists, texts and numbers against its limits.

    A container that is referenced several times (a YAML alias) is counted at each reference, and the walk ends at the
    first limit, so its cost is bounded by `num_elements`.

    Raises:
        LimitExceeded: With the first limit that is exceeded.
    """
    stack: list[Iterator[Any]] = [iter((value,))]
    left = limits.num_elements
    while stack:
        for item in stack[-1]:
            if isinstance(item, (dict, list, tuple, set, frozenset)):
                if len(stack) > limits.depth:
                    raise LimitExceeded(f"nested deeper than {limits.depth}")
                left -= len(item)
                if left < 0:
                    raise LimitExceeded(f"more than {limits.num_elements:,} elements")
                stack.append(iter(item.values() if isinstance(item, dict) else item))
                break
            _check_number(item, limits)
        else:
            stack.pop()


def _check_number(value: Any, limits: Limits) -> None:
    if isinstance(value, int):
        if value.bit_length() > limits.integer_bits:
            raise LimitExceeded(f"an integer of more than {limits.integer_bits} bits")
    elif limits.finite and isinstance(value, float) and not math.isfinite(value):
        raise LimitExceeded(f"{value} is not a finite number")
