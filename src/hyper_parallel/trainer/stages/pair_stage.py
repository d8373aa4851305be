"""Base class and score statistics of learning stages that train on pairs of a chosen and a rejected answer.

A pair takes two consecutive rows of a batch, first the chosen answer. The score of an answer is defined by each stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.ir import Plan
from hyper_parallel.trainer.stages import LearningStage, Microbatches, Rows, StageInputs
from hyper_parallel.trainer.stages.sampling import all_reduce_sum

_MAX_ERROR_ULPS: Final = 4
"""Maximum rounding error of a sum of some hundred numbers in float32 runs, in units in the last place."""


@dataclass
class PairScores:
    """Mean loss and score statistics of pairs, accumulated over the microbatches of a step or evaluation.

    Attributes:
        plan: Parallel layout and batch sizes of the run.
        device: Device of the model.
        pairs: Number of pairs of the step or evaluation over all ranks.
    """

    plan: Plan
    device: torch.device
    pairs: float = field(init=False)
    _sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, held_out: Any = None) -> None:
        """Reset for a training step or, with `held_out` batches, for an evaluation; padding rows are not counted."""
        self._sums.clear()
        work = self.plan.workload
        rows = (work.tokens_per_step or 0) // work.seq_len
        self.pairs = (rows if held_out is None else (held_out.step_batch(0) >= 0).sum()) / 2

    def mean(
        self, losses: Tensor, chosen: Tensor, rejected: Tensor, real: Tensor, rounding: Tensor
    ) -> Tensor:
        """Add the scores of a microbatch to the statistics; return its summed loss divided by the pairs of the step.

        Args:
            losses: [N] losses of the microbatch's pairs.
            chosen: [N] scores of the chosen answers.
            rejected: [N] scores of the rejected answers.
            real: [N] mask of pairs that are not padding.
            rounding: [N] score differences that rounding alone can cause; see `rounding_of`.
        """
        order = order_of(chosen, rejected, rounding)
        facts = [chosen, rejected, order, torch.ones_like(chosen)]
        sums = [torch.where(real, fact.detach().double(), 0.0).sum() for fact in facts]
        self._sums.append(torch.stack(sums))
        return torch.where(real, losses, 0.0).sum() / self.pairs

    def record(self) -> dict[str, Any]:
        """Return {"preference": {`chosen`, `rejected`, `margin`, `accuracy`}}, means over the pairs of all ranks.

        Accuracy is the fraction of pairs whose chosen score is higher. A pair whose scores differ only by rounding
        counts as one half.
        """
        zeros = torch.zeros(4, dtype=torch.float64, device=self.device)
        chosen, rejected, right, count = all_reduce_sum(torch.stack([zeros, *self._sums]).sum(0))
        return {
            "preference": {
                "chosen": chosen / count,
                "rejected": rejected / count,
                "margin": (chosen - rejected) / count,
                "accuracy": right / count,
            }
        }


class PairStage(LearningStage):
    """Base class of learning stages that compare the two answers of every pair.

    Attributes:
        scores: Mean loss and score statistics of the pairs.
    """

    scores: PairScores

    def inputs(self, microbatches: Microbatches, rows: Rows, step: int) -> StageInputs:
        """Return the microbatches with `row_values` added; the token count is None, which selects the data's count."""
        self.scores.begin()
        return self._with_row_values(microbatches, rows, None), None

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return the same inputs as `inputs`, for held-out rows."""
        self.scores.begin(batches)
        return self._with_row_values(microbatches, rows, batches.sequences), None

    def _with_row_values(
        self, microbatches: Microbatches, rows: Rows, held_out: Any
    ) -> Microbatches:
        values = self.row_values(rows, held_out)
        size = len(microbatches[0]["input_ids"])
        device = microbatches[0]["input_ids"].device
        split = {name: value.to(device).split(size) for name, value in values.items()}
        return [
            {**part, **{name: parts[number] for name, parts in split.items()}}
            for number, part in enumerate(microbatches)
        ]

    def row_values(self, rows: Rows, held_out: Any) -> dict[str, Tensor]:
        """Return further inputs of the loss as a dict from name to [len(rows)] tensor.

        `rows` are indices into the data `held_out` or, if it is None, into the training data.
        """
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Return the score statistics of the step; see `PairScores.record`."""
        return self.scores.record()


def order_of(chosen: Tensor, rejected: Tensor, rounding: Tensor) -> Tensor:
    """Return [N] values of pairs: 1 if the chosen score is higher, 0 if lower, 1/2 if equal within `rounding`."""
    margin = (chosen - rejected).detach()
    return torch.where(margin.abs() <= rounding, 0.5, (margin > 0).to(margin.dtype))


def rounding_of(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, per pair [N], the largest score difference that floating-point rounding alone can cause.

    A score is a difference of two sums over the tokens of an answer. Its rounding error is proportional to these sums,
    not to the score. For example, a model equal to its reference model has scores of about 1e-7 with random sign.

    Args:
        magnitudes: [2N] magnitudes of the sums, alternately of chosen and rejected answers.
        dtype: Dtype in which the sums were computed.
    """
    sums = (magnitudes[0::2] + magnitudes[1::2]).detach()
    return _MAX_ERROR_ULPS * torch.finfo(dtype).eps * sums
