"""Learning from pairs of answers to one prompt: the chosen one is to become likelier than the rejected one.

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290 (sigmoid; label smoothing as in its robust form, Mitchell 2023);
SLiC hinge, Zhao et al. 2023, arXiv:2305.10425; IPO, Azar et al. 2023, arXiv:2310.12036; ORPO, Hong et al. 2024,
arXiv:2403.07691; SimPO, Meng et al. 2024, arXiv:2405.14734.

The reference is the model before the first step: its log-probabilities of all answers are computed then, once, and kept
in `reference.npy` of the run for those that go on with it. No second model is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.backends.torch import token_logprobs
from hyper_parallel.config import Dpo
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.trainer._files import written
from hyper_parallel.trainer.data._batches import IGNORE_INDEX
from hyper_parallel.trainer.stages._sampling import added

REFERENCE: Final = "reference.npy"
_FREE: Final = ("orpo", "simpo")
"""Losses without a reference."""


@dataclass
class DpoStage:
    """Compares the two answers of every pair.

    Attributes:
        model: The model that learns.
        settings: Section `dpo` of the recipe.
        plan: The plan of the run.
        rank: Data-parallel rank.
        writes: Whether this process writes the reference.
        directory: The run's own directory.
        source: Directory of the run that this one goes on with; None: it begins.
        device: Of the model.
    """

    model: nn.Module
    settings: Dpo
    plan: Plan
    rank: int
    writes: bool
    directory: Path
    source: Path | None
    device: torch.device
    _reference: Tensor | None = None
    _seen: list[Tensor] = field(default_factory=list)

    def begin(self, batches: Any) -> None:
        """Compute the reference of all rows, or read that of the run that goes on.

        Raises:
            CheckpointMismatch: HP702 when that run has none, or one of other data.
        """
        if self.settings.loss_type in _FREE:
            return
        rows = len(batches.sequences)
        if self.source is not None:
            path = self.source / REFERENCE
            try:
                kept = np.load(path)
            except (OSError, ValueError):  # absent, or damaged
                kept = None
            if kept is None or kept.shape != (rows,):
                raise CheckpointMismatch(
                    "the run that goes on has no reference of these pairs, and its model has moved since",
                    where=str(path),
                    got="no file that can be read" if kept is None else f"{len(kept)} answers",
                    allowed=f"{rows} answers",
                    hint="checkpoint.resume=never",
                )
        else:
            kept = self._of_all(batches.sequences, rows)
        if self.writes and self.directory != self.source:  # else other ranks may be reading it
            partial = self.directory / f".{REFERENCE}.part"
            with written(self.directory / REFERENCE):
                with partial.open("wb") as file:
                    np.save(file, kept)
                partial.replace(self.directory / REFERENCE)
        self._reference = torch.from_numpy(kept).to(self.device)

    @torch.no_grad()
    def _of_all(self, sequences: Any, rows: int) -> NDArray[np.float64]:
        """[rows] log-probability of every answer under the model as it is; ranks take turns, all as many."""
        size, dp = self.plan.workload.microbatch or 1, self.plan.strategy.dp
        found = torch.zeros(rows, dtype=torch.float64, device=self.device)
        self.model.eval()
        for begin in range(0, rows, size * dp):
            mine = np.arange(size, dtype=np.int64) + begin + self.rank * size
            ids, labels = (
                torch.from_numpy(a).to(self.device)
                for a in sequences.read(np.minimum(mine, rows - 1))
            )
            logprobs = token_logprobs(self.model, input_ids=ids, shift_labels=labels)
            inside = torch.from_numpy(mine < rows).to(self.device)
            at = torch.from_numpy(mine).to(self.device)[inside]
            found[at] = logprobs.double().sum(-1)[inside]
        self.model.train()
        shares = self.plan.strategy.world_size // dp  # ranks that share rows have the same
        return np.array(added(found)) / shares

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Add the reference of every answer."""
        self._seen.clear()
        size, parts = len(microbatches[0]["input_ids"]), []
        for number, part in enumerate(microbatches):
            at = torch.from_numpy(rows[number * size : (number + 1) * size]).to(self.device)
            given = {} if self._reference is None else {"reference": self._reference[at]}
            parts.append({**part, **given})
        return parts, None

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of the pairs of a microbatch, divided by the pairs of the step."""
        settings, beta = self.settings, self.settings.beta
        lengths = (batch["shift_labels"] != IGNORE_INDEX).sum(-1)
        sums, mean = logprobs.sum(-1), logprobs.sum(-1) / lengths
        work = self.plan.workload
        pairs = (work.tokens_per_step or 0) // work.seq_len / 2
        scores = (sums - batch.get("reference", 0.0)) * beta
        if settings.loss_type == "ipo":
            scores = (sums - batch["reference"]) / lengths
        elif settings.loss_type == "simpo":
            scores = beta * mean
        elif settings.loss_type == "orpo":
            scores = mean - torch.log1p(-mean.exp())
        chosen, rejected = scores[0::2], scores[1::2]
        margin = chosen - rejected
        if settings.loss_type == "sigmoid":
            smooth = settings.label_smoothing
            losses = -F.logsigmoid(margin) * (1 - smooth) - F.logsigmoid(-margin) * smooth
        elif settings.loss_type == "hinge":
            losses = torch.relu(1 - margin)
        elif settings.loss_type == "ipo":
            losses = (margin - 1 / (2 * beta)) ** 2
        elif settings.loss_type == "simpo":
            losses = -F.logsigmoid(margin - settings.simpo_gamma)
        else:
            losses = -mean[0::2] - beta * F.logsigmoid(margin)
        facts = [chosen.sum(), rejected.sum(), (margin > 0).sum(), torch.tensor(len(margin))]
        self._seen.append(torch.stack([f.detach().double().to(logprobs.device) for f in facts]))
        return losses.sum() / pairs

    def end(self) -> None:
        """Nothing is left to do."""

    def record(self) -> dict[str, Any]:
        """Mean scores of chosen and rejected answers, and the share of pairs in the right order."""
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
