"""Scratch folders of a run outside of its directory: removed by the run, or after a kill by the next run on this host.

Next to a folder is a lock file of the same name. The run locks it with `flock`, and the kernel releases the lock when
the last process of the run ends, for any reason. So a lock that is free belongs to a dead run. The lock file names its
folder, and the marker in the folder names the lock. A folder is removed, file by file, only if both names agree, both
files belong to this user, and the lock file was written since the last boot.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyper_parallel.errors import TransferFailed
from hyper_parallel.owned_folder import Marker, read_marker, remove_unfinished, write_marker

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KIND = "scratch"
_MOST_BYTES = 4096  # limit of a lock file's size

logger = logging.getLogger(__name__)


@contextmanager
def run_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a folder for the files of one run, removed with its files at the end of the context.

    Folders of runs that were killed on this host since its boot are removed first.

    Args:
        parent: Parent folder; created when it is missing.
        name: Prefix of the folder's name.

    Raises:
        TransferFailed: HP513 when the folder cannot be created.
    """
    lock = -1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(parent)
        identity = secrets.token_hex(8)
        folder = parent / f"{name}-{identity}"
        mark = folder.with_name(f"{folder.name}.lock")
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _impossible(parent, error) from error
    try:
        try:
            # On a file system without locks a dead run cannot be detected, and the folder stays.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.write(lock, _mark(folder.name))
            folder.mkdir(mode=0o700)
            write_marker(folder, Marker(_KIND, identity=folder.name))
        except OSError as error:
            raise _impossible(parent, error) from error
        yield folder
    finally:
        _remove(folder)
        mark.unlink(missing_ok=True)
        os.close(lock)


def _remove_dead(parent: Path) -> None:
    """Remove folders of this user whose lock is free."""
    for mark in parent.glob("*.lock"):
        with suppress(OSError):
            lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _remove_if_dead(mark, lock)
            finally:
                os.close(lock)


def _remove_if_dead(mark: Path, lock: int) -> None:
    """Remove the folder of a lock file if the file is this user's, of this boot, and not locked."""
    folder, expected = mark.with_name(mark.name.removesuffix(".lock")), _mark(mark.name[:-5])
    # A lock is valid within one kernel. Files with another mark, or without one yet, stay.
    if not _is_mine(os.fstat(lock)) or not expected or os.read(lock, _MOST_BYTES) != expected:
        return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while somebody holds it
    if os.path.lexists(folder):
        status = folder.lstat()
        marker = read_marker(folder)
        unmarked = marker is None and not any(folder.iterdir())
        named = marker is not None and (marker.kind, marker.identity) == (_KIND, folder.name)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        if not (named or unmarked):
            return
        _remove(folder)
    # The lock file is removed last: after a kill at this point the next run removes it.
    if not os.path.lexists(folder):
        mark.unlink()
        logger.info("removed %s, which a killed run had left", folder)


def _remove(folder: Path) -> None:
    """Remove the files of a run, and the folder; other files in it stay, with a warning."""
    if left := remove_unfinished(folder, _KIND):
        logger.warning("%s is not removed: it holds %s", folder, ", ".join(sorted(left)[:3]))


def _is_mine(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _mark(folder: str) -> bytes:
    """Return the content of a folder's lock file: the boot id of the kernel, and the folder's name."""
    try:
        return b"hyper-parallel " + _BOOT.read_bytes() + os.fsencode(folder) + b"\n"
    except OSError:  # not Linux
        return b""


def _impossible(parent: Path, error: OSError) -> TransferFailed:
    return TransferFailed(
        "cannot create a folder for the files of a run", where=str(parent), got=str(error)
    )
