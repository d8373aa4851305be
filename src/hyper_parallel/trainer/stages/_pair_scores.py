"""Scores of pairs of answers in a step: what is recorded of them, on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyper_parallel.ir import Plan
from hyper_parallel.trainer.stages._sampling import added


def pairs_of_step(plan: Plan) -> float:
    """Pairs of rows in a step, over all ranks."""
    work = plan.workload
    return (work.tokens_per_step or 0) // work.seq_len / 2


@dataclass
class PairScores:
    """Sums over the microbatches of a step.

    Attributes:
        device: Of the model.
    """

    device: torch.device
    _seen: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """A step begins."""
        self._seen.clear()

    def add(self, chosen: Tensor, rejected: Tensor) -> None:
        """Take note of [N] scores of the chosen and of the rejected answers of N pairs."""
        right = (chosen > rejected).sum()
        facts = [chosen.sum(), rejected.sum(), right, right.new_tensor(len(chosen))]
        self._seen.append(torch.stack([fact.detach().double() for fact in facts]))

    def record(self) -> dict[str, float]:
        """Mean scores of both, and the share of pairs in the right order; of all ranks."""
        none = torch.zeros(4, dtype=torch.float64, device=self.device)
        chosen, rejected, right, count = added(torch.stack([none, *self._seen]).sum(0))
        return {
            "chosen": chosen / count,
            "rejected": rejected / count,
            "margin": (chosen - rejected) / count,
            "accuracy": right / count,
        }
