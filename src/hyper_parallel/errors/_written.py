"""One code for everything that the system refuses to write, and the failures of outputs that a run can do without."""

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
from hyper_parallel.errors._planning import OutputNotWritable

DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Refusals of a disk, in contrast to those of a service."""

_log = logging.getLogger(__name__)


def not_writable(error: OSError, place: str | Path) -> OutputNotWritable:
    """Return the coded error of a write that the system refuses.

    Args:
        error: The refusal.
        place: File or directory that is written, where the system does not name the file.
    """
    name = str(error.filename or place)
    hint = f"ls -ld {shlex.quote(name)}; df -h {shlex.quote(_existing(name))}"
    if error.errno == errno.ENAMETOOLONG:
        hint, name = "choose a shorter path", f"{name:.120}..."
    return OutputNotWritable(
        "a file cannot be written", where=name, got=error.strerror or str(error), hint=hint
    )


@contextmanager
def written(place: str | Path) -> Iterator[None]:
    """Give what the system refuses to write inside its code.

    Args:
        place: File or directory that is written, where the system does not name the file.

    Raises:
        OutputNotWritable: HP105.
    """
    try:
        yield
    except OSError as error:
        raise not_writable(error, place) from error


class Unwritten:
    """Failures of outputs that a run can do without: each is kept, and the run goes on.

    Attributes:
        errors: The failures, in their order.
    """

    def __init__(self) -> None:
        self.errors: list[HyperParallelError] = []

    @contextmanager
    def spare(self, place: str | Path) -> Iterator[None]:
        """Keep a coded error that is raised inside, or a write that the system refuses.

        Args:
            place: As of `written`.
        """
        try:
            with written(place):
                yield
        except HyperParallelError as error:
            self.keep(error)

    def keep(self, error: HyperParallelError) -> None:
        """Keep the failure of an output, and say it."""
        self.errors.append(error)
        _log.warning("the run goes on without an output:\n%s", error)


def _existing(name: str) -> str:
    """Return the nearest directory above a path that exists, for a command that a user pastes."""
    while not os.path.isdir(name) and os.path.dirname(name) != name:  # noqa: PTH112, PTH120
        name = os.path.dirname(name)  # noqa: PTH120
    return name or "."
