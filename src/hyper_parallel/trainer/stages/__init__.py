"""Learning stages whose objective is not cross entropy on the data's tokens: preference stages and GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Microbatches = list[dict[str, Tensor]]
"""Inputs of this rank's microbatches: `input_ids` and `shift_labels` [B, S], and further values of the objective."""
Rows = NDArray[np.int64]
"""Index of each row of a step in the data; -1 is padding."""
StageInputs = tuple[Microbatches, int | None]
"""Inputs of the objective, and the number of tokens it counts in the whole step; None: as counted in the data."""


class LearningStage:
    """Interface of a learning stage: inputs and objective of a step. Every rank calls the same methods in order.

    Attributes:
        inputs_span: (name, category) of the timeline span of `inputs`.
    """

    inputs_span: ClassVar[tuple[str, str]] = ("data", "data")

    def begin(self, batches: Any) -> None:
        """Prepare before the first step of this process; the model has the weights of the last finished step."""

    def inputs(self, microbatches: Microbatches, rows: Rows, step: int) -> StageInputs:
        """Return the objective's inputs for this rank's rows in optimizer step `step`, counted from 1."""
        raise NotImplementedError

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return the objective's inputs for this rank's held-out rows; the first step of `batches` has all rows."""
        raise NotImplementedError

    def objective(self, first: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a microbatch from [B, S] log-probabilities of its targets, or [B, S] token scores."""
        raise NotImplementedError

    def rejects(self) -> bool | None:
        """Return whether to skip the step's update, equal on all ranks; None if the stage never skips.

        Called after the objective of all microbatches.
        """
        return None

    def end(self) -> None:
        """Release resources after the last step of the process."""

    def record(self) -> dict[str, Any]:
        """Return measurements of the step as a dict from `StepResult` field to value; equal on all ranks."""
        raise NotImplementedError
