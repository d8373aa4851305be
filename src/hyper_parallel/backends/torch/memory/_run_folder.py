"""Folders of a run outside of its directory: removed by it, or by the next run on this host when it was killed.

Beside a folder lies a lock file of the same name. Its run holds a lock on it (`flock`) that the kernel gives back when
the last process of the run ends, however it ends. So a lock that can be had is that of a dead run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyper_parallel.errors import TransferFailed

_BOOT = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


@contextmanager
def run_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder for the files of one run, removed with all that is in it at the end of the context.

    Folders of runs that were killed on this host since it was started are removed first.

    Args:
        parent: Where; created when it is missing.
        name: Begins the folder's name.

    Raises:
        TransferFailed: HP513 when it cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(parent)
        lock, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".lock", dir=parent)
    except OSError as error:
        raise _impossible(parent, error) from error
    mark, folder = Path(path), Path(path).with_suffix("")
    try:
        try:
            # Without locks in the file system nobody can tell whether the run is dead, and the folder stays.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.write(lock, _mark())
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise _impossible(parent, error) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)
        os.close(lock)


def _remove_dead(parent: Path) -> None:
    """Remove folders whose lock is held by nobody."""
    for mark in parent.glob("*.lock"):
        with suppress(OSError), mark.open("r+b") as lock:
            # A lock tells of the processes of one kernel. What others have marked, or nobody yet, stays.
            if not _mark() or lock.read() != _mark():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while somebody holds it
            folder = mark.with_suffix("")
            shutil.rmtree(folder, ignore_errors=True)
            # The mark goes last: who is killed here leaves it to the next run.
            if not folder.exists():
                mark.unlink()
                logger.info("removed %s, which a killed run had left", folder)


def _mark() -> bytes:
    """What a lock file holds: the kernel that its lock is known to, since when it was started."""
    try:
        return b"hyper-parallel " + _BOOT.read_bytes()
    except OSError:  # not Linux
        return b""


def _impossible(parent: Path, error: OSError) -> TransferFailed:
    return TransferFailed(
        "there can be no folder for the files of a run", where=str(parent), got=str(error)
    )
