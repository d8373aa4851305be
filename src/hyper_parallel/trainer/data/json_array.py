"""Incremental reader of a JSON array in a file: only one element is in memory at a time.

The array may be the value of a key of an object whose other values are neither lists nor objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, Final

from hyper_parallel.received import LimitExceeded

_CHUNK: Final = 2**20
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_KEY: Final = re.compile(r'"([^"\\]*)"\s*:')
HEAD: Final = 4096
"""Characters at the beginning of a file within which the array must begin."""
_PLAIN_VALUE: Final = r'"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*'
AROUND: Final = re.compile(rf'\s*\{{\s*(?:{_PLAIN_VALUE},\s*)*"[^"\\]*"\s*:\s*(?=\[)')
"""Beginning of an object around an array."""
_OBJECT_END: Final = re.compile(rf"\s*(?:,\s*{_PLAIN_VALUE})*\}}\s*")
"""End of an object around an array."""
_SECOND_ARRAY: Final = re.compile(rf'\s*,\s*(?:{_PLAIN_VALUE},\s*)*"([^"\\]*)"\s*:\s*\[')
"""Beginning of a second array in the same object."""
_LONGEST_LITERAL: Final = 16
"""Largest distance from the end of a chunk at which the decoder reports a word or number cut by it."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary of the key-value pairs of a JSON object.

    Raises:
        ValueError: A key occurs twice, so one of its values would be lost.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key `{twice[:40]}` occurs twice in one object")
    return members


class ArrayReader:
    """Iterator over the elements of an array.

    Args:
        file: Text of the file, from its beginning.
        most: Largest number of characters of an element.
    """

    def __init__(self, file: IO[str], most: int) -> None:
        self._file, self._most = file, most
        self._decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
        self._buffer, self._at, self._first_line = file.read(HEAD), 0, 1
        self._ended = False
        self.key = ""
        """Key of the array in the object around it."""
        self.second_key: str | None = None
        """Key of a second array in the object, set when it raises an error."""
        around = AROUND.match(self._buffer)
        self._is_value = around is not None
        self.outer_keys: list[str] = []
        """Other keys of the object around the array."""
        if around is not None:
            self._at = around.end()
            *self.outer_keys, self.key = _KEY.findall(around[0])

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """Yield each element with its text.

        Raises:
            json.JSONDecodeError: The text is not an array; its line numbers count from `first_line`.
            LimitExceeded: An element is longer than the limit.
        """
        self._expect("[", "Expecting value")
        if self._next() == "]":
            self._close()
            return
        while True:
            self._next()
            yield self._element()
            if self._next() == "]":
                self._close()
                return
            self._expect(",", "Expecting ',' delimiter")

    def _fill(self) -> bool:
        """Read at least as many characters as are buffered; return False at the end of the file."""
        if self._ended:
            return False
        chunk = self._file.read(max(_CHUNK, len(self._buffer) - self._at))
        if not chunk:
            self._ended = True
            return False
        self._first_line += self._buffer.count("\n", 0, self._at)
        self._buffer, self._at = self._buffer[self._at :] + chunk, 0
        return True

    def _next(self) -> str:
        """Skip white space and return the next character; an empty text at the end."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _expect(self, character: str, problem: str) -> None:
        if self._next() != character:
            raise self._error(problem)
        self._at += 1

    def _close(self) -> None:
        self._at += 1
        if self._is_value:
            while len(self._buffer) - self._at < _CHUNK and self._fill():
                pass
            end = _OBJECT_END.match(self._buffer, self._at)
            if end is None:
                second = _SECOND_ARRAY.match(self._buffer, self._at)
                self.second_key = second[1] if second else None
                raise self._error("Expecting plain values beside the list of records")
            self._at = end.end()
            self.outer_keys += _KEY.findall(end[0])
        if self._next():
            raise self._error("Extra data")

    def _error(self, problem: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(problem, self._buffer, self._at)

    def _element(self) -> tuple[Any, str]:
        """Return the next element and its text; read more chunks until it is complete."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated")
                cut = cut or error.pos >= len(self._buffer) - _LONGEST_LITERAL
                if not cut or not self._more():
                    raise
                continue
            may_continue = self._buffer[end - 1] not in '}]"'  # a number
            if may_continue and end > len(self._buffer) - _LONGEST_LITERAL and self._more():
                continue
            if end - self._at > self._most:
                raise LimitExceeded(f"{end - self._at:,} characters, more than {self._most:,}")
            text, self._at = self._buffer[self._at : end], end
            return value, text

    def _more(self) -> bool:
        length = len(self._buffer) - self._at
        if length > self._most:
            raise LimitExceeded(f"more than {self._most:,} characters")
        return self._fill()

    @property
    def line(self) -> int:
        """Line number of the current element's beginning."""
        return self._first_line + self._buffer.count("\n", 0, self._at)

    @property
    def first_line(self) -> int:
        """Line number of the first line in the text of a `JSONDecodeError`."""
        return self._first_line
