"""Pairs of answers in a step or an evaluation: the mean of their losses, and what is recorded of their scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.ir import Plan
from hyper_parallel.trainer.stages.sampling import added

_ROUNDINGS: Final = 4
"""Units in the last place by which a sum of some hundred numbers is off at most, of those seen in runs with float32."""


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

    def mean(
        self,
        losses: Tensor,
        chosen: Tensor,
        rejected: Tensor,
        real: Tensor,
        rounding: Tensor,
    ) -> Tensor:
        """Return the part of this microbatch in the mean loss of all pairs, and keep its scores for the record.

        Args:
            losses: [N] losses of its pairs.
            chosen: [N] scores of the chosen answers.
            rejected: [N] scores of the rejected answers.
            real: [N] whether a pair is one of the data.
            rounding: [N] difference of the two scores that rounding alone may cause.
        """
        order = order_of(chosen, rejected, rounding)
        facts = [chosen, rejected, order, torch.ones_like(chosen)]
        own = [torch.where(real, fact.detach().double(), 0.0).sum() for fact in facts]
        self._seen.append(torch.stack(own))
        return torch.where(real, losses, 0.0).sum() / self.pairs

    def record(self) -> dict[str, Any]:
        """Return mean scores of chosen and rejected answers and the share of pairs in the right order, of all ranks.

        A pair whose scores differ by rounding only counts one half: neither answer is preferred.
        """
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


def order_of(chosen: Tensor, rejected: Tensor, rounding: Tensor) -> Tensor:
    """Return [N] 1 where the chosen answer has the higher score, 0 where it has the lower, 1/2 where they are equal."""
    margin = (chosen - rejected).detach()
    return torch.where(margin.abs() <= rounding, 0.5, (margin > 0).to(margin.dtype))


def rounding_of(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N] difference of the two scores of a pair that rounding alone may cause.

    A score is a sum over the tokens of an answer, less another such sum. Its rounding error is a few units in the last
    place of the sums, whatever remains of them. So a model that is still its own reference has scores of about 1e-7 of
    random sign, which are no preference.

    Args:
        magnitudes: [2N] magnitudes of the sums, of the chosen and the rejected answer of each pair.
        dtype: Format of the numbers that are summed.
    """
    sums = (magnitudes[0::2] + magnitudes[1::2]).detach()
    return _ROUNDINGS * torch.finfo(dtype).eps * sums
