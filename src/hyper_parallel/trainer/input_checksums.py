"""Checksums of the inputs that a resumed run must find unchanged.

Inputs are base weights, reference models, reward models and log-probabilities of a reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.trainer.checkpoints.manifest import START_OVER

INPUTS: Final = "inputs"
"""Key of the checksums in the extra values of a checkpoint."""
BASE: Final = "base weights"


@dataclass
class RunInputs:
    """Checksums of inputs by name, in the checkpoint and as read by this process.

    Attributes:
        saved: Checksums in the loaded checkpoint; empty for a new run.
        checksums: Checksums of the inputs read by this process.
    """

    saved: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)

    def load(self, extra: dict[str, Any]) -> None:
        """Load the checksums from the extra values of a checkpoint."""
        stored = extra.get(INPUTS)
        if isinstance(stored, dict):
            self.saved = {str(name): str(checksum) for name, checksum in stored.items()}

    def state(self) -> dict[str, str]:
        """Return the checksums for the next checkpoint; inputs not read by this process keep their saved checksum."""
        return {**self.saved, **self.checksums}

    def check(self, name: str, checksum: str, place: str | Path) -> None:
        """Record the checksum of input `name`, read from path `place`.

        Raises:
            CheckpointMismatch: HP702 when the checkpoint has another checksum for this input.
        """
        saved = self.saved.get(name, checksum)
        if saved != checksum:
            raise CheckpointMismatch(
                f"the {name} have changed since the checkpoint was saved",
                where=str(place),
                got=f"checksum {checksum}",
                allowed=f"checksum {saved}",
                hint=f"restore these files, or train from the start with `{START_OVER}`",
            )
        self.checksums[name] = checksum
