"""Scratch folders of processes on this machine, in memory if there is space; see `owned_folder.temporary_folder`."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from hyper_parallel.errors import OutputNotWritable, not_writable
from hyper_parallel.owned_folder import temporary_folder

_MEMORY: Final = Path("/dev/shm")  # tmpfs on every Linux
_RESERVED_BYTES: Final = 1 << 20
"""Minimum free space, for the rendezvous file and the heartbeats of ranks."""


@contextmanager
def scratch_folder(*, in_memory: bool = True) -> Iterator[Path]:
    """Yield a new scratch folder with at least 1 MiB of free space, and remove it at the end of the context.

    Args:
        in_memory: Whether to prefer /dev/shm to the temporary directory (TMPDIR); False for large files.

    Raises:
        OutputNotWritable: HP105 when the folder cannot be created in any of the directories.
    """
    temporary = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        yield _first_folder([_MEMORY, temporary] if in_memory else [temporary], stack)


def _first_folder(parents: list[Path], stack: ExitStack) -> Path:
    """Create a folder in the first of `parents` that has space; closing `stack` removes the folder."""
    refusal: OutputNotWritable | None = None
    for parent in parents:
        with ExitStack() as attempt:
            try:
                folder = attempt.enter_context(temporary_folder(parent, "hyper_parallel", "launch"))
                _reserve(folder / "space")
            except OSError as error:
                refusal = not_writable(error, parent)
                continue
            stack.push(attempt.pop_all())
            return folder
    assert refusal is not None
    refusal.hint = f"export TMPDIR={shlex.quote(str(Path.home()))}, or another directory with free space"
    raise refusal


def _reserve(path: Path) -> None:
    """Raise OSError if less than 1 MiB is free, because later writes to mapped memory would kill the process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    finally:
        os.close(file)
        path.unlink()
