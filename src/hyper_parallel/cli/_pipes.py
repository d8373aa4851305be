"""Output whose reader leaves (`| head -1`): a run goes on, and nothing more is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class LastingStream:
    """A text stream that becomes a sink when the reader of its pipe has left.

    Args:
        stream: The stream; everything else is left to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or forget the text."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._sink()
        return len(text)

    def flush(self) -> None:
        """Flush what is buffered, or forget it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._sink()

    def _sink(self) -> None:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self._stream.fileno())  # for libraries that write past Python, too
        os.close(sink)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error that outlive their readers, in this process and in ranks forked inside."""
    before = sys.stdout, sys.stderr
    # A stream that was closed before (`>&-`) is a sink from the beginning.
    given = (s or Path(os.devnull).open("w", encoding="utf-8") for s in before)  # noqa: SIM115
    sys.stdout, sys.stderr = map(LastingStream, given)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
