"""KTO (Kahneman-Tversky optimization): learning from single answers that are labelled desirable or undesirable.

Source: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8.

r is the log-probability of an answer minus its log-probability under the reference model. z estimates the KL
divergence of the model from the reference model, on mismatched answers. The losses are

  desirable      w_desirable   (1 - sigmoid(beta (r - z)))
  undesirable    w_undesirable (1 - sigmoid(beta (z - r)))

beta and the weights w are keys of section `kto` of the recipe.

Rows come in pairs: a prompt with its answer, and the same prompt with the answer of the previous record (the
mismatched answer). z is the mean of r over all mismatched rows of the step, clamped to at least 0, without gradient.
Forward passes over these rows compute z before the first backward pass. Only the first row of a pair is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyper_parallel.config import Kto
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.stages import Microbatches, Rows, StageInputs
from hyper_parallel.trainer.stages.pair_stage import PairStage
from hyper_parallel.trainer.stages.reference import Reference
from hyper_parallel.trainer.stages.sampling import sum_over_data_ranks


@dataclass
class KtoStage(PairStage):
    """KTO learning stage: raises the likelihood of desirable answers and lowers that of undesirable answers.

    Attributes:
        settings: Section `kto` of the recipe.
        reference: Log-probabilities of all answers under the reference model.
    """

    inputs_span: ClassVar = ("divergence", "compute")

    settings: Kto
    reference: Reference
    _divergence: float = 0.0

    def begin(self, batches: Any) -> None:
        """Compute or load the reference log-probabilities; see `Reference.begin`."""
        self.reference.begin(batches.sequences)

    def row_values(self, rows: Rows, sequences: Any, *, held_out: bool) -> dict[str, Tensor]:
        """Return `reference`, the log-probabilities under the reference model, and the boolean labels `desirable`."""
        reference = self.reference.held_out(sequences) if held_out else self.reference
        desirable = torch.from_numpy(sequences.desirable(rows))
        return {"reference": reference.reference_logprobs(rows), "desirable": desirable}

    def inputs(self, microbatches: Microbatches, rows: Rows, batches: Any, step: int | None) -> StageInputs:
        """Return microbatches with the first row of each pair, and the number of trained tokens on all ranks.

        Each microbatch of B pairs also has the [B] `row_values` of these rows, and `divergence`, the scalar z.
        """
        pairs, _ = super().inputs(microbatches, rows, batches, step)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for part, pair in zip(microbatches, pairs, strict=True):
            second_rows = {name: value[1::2].contiguous() for name, value in part.items()}
            ratios = self.reference.current_logprobs(second_rows) - pair["reference"][1::2]
            total += ratios.sum()
        (sum_of_ratios,) = sum_over_data_ranks(total, self.plan.strategy)
        self._divergence = max(sum_of_ratios / self.pairs, 0.0)
        divergence = torch.tensor(self._divergence, dtype=torch.float64, device=self.device)
        parts = [
            {name: value[0::2].contiguous() for name, value in pair.items()} | {"divergence": divergence}
            for pair in pairs
        ]
        trained_rows = batches.step_batch((step or 1) - 1)[0::2]
        return parts, batches.sequences.num_valid(trained_rows)

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the summed loss of a microbatch's answers divided by the number of answers in the step."""
        settings, good = self.settings, batch["desirable"]
        real = (batch["shift_labels"] != IGNORE_INDEX).any(-1)
        ratio = logprobs.sum(-1) - batch["reference"]
        gain = torch.where(good, ratio - batch["divergence"], batch["divergence"] - ratio)
        losses = 1 - torch.sigmoid(settings.beta * gain)
        weighted = torch.where(good, settings.desirable_weight * losses, settings.undesirable_weight * losses)
        score = (settings.beta * ratio).detach().double()
        good, bad = good & real, ~good & real
        facts = [score[good].sum(), score[bad].sum(), good.sum(), bad.sum()]
        self._sums.append(torch.stack([fact.double() for fact in facts]))
        return torch.where(real, weighted, 0.0).sum() / self.pairs

    def record(self) -> dict[str, Any]:
        """Return the metrics of the step as {"preference": {`kl`, `chosen`, `rejected`, `margin`}}.

        `kl` is z. `chosen` and `rejected` are the mean scores, beta r, of desirable and undesirable answers, and
        `margin` is their difference. A key is absent if the step has no answers to compute it from.
        """
        chosen, rejected, good, bad = self.totals()
        record = {"kl": self._divergence}
        record |= {"chosen": chosen / good} if good else {}
        record |= {"rejected": rejected / bad} if bad else {}
        if good and bad:
            record["margin"] = record["chosen"] - record["rejected"]
        return {"preference": record}
