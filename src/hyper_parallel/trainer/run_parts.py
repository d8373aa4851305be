"""Parts of a run: steps trained by one process with one recipe and one plan.

  RUN_DIR/parts/step_00000000/    config.yaml, plan.json, part.json of the steps after step 0
  RUN_DIR/parts/step_00000120/    the same files of a process that resumed from the checkpoint of step 120

The files of the same name in RUN_DIR belong to the last part.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from hyper_parallel.owned_folder import Replacement, remove_finished
from hyper_parallel.serde import write_text
from hyper_parallel.trainer.files import copy_files

PARTS: Final = "parts"
_FILES: Final = ("config.yaml", "plan.json")
_FOLDER: Final = re.compile(r"step_(\d{8,15})")


class RunPart:
    """Part of a run that begins after a step.

    Args:
        directory: Run directory.
        step: Number of steps before the part.
        changed: Changes since the checkpoint from which it resumes.

    Attributes:
        is_late: Whether the run's files describe an earlier part and must stay until this part has trained a step.
    """

    def __init__(self, directory: Path, step: int, changed: dict[str, Any]) -> None:
        self._directory, self._step, self._changed = directory, step, changed
        self.is_late = step > 0 and (directory / _FILES[0]).is_file()

    def keep(self) -> None:
        """Copy recipe and plan of the run into the folder of this part, and remove parts that it replaces."""
        parts = self._directory / PARTS
        parts.mkdir(exist_ok=True)
        for path in parts.iterdir():
            match = _FOLDER.fullmatch(path.name)
            if match and int(match[1]) > self._step:
                remove_finished(path)
        folder = Replacement(parts / f"step_{self._step:08d}", "part", "the record of this part")
        partial = folder.open()
        with folder.discarded_on_error():
            copy_files(self._directory, partial, _FILES)
            facts = {"step": self._step, "changed": self._changed}
            write_text(partial / "part.json", json.dumps(facts, indent=1) + "\n")
            folder.publish()
