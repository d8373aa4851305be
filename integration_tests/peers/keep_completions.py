"""Keeps the completions of a run, so that TRL's trainer can learn from the same ones."""

from __future__ import annotations

import shutil
from typing import Any

from hyper_parallel.trainer import Callback

FOLDER = "completions"
"""Folder of the run directory; files as `rollouts/step_*.safetensors`, see docs/reference/run_directory.md."""


class KeepCompletions(Callback):
    """Copies the files of every rollout out of the folder in which they are short-lived."""

    def on_train_begin(self, job: Any) -> None:
        """Make the folder."""
        self._run = job.output_dir
        (self._run / FOLDER).mkdir(exist_ok=True)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Copy what the step has learned from."""
        for path in (self._run / "rollouts").glob("step_*.safetensors"):
            shutil.copy(path, self._run / FOLDER / path.name)
