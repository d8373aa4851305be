"""Training of a reward model that scores the chosen answer of a pair higher than the rejected one.

Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1 (Bradley-Terry model). Scores are centred as by
Eisenstein et al. 2023, arXiv:2312.09244, and TRL's `center_rewards_coefficient`. A pair may have a target margin
between its scores: Touvron et al. 2023, arXiv:2307.09288, equation 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.config import Rm
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.stages import Rows
from hyper_parallel.trainer.stages.pair_stage import PairStage


@dataclass
class RewardModelStage(PairStage):
    """Learning stage of a reward model: compares the scores of the two answers of every pair.

    The score of an answer is the model's output at the single target of its row, the last token before the padding.

    Attributes:
        settings: Section `rm` of the recipe.
    """

    settings: Rm

    def row_values(self, rows: Rows, sequences: Any, *, held_out: bool) -> dict[str, Tensor]:
        """Return {"margin": [len(rows)] target margin of each row's pair}, or {} if the data has no margins."""
        return {"margin": torch.from_numpy(sequences.margins(rows))} if sequences.has_margins else {}

    def objective(self, scores: Tensor, /, batch: Mapping[str, Any]) -> Tensor:
        """Return the summed loss of a microbatch's pairs divided by the number of pairs in the step.

        [B, S] `scores` are model outputs; an answer's reward is the output at its only target position.
        """
        read = batch["shift_labels"] != IGNORE_INDEX
        rewards = torch.where(read, scores, 0.0).sum(-1)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margin = batch["margin"][0::2].to(rewards.dtype) if "margin" in batch else 0.0
        losses = -F.logsigmoid(chosen - rejected - margin)
        if self.settings.center_rewards_coefficient is not None:
            centred = (chosen + rejected) ** 2
            losses = losses + self.settings.center_rewards_coefficient * centred
        real = read.any(-1)[0::2]
        return self.mean_loss(losses, rewards, real, rewards.abs(), scores.dtype)
