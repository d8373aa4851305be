"""Base class of learning stages whose rows come in pairs of answers to one prompt.

A pair takes two consecutive rows of a batch. Except in KTO, the first answer is the chosen one and the second the
rejected one. The score of an answer is defined by each stage.
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
"""Assumed maximum rounding error of a sum over the tokens of an answer, in units in the last place."""


@dataclass
class PairStage(LearningStage):
    """Base class of learning stages on pairs of answers.

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
        work = self.plan.workload
        self.pairs = (work.tokens_per_step or 0) // work.seq_len / 2

    def inputs(self, microbatches: Microbatches, rows: Rows, batches: Any, step: int | None) -> StageInputs:
        """Return the microbatches with `row_values` added, and None as number of trained tokens; see `StageInputs`."""
        self._sums.clear()
        self.pairs = float((batches.step_batch((step or 1) - 1) >= 0).sum()) / 2
        values = self.row_values(rows, batches.sequences, held_out=step is None)
        size = len(microbatches[0]["input_ids"])
        split = {name: value.to(self.device).split(size) for name, value in values.items()}
        return [
            {**part, **{name: parts[number] for name, parts in split.items()}}
            for number, part in enumerate(microbatches)
        ], None

    def row_values(self, rows: Rows, sequences: Any, *, held_out: bool) -> dict[str, Tensor]:
        """Return further inputs of the loss as a dict from name to [len(rows)] tensor.

        `rows` are indices into `sequences`, which are the held-out data or the training data.
        """
        raise NotImplementedError

    def mean_loss(self, losses: Tensor, scores: Tensor, real: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
        """Add a microbatch of N pairs to the statistics; return its summed loss divided by the pairs of the step.

        The score of DPO is a difference of two sums over the tokens of an answer, with a rounding error proportional to
        these sums, not to the score. Pairs whose scores differ by no more than this error count as half correct.

        Args:
            losses: [N] losses of the pairs.
            scores: [2N] scores, alternately of chosen and rejected answers.
            real: [N] mask of pairs that are not padding.
            magnitudes: [2N] magnitudes of the numbers from which the scores were computed.
            dtype: Dtype in which the sums were computed.
        """
        chosen, rejected = scores[0::2].detach(), scores[1::2].detach()
        sums = (magnitudes[0::2] + magnitudes[1::2]).detach()
        margin, rounding = chosen - rejected, _MAX_ERROR_ULPS * torch.finfo(dtype).eps * sums
        right = torch.where(margin.abs() <= rounding, 0.5, (margin > 0).to(margin.dtype))
        facts = [chosen, rejected, right, torch.ones_like(chosen)]
        self._sums.append(torch.stack([torch.where(real, fact.double(), 0.0).sum() for fact in facts]))
        return torch.where(real, losses, 0.0).sum() / self.pairs

    def totals(self) -> list[float]:
        """Return the sums over all ranks of the four statistics that `objective` has collected since `inputs`."""
        zeros = torch.zeros(4, dtype=torch.float64, device=self.device)
        return all_reduce_sum(torch.stack([zeros, *self._sums]).sum(0))

    def record(self) -> dict[str, Any]:
        """Return {"preference": {`chosen`, `rejected`, `margin`, `accuracy`}}, means over the pairs of all ranks.

        Accuracy is the fraction of pairs whose chosen score is higher. A pair whose scores differ only by rounding
        counts as one half.
        """
        chosen, rejected, right, count = self.totals()
        return {
            "preference": {
                "chosen": chosen / count,
                "rejected": rejected / count,
                "margin": (chosen - rejected) / count,
                "accuracy": right / count,
            }
        }
