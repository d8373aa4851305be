"""Learning from answers that are each good or bad: no pairs are needed.

Source: KTO, Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8. With r the log-probability of an answer less
that of the reference, and z how far the model has moved from the reference on answers to other prompts,

    desirable      w_desirable   (1 - sigmoid(beta (r - z)))
    undesirable    w_undesirable (1 - sigmoid(beta (z - r)))

Rows lie in twos: a prompt with its answer, and the same prompt with the answer of the record before. z is the mean of r
over the second rows of the whole step, all ranks and microbatches, at least 0, and has no gradient. It is known before
the first backward pass: the second rows are read forward, once, and the first rows alone are learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.config import Kto
from hyper_parallel.trainer.data.batches import IGNORE_INDEX
from hyper_parallel.trainer.stages.reference import Reference
from hyper_parallel.trainer.stages.sampling import added


@dataclass
class KtoStage:
    """Makes good answers likelier than the reference does, and bad ones less likely.

    Attributes:
        settings: Section `kto` of the recipe.
        reference: Of all rows.
    """

    settings: Kto
    reference: Reference
    _batches: Any = None
    _answers: int = 1
    _moved: float = 0.0
    _seen: list[Tensor] = field(default_factory=list)

    def begin(self, batches: Any) -> None:
        """As `Reference.begin`."""
        self._batches = batches
        self.reference.begin(batches.sequences)

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """The first rows with their `reference`, whether they are `desirable`, and z of the step as `moved`."""
        everyone = self._batches.step_batch(step - 1)
        return self._taken(microbatches, rows, everyone, self._batches.sequences, self.reference)

    def held_out(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], batches: Any
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """As `inputs`, with z of the held-out answers."""
        held = self.reference.held_out(batches.sequences)
        return self._taken(microbatches, rows, batches.step_batch(0), batches.sequences, held)

    def _taken(
        self,
        microbatches: list[dict[str, Tensor]],
        rows: NDArray[np.int64],
        everyone: NDArray[np.int64],
        sequences: Any,
        reference: Reference,
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Of this rank's `rows` of all ranks' `everyone`."""
        self._seen.clear()
        device = reference.device
        size, parts = len(microbatches[0]["input_ids"]), []
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for number, part in enumerate(microbatches):
            at = rows[number * size : (number + 1) * size]
            others = {name: value[1::2].contiguous() for name, value in part.items()}
            total += (reference.now(others) - reference.of(at[1::2])).sum()
            given = {name: value[0::2].contiguous() for name, value in part.items()}
            given["reference"] = reference.of(at[0::2])
            given["desirable"] = torch.from_numpy(sequences.desirable(at[0::2])).to(device)
            parts.append(given)
        learned = everyone[0::2]
        self._answers = int((learned >= 0).sum())
        self._moved = max(float(self.reference.summed(total)[0]) / self._answers, 0.0)
        moved = torch.tensor(self._moved, dtype=torch.float64, device=device)
        return [{**part, "moved": moved} for part in parts], sequences.num_valid(learned)

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of the answers of a microbatch, divided by the answers of the step."""
        settings, good = self.settings, batch["desirable"]
        real = (batch["shift_labels"] != IGNORE_INDEX).any(-1)
        ratio = logprobs.sum(-1) - batch["reference"]
        gain = torch.where(good, ratio - batch["moved"], batch["moved"] - ratio)
        losses = 1 - torch.sigmoid(settings.beta * gain)
        weighted = torch.where(
            good, settings.desirable_weight * losses, settings.undesirable_weight * losses
        )
        score = (settings.beta * ratio).detach().double()
        good, bad = good & real, ~good & real
        facts = [score[good].sum(), score[bad].sum(), good.sum(), bad.sum()]
        self._seen.append(torch.stack([fact.double() for fact in facts]))
        return torch.where(real, weighted, 0.0).sum() / self._answers

    def rejects(self) -> None:
        """No step is left out."""

    def end(self) -> None:
        """Nothing is left to do."""

    def record(self) -> dict[str, Any]:
        """z, and mean scores of the good and the bad answers, where the step has any."""
        none = torch.zeros(4, dtype=torch.float64, device=self.reference.device)
        chosen, rejected, good, bad = added(torch.stack([none, *self._seen]).sum(0))
        found = {"kl": self._moved}
        found |= {"chosen": chosen / good} if good else {}
        found |= {"rejected": rejected / bad} if bad else {}
        if good and bad:
            found["margin"] = found["chosen"] - found["rejected"]
        return {"preference": found}
