"""DPO and related losses on pairs of answers: raise the likelihood of the chosen answer over the rejected one.

Sources: DPO (`sigmoid`), Rafailov et al. 2023, arXiv:2305.18290; label smoothing as in conservative DPO, Mitchell 2023;
SLiC hinge, Zhao et al. 2023, arXiv:2305.10425; IPO, Azar et al. 2023, arXiv:2310.12036; ORPO, Hong et al. 2024,
arXiv:2403.07691; SimPO, Meng et al. 2024, arXiv:2405.14734.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.config import Dpo
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.stages import Rows
from hyper_parallel.trainer.stages.pair_stage import PairStage
from hyper_parallel.trainer.stages.reference import Reference

WITHOUT_REFERENCE: Final = ("orpo", "simpo")
"""Values of `loss_type` that need no reference model."""


@dataclass
class DpoStage(PairStage):
    """Learning stage that compares the log-probabilities of the two answers of every pair (DPO and related losses).

    Attributes:
        settings: Section `dpo` of the recipe.
        reference: Log-probabilities of all answers under the reference model; None if the loss needs none.
    """

    settings: Dpo
    reference: Reference | None = None

    def begin(self, batches: Any) -> None:
        """Compute or load the reference log-probabilities, if the loss needs them; see `Reference.begin`."""
        if self.reference is not None:
            self.reference.begin(batches.sequences)

    def row_values(self, rows: Rows, sequences: Any, *, held_out: bool) -> dict[str, Tensor]:
        """Return {"reference": [len(rows)] reference log-probabilities of the answers}; {} if the loss needs none."""
        if self.reference is None:
            return {}
        reference = self.reference.held_out(sequences) if held_out else self.reference
        return {"reference": reference.reference_logprobs(rows)}

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the summed loss of a microbatch's pairs divided by the number of pairs in the step.

        Rows 2i and 2i + 1 of [B, S] `logprobs` are the chosen and the rejected answer of pair i.
        """
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
        margin = scores[0::2] - scores[1::2]
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
        return self.mean_loss(losses, scores, real, magnitudes, logprobs.dtype)
