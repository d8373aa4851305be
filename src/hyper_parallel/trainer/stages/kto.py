"""KTO: learning from single answers that are labelled good or bad, instead of from pairs.

Source: KTO, Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8.

r is the log-probability of an answer minus its reference log-probability. z is the divergence of the model from the
reference on answers to other prompts. The losses are

  desirable      w_desirable   (1 - sigmoid(beta (r - z)))
  undesirable    w_undesirable (1 - sigmoid(beta (z - r)))

Rows come in pairs: a prompt with its answer, and the same prompt with the answer of the previous record. z is the mean
of r over the second rows of the whole step, over all ranks and microbatches. It is at least 0 and has no gradient. It
is computed before the first backward pass by one forward pass over the second rows; only the first rows are trained on.
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
from hyper_parallel.trainer.stages.sampling import all_reduce_sum


@dataclass
class KtoStage(LearningStage):
    """KTO learning stage: raises the likelihood of good answers relative to the reference, and lowers that of bad ones.

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
        """Return each pair's first row with `reference`, label `desirable`, and the step's z as `divergence`."""
        all_rows = self._batches.step_batch(step - 1)
        sequences = self._batches.sequences
        return self._microbatch_inputs(microbatches, rows, all_rows, sequences, self.reference)

    def held_out(self, microbatches: Microbatches, rows: Rows, batches: Any) -> StageInputs:
        """Return the inputs of `inputs` for held-out rows, with z of the held-out answers."""
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
        """Return microbatches of this rank's `rows`, and the number of trained tokens in `all_rows` of all ranks."""
        self._sums.clear()
        device = reference.device
        size, parts = len(microbatches[0]["input_ids"]), []
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for number, part in enumerate(microbatches):
            part_rows = rows[number * size : (number + 1) * size]
            second_rows = {name: value[1::2].contiguous() for name, value in part.items()}
            total += (reference.current_logprobs(second_rows) - reference.of(part_rows[1::2])).sum()
            first_rows = {name: value[0::2].contiguous() for name, value in part.items()}
            first_rows["reference"] = reference.of(part_rows[0::2])
            first_rows["desirable"] = torch.from_numpy(sequences.desirable(part_rows[0::2])).to(
                device
            )
            parts.append(first_rows)
        trained_rows = all_rows[0::2]
        self._answers = int((trained_rows >= 0).sum())
        self._divergence = max(float(self.reference.sum_over_ranks(total)[0]) / self._answers, 0.0)
        divergence = torch.tensor(self._divergence, dtype=torch.float64, device=device)
        return [{**part, "divergence": divergence} for part in parts], sequences.num_valid(
            trained_rows
        )

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of the answers of a microbatch, divided by the answers of the step."""
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
        """Return z as `kl`, and the mean scores of good and bad answers if the step has any, under `preference`."""
        zeros = torch.zeros(4, dtype=torch.float64, device=self.reference.device)
        chosen, rejected, good, bad = all_reduce_sum(torch.stack([zeros, *self._sums]).sum(0))
        record = {"kl": self._divergence}
        record |= {"chosen": chosen / good} if good else {}
        record |= {"rejected": rejected / bad} if bad else {}
        if good and bad:
            record["margin"] = record["chosen"] - record["rejected"]
        return {"preference": record}
