"""Scratch folders of processes on this machine, in memory if there is space, removed even after a crash.

Each folder contains a lock file. The process that creates the folder and the ranks forked from it share a lock
(`flock`). The kernel releases the lock when the last of these processes ends. Creating a folder also removes older
folders of the same user whose lock is free.
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
"""Minimum free space, for the rendezvous file and the heartbeats of ranks."""


@contextmanager
def scratch_folder(*, in_memory: bool = True) -> Iterator[Path]:
    """Yield a new scratch folder, and remove it at the end of the context.

    Args:
        in_memory: Whether to prefer /dev/shm to the temporary directory (TMPDIR); False for large files.

    Raises:
        OutputNotWritable: HP105 when no directory has space.
    """
    temporary = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        folder = _first_folder([_MEMORY, temporary] if in_memory else [temporary], stack)
        yield folder


def _first_folder(parents: list[Path], stack: ExitStack) -> Path:
    """Create a folder in the first of `parents` that has space; closing `stack` removes the folder."""
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
    refusal.hint = f"export TMPDIR={Path.home()}, or another directory with free space"
    raise refusal


def _locked(folder: Path) -> int:
    """Create and lock the lock file of a folder; return its file descriptor.

    The lock is released when every process that inherited the descriptor has closed it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # On a file system without locks, the folder of a killed process is never removed.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _mark(folder))
    return lock


def _reserve(path: Path) -> None:
    """Raise OSError for too little disk space, because later writes to mapped memory would kill the process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    finally:
        os.close(file)
        path.unlink()


def _remove_dead(parent: Path) -> None:
    """Remove the scratch folders of this user that ended processes have left behind."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mark = _mark(folder)
                if mark and os.read(lock, len(mark) + 1) == mark:
                    # This raises an error while a process holds the lock.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _mark(folder: Path) -> bytes:
    """Return the content of a lock file: boot id of the kernel (locks do not survive a reboot) and folder name."""
    try:
        return _BOOT.read_bytes() + os.fsencode(folder.name)
    except OSError:  # not Linux
        return b""
