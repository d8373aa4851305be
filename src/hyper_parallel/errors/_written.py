"""Coded errors of failed writes, and a collector for failures of optional outputs."""

from __future__ import annotations

import errno
import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hyper_parallel.errors._base import HyperParallelError

DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Error numbers of failures of a disk or file system."""

_log = logging.getLogger(__name__)


class OutputNotWritable(HyperParallelError, code="HP105"):
    """A file or directory cannot be written: missing permissions, a full disk, or existing files of the user.

    Commands also use this code for other failures of the file system, such as a file that cannot be read.

    Why: files that the command has not written are never replaced. For optional outputs, the error is reported after
    the rest of the work is done. Fix: choose another path, move the existing files, change the permissions, or free
    disk space; a run then resumes from its newest checkpoint.
    """


def not_writable(error: OSError, place: str | Path, problem: str = "a file cannot be written") -> OutputNotWritable:
    """Return the coded error `problem` for a failed write. `place` is the path, used if `error` names no file."""
    name = str(error.filename or place)
    hint = f"ls -ld {shlex.quote(name)}; df -h {shlex.quote(_existing(name))}"
    if error.errno == errno.ENAMETOOLONG:
        hint, name = "choose a shorter path", f"{name:.120}..."
    return OutputNotWritable(problem, where=name, got=error.strerror or str(error), hint=hint)


@contextmanager
def written(place: str | Path) -> Iterator[None]:
    """Raise OutputNotWritable (HP105) in place of an `OSError` in the block; `place` as in `not_writable`."""
    try:
        yield
    except OSError as error:
        raise not_writable(error, place) from error


class Unwritten:
    """Collector of errors of optional outputs, so that the run continues without these outputs.

    Attributes:
        errors: Collected errors in order.
    """

    def __init__(self) -> None:
        self.errors: list[HyperParallelError] = []

    @contextmanager
    def spare(self, place: str | Path) -> Iterator[None]:
        """Collect a coded error or an `OSError` that the block raises; `place` as in `not_writable`."""
        try:
            with written(place):
                yield
        except HyperParallelError as error:
            self.keep(error)

    def keep(self, error: HyperParallelError) -> None:
        """Collect an error, and log it as a warning."""
        self.errors.append(error)
        _log.warning("the run continues without an output:\n%s", error)


def _existing(name: str) -> str:
    """Return the path if it is a directory, else the nearest existing directory above it; "." if there is none."""
    while not os.path.isdir(name) and os.path.dirname(name) != name:  # noqa: PTH112, PTH120
        name = os.path.dirname(name)  # noqa: PTH120
    return name or "."
