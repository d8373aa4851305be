"""Standard output and standard error that ignore write errors (closed pipe, full disk), so that a run continues."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from hyper_parallel.errors import OutputNotWritable


class BrokenPipeSafeStream:
    """Text stream that discards further output after a write error.

    Args:
        stream: Underlying stream.
        name: Name of the stream, for errors.

    Attributes:
        lost: First write error other than a closed pipe; None if there was none.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text; after a write error, discard it and all further output. Return the length of the text."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._sink(error)
        return len(text)

    def flush(self) -> None:
        """Flush buffered text; after a write error, discard it and all further output."""
        try:
            self._stream.flush()
        except OSError as error:
            self._sink(error)

    def check(self) -> None:
        """Raise an error if text was lost, except to a reader that has closed the pipe.

        Raises:
            OutputNotWritable: HP105 naming the stream.
        """
        if self.lost is not None:
            raise OutputNotWritable(
                f"{self._name} cannot be written; the rest of the run succeeded",
                got=self.lost.strerror,
                hint=f"df -h {shlex.quote(_place(self._stream))}",
            )

    def _sink(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            self.lost = self.lost or error
        sink_stream(self._stream)


def sink_stream(stream: TextIO) -> None:
    """Redirect a stream's file descriptor to /dev/null, so that native libraries are silenced too.

    No effect for a stream without a descriptor.
    """
    with suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


@contextmanager
def broken_pipe_safe_output() -> Iterator[None]:
    """Ignore write errors of standard output and standard error inside the context, and in ranks forked inside it.

    Raises:
        OutputNotWritable: HP105 at exit, if text was lost other than to a closed pipe, and nothing else failed.
    """
    before = sys.stdout, sys.stderr
    # A stream that was closed by the caller (`>&-`) is None.
    opened = (s or Path(os.devnull).open("w", encoding="utf-8") for s in before)  # noqa: SIM115
    names = ("standard output", "standard error")
    streams = [BrokenPipeSafeStream(s, name) for s, name in zip(opened, names, strict=True)]
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
    """Flush; return exit status 1 if output was lost other than to a closed pipe, else 0. For use before `os._exit`."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, BrokenPipeSafeStream)]
    for stream in streams:
        stream.flush()
    return int(any(stream.lost is not None for stream in streams))


def _place(stream: TextIO) -> str:
    """Return the path of the file that a stream writes; `.` if it is unknown."""
    try:
        return str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())
    except (OSError, ValueError):
        return "."
