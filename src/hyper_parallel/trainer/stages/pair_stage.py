"""Base class of learning stages that train on pairs of a chosen and a rejected answer.

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
class PairStage(LearningStage):
    """Base class of learning stages that compare the two answers of every pair.

    Attributes:
        plan: Parallel layout and batch sizes of the run.
        device: Device of the model.
        pairs: Number of pairs of the step or evaluation over all ranks, without padding.
    """

    plan: Plan
    device: torch.device
    pairs: float = field(init=False)
    _sums: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._reset(None)

    def _reset(self, held_out: Any) -> None:
        """Reset the statistics for a training step or, with `held_out` batches, for an evaluation."""
        self._sums.clear()
        work = self.plan.workload
        rows = (work.tokens_per_step or 0) // work.seq_len
        self.pairs = (rows if held_out is None else (held_out.step_batch(0) >= 0).sum()) / 2

    def inputs(self, microbatches: Microbatches, rows: Rows, step: int) -> StageInputs:
        """Return the microbatches with `row_values` added; the token count is None, which selects the data's count."""
        self._reset(None)
        return self._with_row_values(microbatches, rows, None), None

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return the same inputs as `inputs`, for held-out rows."""
        self._reset(batches)
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

    def mean_loss(
        self, losses: Tensor, scores: Tensor, real: Tensor, magnitudes: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Add a microbatch of N pairs to the statistics; return its summed loss divided by the pairs of the step.

        A score is a difference of two sums over the tokens of an answer. Its rounding error is proportional to these
        sums, not to the score. For example, a model equal to its reference model has scores of about 1e-7 with random
        sign. Pairs whose scores differ by no more than this error count as half correct.

        Args:
            losses: [N] losses of the pairs.
            scores: [2N] scores, alternately of chosen and rejected answers.
            real: [N] mask of pairs that are not padding.
            magnitudes: [2N] magnitudes of the sums.
            dtype: Dtype in which the sums were computed.
        """
        chosen, rejected = scores[0::2].detach(), scores[1::2].detach()
        sums = (magnitudes[0::2] + magnitudes[1::2]).detach()
        margin, rounding = chosen - rejected, _MAX_ERROR_ULPS * torch.finfo(dtype).eps * sums
        right = torch.where(margin.abs() <= rounding, 0.5, (margin > 0).to(margin.dtype))
        facts = [chosen, rejected, right, torch.ones_like(chosen)]
        self._sums.append(
            torch.stack([torch.where(real, fact.double(), 0.0).sum() for fact in facts])
        )
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
