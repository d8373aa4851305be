"""TRL's ORPO with the cross entropy of this project and LlamaFactory, for rows that compare all the rest of it."""

from __future__ import annotations

from typing import Any

from trl.experimental.orpo import ORPOConfig, ORPOTrainer


class OrpoOfAnswersConfig(ORPOConfig):
    """TRL's own."""


class OrpoOfAnswersTrainer(ORPOTrainer):
    """ORPO whose cross entropy is the mean over answers of the mean over their tokens, without the prompt's."""

    def concatenated_forward(self, model: Any, batch: Any) -> tuple[Any, ...]:
        """Replace the cross entropy in what the model gave."""
        chosen, *rest = super().concatenated_forward(model, batch)
        rest[3] = -chosen.mean()
        return chosen, *rest
