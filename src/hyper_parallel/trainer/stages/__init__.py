"""Learning stages with an objective beyond cross entropy of given tokens: preference stages and GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class LearningStage(Protocol):
    """Inputs and objective of a training step; every rank calls the same methods in the same order.

    Attributes:
        inputs_span: Name and category of `inputs` in timelines.
    """

    inputs_span: ClassVar[tuple[str, str]]

    def begin(self, batches: Any) -> None:
        """Prepare before the first step of the process, with the current weights."""

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Return the inputs of the objective, and the tokens it counts in the whole step; None: the count of the data.

        Args:
            microbatches: `input_ids` and `shift_labels` [B, S] of this rank's rows.
            rows: Index of each row in the data.
            step: Optimizer step, from 1.
        """

    def held_out(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], batches: Any
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Return `inputs` of held-out rows; row -1 is padding, and all rows are the first step of `batches`."""

    def objective(self, first: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a microbatch from [B, S] log-probabilities of its targets, or scores of its tokens."""

    def rejects(self) -> bool | None:
        """Return whether to skip the step, after the objective of all its microbatches; None: steps are never skipped.

        Equal on all ranks.
        """

    def end(self) -> None:
        """Release resources after the last step of the process."""

    def record(self) -> dict[str, Any]:
        """Return the measurements of the step, by fields of its `StepResult`; equal on all ranks."""
