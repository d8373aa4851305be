"""Pairs of answers in a step or an evaluation: the mean of their losses, and what is recorded of their scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.ir import Plan
from hyper_parallel.trainer.stages._sampling import added


@dataclass
class PairScores:
    """Sums over the microbatches, on every rank.

    Attributes:
        plan: The plan of the run.
        device: Of the model.
        pairs: How many there are over all ranks.
    """

    plan: Plan
    device: torch.device
    pairs: float = field(init=False)
    _seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, held_out: Any = None) -> None:
        """A step begins, or an evaluation of the first step of `held_out`, whose dummy rows are no pairs."""
        self._seen.clear()
        work = self.plan.workload
        rows = (work.tokens_per_step or 0) // work.seq_len
        self.pairs = (rows if held_out is None else (held_out.step_batch(0) >= 0).sum()) / 2

    def mean(self, losses: Tensor, chosen: Tensor, rejected: Tensor, real: Tensor) -> Tensor:
        """What this microbatch adds to the mean loss of all pairs.

        Args:
            losses: [N] of its pairs.
            chosen: [N] scores of the chosen answers, of which it takes note.
            rejected: [N] scores of the rejected answers.
            real: [N] whether a pair is one of the data.
        """
        facts = [chosen, rejected, chosen > rejected, torch.ones_like(chosen)]
        own = [torch.where(real, fact.detach().double(), 0.0).sum() for fact in facts]
        self._seen.append(torch.stack(own))
        return torch.where(real, losses, 0.0).sum() / self.pairs

    def record(self) -> dict[str, Any]:
        """Mean scores of chosen and rejected answers, and the share of pairs in the right order; of all ranks."""
        none = torch.zeros(4, dtype=torch.float64, device=self.device)
        chosen, rejected, right, count = added(torch.stack([none, *self._seen]).sum(0))
        return {
            "preference": {
                "chosen": chosen / count,
                "rejected": rejected / count,
                "margin": (chosen - rejected) / count,
                "accuracy": right / count,
            }
        }
