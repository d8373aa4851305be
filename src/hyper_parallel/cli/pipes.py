"""Output that cannot be written (a reader that has left, a full disk): a run goes on, and nothing more is written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from hyper_parallel.errors import OutputNotWritable


class LastingStream:
    """A text stream that becomes a sink when it cannot be written.

    Args:
        stream: The stream; everything else is left to it.
        name: What it is, for errors.

    Attributes:
        lost: The first failure; None: everything was written, or a reader of a pipe has left on purpose.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or forget the text."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._sink(error)
        return len(text)

    def flush(self) -> None:
        """Flush what is buffered, or forget it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._sink(error)

    def check(self) -> None:
        """Raise when text was lost.

        Raises:
            OutputNotWritable: HP105.
        """
        if self.lost is not None:
            raise OutputNotWritable(
                f"{self._name} cannot be written; everything else is done",
                got=self.lost.strerror,
                hint=f"df -h {_place(self._stream)}",
            )

    def _sink(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            self.lost = self.lost or error
        sink_stream(self._stream)


def sink_stream(stream: TextIO) -> None:
    """Send what a stream writes from here on, and what libraries write past Python, to nowhere."""
    with suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error that outlive their readers and disks, in this process and in ranks forked inside.

    Raises:
        OutputNotWritable: HP105 at the end, when text was lost and nothing else failed.
    """
    before = sys.stdout, sys.stderr
    # A stream that was closed before (`>&-`) is a sink from the beginning.
    given = (s or Path(os.devnull).open("w", encoding="utf-8") for s in before)  # noqa: SIM115
    names = ("standard output", "standard error")
    streams = [LastingStream(stream, name) for stream, name in zip(given, names, strict=True)]
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    try:
        yield
        for stream in streams:
            stream.flush()
            stream.check()
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def check_output() -> int:
    """Return the exit status that lost output asks for, of a process that ends without leaving `lasting_output`."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, LastingStream)]
    for stream in streams:
        stream.flush()
    return int(any(stream.lost is not None for stream in streams))


def _place(stream: TextIO) -> str:
    """Return the file that a stream writes, for a command that a user pastes."""
    try:
        return str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())
    except (OSError, ValueError):
        return "."
