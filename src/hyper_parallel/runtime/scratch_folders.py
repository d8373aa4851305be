"""Scratch folders of processes on this machine, in memory if there is space, removed even after a crash.

Each folder contains a lock file. The process that creates the folder and the ranks forked from it share a lock
(`flock`), which the kernel releases when the last of them ends. Creating a folder also removes older folders of the
same user whose lock is free.
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
"""Minimum free space: ranks of one machine write their rendezvous and heartbeats here."""


@contextmanager
def scratch_folder(*, in_memory: bool = True) -> Iterator[Path]:
    """Yield a new scratch folder, and remove it at the end of the context.

    Args:
        in_memory: Prefer /dev/shm to the directory of TMPDIR; pass False for larger files.

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
    """Create the lock file of a folder, and return the descriptor that holds the lock."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # On a file system without locks, the end of the process cannot be detected, and the folder is never removed.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _mark(folder))
    return lock


def _reserve(path: Path) -> None:
    """Raise OSError if the disk has too little space: a write to a memory-mapped file would kill the process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    finally:
        os.close(file)
        path.unlink()


def _remove_dead(parent: Path) -> None:
    """Remove folders of this user whose processes have ended without removing them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mark = _mark(folder)
                if mark and os.read(lock, len(mark) + 1) == mark:
                    # Raises while a process holds the lock.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _mark(folder: Path) -> bytes:
    """Return the content of a lock file: the kernel's boot id, which locks do not outlive, and the folder name."""
    try:
        return _BOOT.read_bytes() + os.fsencode(folder.name)
    except OSError:  # not Linux
        return b""
