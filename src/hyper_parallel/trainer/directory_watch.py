"""Detection of a run directory that is removed or replaced during the run, and hints that resume a failed run."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hyper_parallel.errors import RunDirectoryLost
from hyper_parallel.trainer.checkpoints import manifest as checkpoints
from hyper_parallel.trainer.files import inode

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

_SAFE_LR: Final = 3e-4  # the default of `training.lr`
_REMOVAL_S: Final = 2.0
"""Maximum wait for the removal of the directory after the removal of the watched file."""
_POLL_S: Final = 0.02  # short compared with `_REMOVAL_S`


def nonfinite_hint(job: Job) -> str:
    """Return the hint for a non-finite loss or gradient.

    The hint is the command that resumes from the newest checkpoint with a lower learning rate or, without checkpoints,
    recipe overrides.
    """
    lr = min(job.recipe.training.lr / 10, _SAFE_LR)
    change, norm = f"training.lr={lr:g}", job.recipe.training.max_grad_norm
    if not checkpoints.steps(job.checkpoint_dir):
        return change if norm is not None and norm <= 1 else f"{change} training.max_grad_norm=1.0"
    words = [str(job.output_dir.absolute() / "config.yaml"), "checkpoint.resume=must", change]
    if job.recipe.checkpoint.from_dir:
        words.append("checkpoint.from_dir=null")
    return f"hyper-parallel train {shlex.join(words)}"


class DirectoryWatch:
    """Detector of the removal, move or replacement of a run directory and, after `follow`, of a file in it.

    The directory stays open until `close`.

    Raises:
        RunDirectoryLost: HP721 when the directory cannot be opened.
    """

    def __init__(self, place: Path) -> None:
        self._place, self._name = place, ""
        try:
            self._handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _lost_error(place, None, "directory of the run") from error
        self._file = self._watched()

    def follow(self, name: str) -> None:
        """Also watch the file `name` in the directory, instead of the file of an earlier call."""
        self._name = name
        self._file = self._watched()

    def check(self) -> None:
        """Check that the directory and the watched file are still at their paths, and were not replaced.

        Raises:
            RunDirectoryLost: HP721 with the newest saved step, if any, and the command that resumes from it.
        """
        if self._is_unchanged() and self._watched() == self._file:
            return
        # A recursive removal may not have reached the directory yet.
        begin = time.monotonic()
        while self._is_unchanged() and time.monotonic() - begin < _REMOVAL_S:
            time.sleep(_POLL_S)
        if self._is_unchanged():
            raise _lost_error(self._place, self._place, f"file {self._name} of the run")
        raise _lost_error(self._place, _folder_of(self._handle), "directory of the run")

    def _watched(self) -> tuple[int, int] | None:
        return inode(self._place / self._name, follow_links=not self._name)

    def _is_unchanged(self) -> bool:
        opened = os.fstat(self._handle)
        return inode(self._place) == (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """Close the file descriptor of the directory."""
        os.close(self._handle)


def _lost_error(place: Path, now: Path | None, what: str) -> RunDirectoryLost:
    """Return the error for a lost file or directory; `now` is the directory's current path, None if it was removed."""
    moved = now is not None and now != place
    saved = max(checkpoints.steps(now / "checkpoints"), default=0) if now is not None else 0
    hint = "start the run again; it begins at step 1, because no checkpoint is left"
    if saved and now is not None:
        words = [str(now / "config.yaml"), *([f"output_dir={now}"] if moved else [])]
        hint = f"hyper-parallel train {shlex.join([*words, 'checkpoint.resume=must'])}"
    change = f"moved to {now}" if moved else "removed or replaced"
    return RunDirectoryLost(
        f"the {what} was {change} while the run wrote to it",
        where=str(place),
        got=f"saved up to step {saved}" if saved else "no checkpoint is left",
        hint=hint,
    )


def _folder_of(handle: int) -> Path | None:
    """Return the current path of an open directory; None if it was removed, or if /proc does not exist."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115
    except OSError:  # not Linux
        return None
    status = os.fstat(handle)
    return path if inode(path) == (status.st_dev, status.st_ino) else None
