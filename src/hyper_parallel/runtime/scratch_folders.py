"""Scratch folders of processes on this machine: in memory where there is space, and none is left behind.

A folder holds a lock file, on which its process and the ranks forked from it hold a lock (`flock`) that the kernel
gives back when the last of them ends, however it ends. The next folder removes those of the same user whose lock is
free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from hyper_parallel.errors import OutputNotWritable, not_writable

_PREFIX: Final = "hyper_parallel_"
_LOCK: Final = ".lock"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_MEMORY: Final = Path("/dev/shm")  # tmpfs on every Linux
_RESERVED_BYTES: Final = 1 << 20
"""Space that must be free: what ranks of one machine write to find and watch each other."""


@contextmanager
def scratch_folder(*, in_memory: bool = True) -> Iterator[Path]:
    """Return a folder that is removed at the end of the context.

    Args:
        in_memory: Prefer /dev/shm to the directory of TMPDIR, which is for larger files.

    Raises:
        OutputNotWritable: HP105 when neither has space.
    """
    temporary = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        folder = _first_folder([_MEMORY, temporary] if in_memory else [temporary], stack)
        yield folder


def _first_folder(parents: list[Path], stack: ExitStack) -> Path:
    """Create a folder in the first directory that has space; `stack` removes it."""
    refusal: OutputNotWritable | None = None
    for parent in parents:
        with ExitStack() as attempt:
            try:
                _remove_dead(parent)
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                attempt.callback(shutil.rmtree, folder, ignore_errors=True)
                attempt.callback(os.close, _locked(folder))
                _reserve(folder / "space")
            except OSError as error:
                refusal = not_writable(error, parent)
                continue
            stack.push(attempt.pop_all())
            return folder
    assert refusal is not None
    refusal.hint = "TMPDIR=<a directory with free space>, before the command"
    raise refusal


def _locked(folder: Path) -> int:
    """Create the lock file of a folder, and return its descriptor, which holds the lock."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # Without locks in the file system nobody can tell whether the process is dead, and the folder stays.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _mark(folder))
    return lock


def _reserve(path: Path) -> None:
    """Raise OSError when there is no space; a mapped file on a full disk would end the process instead."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    finally:
        os.close(file)
        path.unlink()


def _remove_dead(parent: Path) -> None:
    """Remove folders of this user whose processes have ended without doing so."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mark = _mark(folder)
                if mark and os.read(lock, len(mark) + 1) == mark:
                    fcntl.flock(
                        lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                    )  # an error while somebody holds it
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _mark(folder: Path) -> bytes:
    """Return the content of a lock file: the boot of the kernel that knows the lock, and the folder."""
    try:
        return _BOOT.read_bytes() + os.fsencode(folder.name)
    except OSError:  # not Linux
        return b""
