"""When the held-out loss ends a run, by the rule of transformers' `EarlyStoppingCallback`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Counts evaluations after steps whose loss is no better; the loss is equal on every rank, and so is the count.

    Attributes:
        patience: So many in a row end the run; None: it is never ended.
        threshold: By how much a loss has to be below the least one before to be better.
        best: Least loss so far; None: there was no evaluation.
        waited: Evaluations in a row that were no better.
    """

    patience: int | None
    threshold: float
    best: float | None = None
    waited: int = 0

    @property
    def over(self) -> bool:
        """Whether the run is to end."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def why(self) -> str:
        """Why it is over, in words."""
        return (
            f"{self.waited} evaluations in a row were no better than a held-out loss of {self.best}"
        )

    def take(self, loss: float) -> None:
        """Take note of an evaluation; a loss that is not finite is no better than any."""
        if self.patience is None:  # a run that goes on with one begins to count
            return
        best = self.best
        self.waited = 0 if best is None or best - loss > self.threshold else self.waited + 1
        best = sys.float_info.max if best is None else best
        self.best = loss if loss < best else best

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on has to know."""
        return {"best": self.best, "waited": self.waited}
