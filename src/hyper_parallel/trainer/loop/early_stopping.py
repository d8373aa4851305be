"""Early stopping on the held-out loss, by the rule of transformers' `EarlyStoppingCallback`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Counter of evaluations without improvement, for early stopping; equal on every rank.

    Attributes:
        patience: Number of consecutive evaluations without improvement that ends the run; None: never.
        threshold: An evaluation is an improvement if its loss is lower than `best` by more than this.
        best: Lowest loss so far; None before the first evaluation, and without `patience`.
        waited: Number of consecutive evaluations without improvement until now.
    """

    patience: int | None
    threshold: float
    best: float | None = None
    waited: int = 0

    @property
    def should_stop(self) -> bool:
        """True if training must stop."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def reason(self) -> str:
        """Explanation of the stop, for the log."""
        return f"{self.waited} evaluations in a row were no better than a held-out loss of {self.best}"

    def update(self, loss: float) -> None:
        """Update the counter with the loss of an evaluation; without `patience`, do nothing."""
        if self.patience is None:  # a later resume with a patience starts with a new counter
            return
        best = self.best
        self.waited = 0 if best is None or best - loss > self.threshold else self.waited + 1
        best = sys.float_info.max if best is None else best
        self.best = loss if loss < best else best

    def state_dict(self) -> dict[str, Any]:
        """Return the counter's state for checkpoints."""
        return {"best": self.best, "waited": self.waited}
