"""Stages whose loss is more than the cross entropy of given tokens: pairs of answers, and the model's own answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class LearningStage(Protocol):
    """What a step learns from and by which objective; every rank calls the same methods in the same order."""

    def begin(self, batches: Any) -> None:
        """Prepare before the first step of the process, with the weights as they are."""

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Microbatches as the objective wants them, and the tokens of the whole step that it counts; None: the data's.

        Args:
            microbatches: `input_ids` and `shift_labels` [B, S] of this rank's rows.
            rows: Number of each of these rows in the data.
            step: Optimizer step, from 1.
        """

    def held_out(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], batches: Any
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """As `inputs`, of held-out rows, of which -1 is a dummy one; `batches` has all of them as its first step."""

    def objective(self, first: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a microbatch, from [B, S] log-probabilities of its targets, or scores of its tokens."""

    def rejects(self) -> bool | None:
        """Whether the step is left out, after the objective has seen all of it; None: none ever is. Equal on ranks."""

    def end(self) -> None:
        """The last step of the process is over."""

    def record(self) -> dict[str, Any]:
        """What the step was, by fields of its `StepResult`; equal on all ranks."""
