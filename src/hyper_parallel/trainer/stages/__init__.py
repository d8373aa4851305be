"""Learning stages with an objective beyond cross entropy of given tokens: preference stages and GRPO."""

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
"""Inputs of the objective, and the tokens it counts in the whole step; None: the count of the data."""


class LearningStage:
    """Inputs and objective of a training step; every rank calls the same methods in the same order.

    Attributes:
        inputs_span: Name and category of `inputs` in timelines.
    """

    inputs_span: ClassVar[tuple[str, str]] = ("data", "data")

    def begin(self, batches: Any) -> None:
        """Prepare before the first step of the process, with the current weights."""

    def inputs(self, microbatches: Microbatches, rows: Rows, step: int) -> StageInputs:
        """Return the inputs of the objective of this rank's rows in optimizer step `step`, from 1."""
        raise NotImplementedError

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return `inputs` of held-out rows; all rows are the first step of `batches`."""
        raise NotImplementedError

    def objective(self, first: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a microbatch from [B, S] log-probabilities of its targets, or scores of its tokens."""
        raise NotImplementedError

    def rejects(self) -> bool | None:
        """Return whether to skip the step, after the objective of all its microbatches; None: steps are never skipped.

        Equal on all ranks.
        """
        return None

    def end(self) -> None:
        """Release resources after the last step of the process."""

    def record(self) -> dict[str, Any]:
        """Return the measurements of the step, by fields of its `StepResult`; equal on all ranks."""
        raise NotImplementedError
