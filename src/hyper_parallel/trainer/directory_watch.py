"""What becomes of a run whose directory disappears, and how a run that cannot go on is continued."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hyper_parallel.errors import RunDirectoryLost
from hyper_parallel.trainer.checkpoints import manifest as checkpoints

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

_SAFE_LR: Final = 3e-4  # the default of `training.lr`
_REMOVAL_S: Final = 2.0
"""Wait for a removal to reach the directory itself: files are removed first, one by one."""
_LOOK_S: Final = 0.02  # short beside that


def continuing_words(job: Job) -> str:
    """Return how to go on after numbers that are not finite: the newest checkpoint with a smaller learning rate."""
    lr = min(job.recipe.training.lr / 10, _SAFE_LR)
    change = f"training.lr={lr:g}"
    if not checkpoints.steps(job.checkpoint_dir):
        return f"{change} training.max_grad_norm=1.0"
    words = [str(job.output_dir.absolute() / "config.yaml"), "checkpoint.resume=must", change]
    if job.recipe.checkpoint.from_dir:
        words.append("checkpoint.from_dir=null")
    return f"hyper-parallel train {shlex.join(words)}"


class DirectoryWatch:
    """The identity of a run directory, and of a file in it, as they were when this was made.

    Args:
        place: The directory.
        name: A file in it that is written to its end; empty: none.

    Raises:
        RunDirectoryLost: HP721 when it is gone already.
    """

    def __init__(self, place: Path, name: str = "") -> None:
        self._place, self._name = place, name
        try:
            self._handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _lost(place, None, "directory of the run") from error
        self._file = _identity(place / name)

    def check(self) -> None:
        """Raise when the directory was removed, moved or replaced, or the file removed or replaced.

        Raises:
            RunDirectoryLost: HP721 with the step that is saved, and where.
        """
        if self._is_there() and _identity(self._place / self._name) == self._file:
            return
        begin = (
            time.monotonic()
        )  # who removes files one by one may not have come to the directory yet
        while self._is_there() and time.monotonic() - begin < _REMOVAL_S:
            time.sleep(_LOOK_S)
        if self._is_there():
            raise _lost(self._place, self._place, f"file {self._name} of the run")
        raise _lost(self._place, _folder_of(self._handle), "directory of the run")

    def _is_there(self) -> bool:
        mine = os.fstat(self._handle)
        return _identity(self._place) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._handle)


def _lost(place: Path, now: Path | None, what: str) -> RunDirectoryLost:
    """Return the error of a run whose files are gone; `now`: where its directory is, None: nowhere."""
    moved = now is not None and now != place
    saved = max(checkpoints.steps(now / "checkpoints"), default=0) if now is not None else 0
    hint = f"start the run again; it begins at step 1 (ls -la {shlex.quote(str(place))})"
    if saved and now is not None:
        words = [str(now / "config.yaml"), *([f"output_dir={now}"] if moved else [])]
        hint = f"hyper-parallel train {shlex.join([*words, 'checkpoint.resume=must'])}"
    how = f"moved to {now}" if moved else "removed or replaced"
    return RunDirectoryLost(
        f"the {what} was {how} while the run wrote to it",
        where=str(place),
        got=f"saved up to step {saved}" if saved else "no checkpoint is left",
        hint=hint,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from every other; None: it is not there."""
    try:
        status = path.lstat() if path.name.endswith(".jsonl") else path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _folder_of(handle: int) -> Path | None:
    """Return the place in which an open folder is now; None when it was removed."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115
    except OSError:  # not Linux
        return None
    status = os.fstat(handle)
    return path if _identity(path) == (status.st_dev, status.st_ino) else None
