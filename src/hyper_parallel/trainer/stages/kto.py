"""KTO (Kahneman-Tversky optimization): learning from single answers that are labelled desirable or undesirable.

Source: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8.

r is the log-probability of an answer minus its log-probability under the reference model. z estimates the KL
divergence of the model from the reference model, on mismatched answers. The losses are

  desirable      w_desirable   (1 - sigmoid(beta (r - z)))
  undesirable    w_undesirable (1 - sigmoid(beta (z - r)))

beta and the weights w are keys of section `kto` of the recipe.

Rows come in pairs: a prompt with its own answer, and the same prompt with the answer of the previous record (the
mismatched answer). z is the mean of r over all mismatched rows of the step, clamped to at least 0, without gradient.
Forward passes over these rows compute z before the first backward pass. Only the first row of a pair is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyper_parallel.config import Kto
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.stages import LearningStage, Microbatches, Rows, StageInputs
from hyper_parallel.trainer.stages.reference import Reference
from hyper_parallel.trainer.stages.sampling import all_reduce_sum, sum_over_data_ranks


@dataclass
class KtoStage(LearningStage):
    """KTO learning stage: raises the likelihood of desirable answers and lowers that of undesirable answers.

    Attributes:
        settings: Section `kto` of the recipe.
        reference: Log-probabilities of all answers under the reference model.
    """

    inputs_span: ClassVar = ("divergence", "compute")

    settings: Kto
    reference: Reference
    _batches: Any = None
    _answers: int = 1
    _divergence: float = 0.0
    _sums: list[Tensor] = field(default_factory=list)

    def begin(self, batches: Any) -> None:
        """Compute or load the reference log-probabilities; see `Reference.begin`."""
        self._batches = batches
        self.reference.begin(batches.sequences)

    def inputs(self, microbatches: Microbatches, rows: Rows, step: int) -> StageInputs:
        """Return the first row of each pair, and the step's number of trained tokens.

        Each microbatch also has `reference` [B], the log-probabilities under the reference model, `desirable` [B], the
        boolean labels, and `divergence`, the scalar z of the step.
        """
        all_rows = self._batches.step_batch(step - 1)
        sequences = self._batches.sequences
        return self._microbatch_inputs(microbatches, rows, all_rows, sequences, self.reference)

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return the same inputs as `inputs`, for held-out rows; z is the mean over their mismatched answers."""
        all_rows, sequences = batches.step_batch(0), batches.sequences
        reference = self.reference.held_out(sequences)
        return self._microbatch_inputs(microbatches, rows, all_rows, sequences, reference)

    def _microbatch_inputs(
        self,
        microbatches: Microbatches,
        rows: Rows,
        all_rows: Rows,
        sequences: Any,
        reference: Reference,
    ) -> StageInputs:
        """Return the inputs for this rank's `rows`, and the number of trained tokens in `all_rows` of all ranks."""
        self._sums.clear()
        device = reference.device
        size, parts = len(microbatches[0]["input_ids"]), []
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for number, part in enumerate(microbatches):
            part_rows = rows[number * size : (number + 1) * size]
            second_rows = {name: value[1::2].contiguous() for name, value in part.items()}
            total += (
                reference.current_logprobs(second_rows)
                - reference.reference_logprobs(part_rows[1::2])
            ).sum()
            first_rows = {name: value[0::2].contiguous() for name, value in part.items()}
            first_rows["reference"] = reference.reference_logprobs(part_rows[0::2])
            first_rows["desirable"] = torch.from_numpy(sequences.desirable(part_rows[0::2])).to(
                device
            )
            parts.append(first_rows)
        trained_rows = all_rows[0::2]
        self._answers = int((trained_rows >= 0).sum())
        (ratios,) = sum_over_data_ranks(total, reference.plan.strategy)
        self._divergence = max(ratios / self._answers, 0.0)
        divergence = torch.tensor(self._divergence, dtype=torch.float64, device=device)
        return [{**part, "divergence": divergence} for part in parts], sequences.num_valid(
            trained_rows
        )

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the summed loss of a microbatch's answers divided by the number of answers in the step."""
        settings, good = self.settings, batch["desirable"]
        real = (batch["shift_labels"] != IGNORE_INDEX).any(-1)
        ratio = logprobs.sum(-1) - batch["reference"]
        gain = torch.where(good, ratio - batch["divergence"], batch["divergence"] - ratio)
        losses = 1 - torch.sigmoid(settings.beta * gain)
        weighted = torch.where(
            good, settings.desirable_weight * losses, settings.undesirable_weight * losses
        )
        score = (settings.beta * ratio).detach().double()
        good, bad = good & real, ~good & real
        facts = [score[good].sum(), score[bad].sum(), good.sum(), bad.sum()]
        self._sums.append(torch.stack([fact.double() for fact in facts]))
        return torch.where(real, weighted, 0.0).sum() / self._answers

    def record(self) -> dict[str, Any]:
        """Return the metrics of the step as {"preference": {`kl`, `chosen`, `rejected`, `margin`}}.

        `kl` is z. `chosen` and `rejected` are the mean scores, beta r, of desirable and undesirable answers, and
        `margin` is their difference. A key is absent if the step has no answers to compute it from.
        """
        zeros = torch.zeros(4, dtype=torch.float64, device=self.reference.device)
        chosen, rejected, good, bad = all_reduce_sum(torch.stack([zeros, *self._sums]).sum(0))
        record = {"kl": self._divergence}
        record |= {"chosen": chosen / good} if good else {}
        record |= {"rejected": rejected / bad} if bad else {}
        if good and bad:
            record["margin"] = record["chosen"] - record["rejected"]
        return {"preference": record}
