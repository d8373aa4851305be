"""Conversion of untrusted values to short text without control characters, for a terminal."""

from __future__ import annotations

import logging
import re
import reprlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

_MOST_CHARACTERS: Final = 2_000
"""Maximum characters of one value in a message."""
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Characters to escape: C0 except tab and line feed, DEL, C1, bidirectional marks, line and paragraph separators, lone
surrogates, and the byte-order mark."""


def printable(text: str) -> str:
    """Return a text in which characters that move the cursor, or hide or reorder text, are JSON escapes.

    Tabs and line feeds are not escaped. JSON text keeps its value, because parsers decode the escapes.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def console(**options: Any) -> Console:
    """Return a rich console with these options that escapes control characters and does not interpret markup."""
    from rich.console import Console

    class Printable(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(printable(text), **how)

    return Printable(highlight=False, markup=False, emoji=False, **options)


class PrintableFormatter(logging.Formatter):
    """Log formatter that escapes the same characters as `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line of a record, with control characters escaped."""
        return printable(super().format(record))


class _Abbreviation(reprlib.Repr):
    """Variant of `repr` that shortens texts to `length` characters, and shortens collections and large integers."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.maxlevel = 3
        most = max(8, length // 50)
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = most
        self.maxstring = self.maxother = length

    def repr_str(self, x: str, level: int) -> str:
        shown = repr(x[: self.maxstring])
        return shown if len(x) <= self.maxstring else f"{shown[:-1]}...{shown[0]}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return self.repr_instance(x[: self.maxstring], level)

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length():,} bits"


def abbreviated(value: Any, length: int = 80) -> str:
    """Return `repr(value)` shortened to at most `length` characters; for an integer above 256 bits, its size."""
    text = _Abbreviation(length).repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def plain(value: object) -> str:
    """Return a value as text for a message: a string without quotes, a list with commas; long texts are shortened."""
    if isinstance(value, (list, tuple, range)):
        text = ", ".join(map(_plain_item, value[:200])) + (", ..." if len(value) > 200 else "")
    else:
        text = _plain_item(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _plain_item(value: object) -> str:
    if isinstance(value, str):
        return value[: _MOST_CHARACTERS + 1]
    if isinstance(value, (int, bytes, dict, list, tuple, set, frozenset)):
        return abbreviated(value, _MOST_CHARACTERS)
    return str(value)
