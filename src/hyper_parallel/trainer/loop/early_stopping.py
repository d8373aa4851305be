"""Early stopping on the held-out loss, by the rule of transformers' `EarlyStoppingCallback`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Counter of evaluations without improvement; loss and counter are equal on every rank.

    Attributes:
        patience: Number of consecutive evaluations without improvement that ends the run; None: never.
        threshold: Minimum decrease below the best loss that counts as an improvement.
        best: Lowest loss so far; None before the first evaluation.
        waited: Consecutive evaluations without improvement.
    """

    patience: int | None
    threshold: float
    best: float | None = None
    waited: int = 0

    @property
    def over(self) -> bool:
        """True if the run must end."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def why(self) -> str:
        """Reason for the end of the run, in words."""
        return (
            f"{self.waited} evaluations in a row were no better than a held-out loss of {self.best}"
        )

    def take(self, loss: float) -> None:
        """Count an evaluation; a loss that is not finite is never an improvement."""
        if self.patience is None:  # a resumed run with a patience starts to count
            return
        best = self.best
        self.waited = 0 if best is None or best - loss > self.threshold else self.waited + 1
        best = sys.float_info.max if best is None else best
        self.best = loss if loss < best else best

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"best": self.best, "waited": self.waited}
