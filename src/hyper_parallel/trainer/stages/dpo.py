"""Learning from pairs of answers to one prompt: the chosen one is to become likelier than the rejected one.

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290 (sigmoid; label smoothing as in its robust form, Mitchell 2023);
SLiC hinge, Zhao et al. 2023, arXiv:2305.10425; IPO, Azar et al. 2023, arXiv:2310.12036; ORPO, Hong et al. 2024,
arXiv:2403.07691; SimPO, Meng et al. 2024, arXiv:2405.14734.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.config import Dpo
from hyper_parallel.trainer.data.batches import IGNORE_INDEX
from hyper_parallel.trainer.stages.pair_scores import PairScores, rounding_of
from hyper_parallel.trainer.stages.reference import Reference

WITHOUT_REFERENCE: Final = ("orpo", "simpo")
"""Losses that need none."""


@dataclass
class DpoStage:
    """Compares the two answers of every pair.

    Attributes:
        settings: Section `dpo` of the recipe.
        scores: Of the pairs.
        reference: Of all answers; None for losses without one.
    """

    settings: Dpo
    scores: PairScores
    reference: Reference | None = None

    def begin(self, batches: Any) -> None:
        """As `Reference.begin`."""
        if self.reference is not None:
            self.reference.begin(batches.sequences)

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Add the reference of every answer."""
        self.scores.begin()
        return self._referred(microbatches, rows, self.reference), None

    def held_out(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], batches: Any
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """As `inputs`, with the reference of the held-out answers."""
        self.scores.begin(batches)
        held = None if self.reference is None else self.reference.held_out(batches.sequences)
        return self._referred(microbatches, rows, held), None

    @staticmethod
    def _referred(
        microbatches: list[dict[str, Tensor]],
        rows: NDArray[np.int64],
        reference: Reference | None,
    ) -> list[dict[str, Tensor]]:
        size, parts = len(microbatches[0]["input_ids"]), []
        for number, part in enumerate(microbatches):
            at = rows[number * size : (number + 1) * size]
            given = {} if reference is None else {"reference": reference.of(at)}
            parts.append({**part, **given})
        return parts

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of the pairs of a microbatch, divided by the pairs of the step."""
        settings, beta = self.settings, self.settings.beta
        lengths = (batch["shift_labels"] != IGNORE_INDEX).sum(-1)
        real, lengths = lengths[0::2] > 0, lengths.clamp(min=1)
        sums, mean = logprobs.sum(-1), logprobs.sum(-1) / lengths
        scores, magnitudes = (sums - batch.get("reference", 0.0)) * beta, sums.abs() * beta
        if settings.loss_type == "ipo":
            scores, magnitudes = (sums - batch["reference"]) / lengths, mean.abs()
        elif settings.loss_type == "simpo":
            scores, magnitudes = beta * mean, beta * mean.abs()
        elif settings.loss_type == "orpo":
            scores = mean - torch.log1p(-mean.exp())
            magnitudes = scores.abs()
        chosen, rejected = scores[0::2], scores[1::2]
        margin = chosen - rejected
        if settings.loss_type == "sigmoid":
            smooth = settings.label_smoothing
            losses = -F.logsigmoid(margin) * (1 - smooth) - F.logsigmoid(-margin) * smooth
        elif settings.loss_type == "hinge":
            losses = torch.relu(1 - margin)
        elif settings.loss_type == "ipo":
            losses = (margin - 1 / (2 * beta)) ** 2
        elif settings.loss_type == "simpo":
            losses = -F.logsigmoid(margin - settings.simpo_gamma)
        else:
            losses = -mean[0::2] - beta * F.logsigmoid(margin)
        rounding = rounding_of(magnitudes, logprobs.dtype)
        return self.scores.mean(losses, chosen, rejected, real, rounding)

    def rejects(self) -> None:
        """No step is left out."""

    def end(self) -> None:
        """Nothing is left to do."""

    def record(self) -> dict[str, Any]:
        """Mean scores of chosen and rejected answers, and the share of pairs in the right order."""
        return self.scores.record()
