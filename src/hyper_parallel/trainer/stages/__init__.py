"""Learning stages with an objective other than next-token cross entropy: DPO and variants, KTO, reward models, GRPO.

A learning stage (`stage` in the recipe) supplies the inputs and the loss of every optimizer step; the step loop runs
the forward and backward passes. A row is one sequence of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Microbatches = list[dict[str, Tensor]]
"""Microbatches of this rank: each has `input_ids` and `shift_labels` [B, S], and further inputs of the loss."""
Rows = NDArray[np.int64]
"""Index in the training data of each row of a step; -1 marks a padding row."""
StageInputs = tuple[Microbatches, int | None]
"""Inputs of the loss, and the number of trained tokens of the step over all ranks.

If the number is None, the number of labels with loss in the data is used.
"""


class LearningStage:
    """Interface of a learning stage: inputs and loss of every optimizer step.

    All training ranks call the methods in the same order.

    Attributes:
        inputs_span: (name, category) of the timeline span of `inputs`.
    """

    inputs_span: ClassVar[tuple[str, str]] = ("data", "data")

    def begin(self, batches: Any) -> None:
        """Prepare for training on `batches`; called once per process that trains, after the weights are loaded."""

    def inputs(self, microbatches: Microbatches, rows: Rows, batches: Any, step: int | None) -> StageInputs:
        """Return the inputs of `objective` for a step or an evaluation.

        Args:
            microbatches: Microbatches of this rank.
            rows: Rows of the microbatches.
            batches: Data of the rows.
            step: Optimizer step, counted from 1. None: an evaluation; `batches` then has all held-out rows in one step.
        """
        raise NotImplementedError

    def objective(self, first: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """Return the scalar loss of a microbatch.

        Args:
            first: [B, S] log-probabilities of the target tokens or, from a reward model, [B, S] scores.
            batch: Microbatch as returned by `inputs`.
        """
        raise NotImplementedError

    def rejects(self) -> bool | None:
        """Return whether to skip the optimizer update, equal on all ranks; None if the stage never skips updates.

        The step loop calls this after the backward passes of all microbatches.
        """
        return None

    def end(self) -> None:
        """Release resources after the last step of the process."""

    def record(self) -> dict[str, Any]:
        """Return the metrics of the step as a dict from `StepResult` field to value; equal on all ranks."""
        raise NotImplementedError
