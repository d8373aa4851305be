"""Checksums of what a run reads beside its recipe and its data: base weights, references, reward models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import CheckpointMismatch

INPUTS: Final = "inputs"
"""Key of the checksums in what a checkpoint stores beside tensors."""
BASE: Final = "base weights"


@dataclass
class RunInputs:
    """The inputs of a run by name, and those that its checkpoint was saved with.

    Attributes:
        saved: Checksums in the checkpoint; empty for a new run.
        found: Checksums of what this run has read.
    """

    saved: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)

    def load(self, extra: dict[str, Any]) -> None:
        """Take the checksums of a checkpoint."""
        stored = extra.get(INPUTS)
        if isinstance(stored, dict):
            self.saved = {str(name): str(checksum) for name, checksum in stored.items()}

    def state(self) -> dict[str, str]:
        """Return the checksums for the next checkpoint; inputs that were not read again stay as they were."""
        return {**self.saved, **self.found}

    def check(self, name: str, checksum: str, place: str | Path) -> None:
        """Compare an input with the one that the checkpoint was saved with, and remember it.

        Raises:
            CheckpointMismatch: HP702 when it is another one.
        """
        saved = self.saved.get(name, checksum)
        if saved != checksum:
            raise CheckpointMismatch(
                f"the {name} are not those of the checkpoint: they were exchanged or altered since it was saved",
                where=str(place),
                got=f"checksum {checksum}",
                allowed=f"checksum {saved}",
                hint="restore these files, or train from the start with `checkpoint.resume=never`",
            )
        self.found[name] = checksum
