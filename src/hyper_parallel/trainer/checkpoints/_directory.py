"""Folder of a process's checkpoints, with detection of removal and replacement."""

from __future__ import annotations

import logging
from pathlib import Path

from hyper_parallel.errors import OutputNotWritable
from hyper_parallel.trainer.checkpoints import manifest as files

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """Folder of checkpoints, created on demand; detects that it was removed or replaced.

    Args:
        path: The folder. A missing parent is created only if it is missing from the start, so that a run directory that
            was removed later is not recreated.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._parents = path, not path.parent.is_dir()
        self._identity: tuple[int, int] | None = None

    def prepare(self, step: int) -> Path:
        """Create and return the hidden folder for writing a checkpoint, after removing leftovers of killed processes.

        Raises:
            OutputNotWritable: HP105 when the folder was replaced by another one, whose checkpoints would be pruned, or
                when the checkpoint would replace files that are not part of a checkpoint.
        """
        if self._identity is not None and not self._path.exists():
            _log.warning("%s was removed with its checkpoints; it is created again", self._path)
        elif self._identity is not None and self._current_identity() != self._identity:
            raise OutputNotWritable(
                "the directory of the checkpoints was replaced by another one",
                where=str(self._path),
                hint=f"ls -ld {self._path}",
            )
        self._path.mkdir(parents=self._parents, exist_ok=True)
        self._identity = self._current_identity()
        files.clean(self._path)
        files.check_own(self._path / files.step_name(step))
        hidden = files.temporary(self._path, step)
        hidden.mkdir()
        return hidden

    def newest_words(self) -> str:
        """Return the step of the newest checkpoint in words."""
        newest = max(files.steps(self._path), default=None)
        return "no checkpoint was saved" if newest is None else f"newest checkpoint: step {newest}"

    def _current_identity(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_dev, status.st_ino
