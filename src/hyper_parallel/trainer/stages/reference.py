"""Log-probabilities of all answers under the model before the first step: the reference of DPO and KTO.

They are computed then, once, and kept in `reference.npy`, of held-out answers in `reference_holdout.npy`, for runs that
go on. No second model is held.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.backends.torch import token_logprobs
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.serde import create_file
from hyper_parallel.trainer.files import tensors_written
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages.sampling import added

REFERENCE: Final = "reference.npy"
HELD_OUT: Final = "reference_holdout.npy"
_NAMES: Final = {
    REFERENCE: "reference log-probabilities",
    HELD_OUT: "held-out reference log-probabilities",
}
"""Names of the files among the inputs of a run."""


@dataclass
class Reference:
    """The reference of a run, on every rank.

    Attributes:
        model: The model that learns.
        plan: The plan of the run.
        rank: Data-parallel rank.
        writes: Whether this process writes the file.
        directory: The run's own directory.
        source: Directory of the run that this one goes on with; None: it begins.
        device: Of the model.
        inputs: Checksums of what the run reads.
        file: Where it is kept.
    """

    model: nn.Module
    plan: Plan
    rank: int
    writes: bool
    directory: Path
    source: Path | None
    device: torch.device
    inputs: RunInputs = field(default_factory=RunInputs)
    file: str = REFERENCE
    _kept: Tensor | None = None
    _held: Reference | None = None

    def begin(self, sequences: Any) -> None:
        """Compute the reference of all rows, or read that of the run that goes on.

        Raises:
            CheckpointMismatch: HP702 when that run has none, one of other data, or one with altered values.
        """
        rows = len(sequences)
        if self.source is not None:
            path = self.source / self.file
            try:
                kept = np.load(path)
            except (OSError, ValueError):  # absent, or damaged
                kept = None
            if kept is None or kept.shape != (rows,):
                raise CheckpointMismatch(
                    "the run that goes on has no reference of these answers, and its model has moved since",
                    where=str(path),
                    got="no file that can be read" if kept is None else f"{len(kept)} answers",
                    allowed=f"{rows} answers",
                    hint="checkpoint.resume=never",
                )
        else:
            kept = self._of_all(sequences, rows)
        checksum = hashlib.sha256(np.ascontiguousarray(kept).tobytes()).hexdigest()[:32]
        self.inputs.check(_NAMES[self.file], checksum, (self.source or self.directory) / self.file)
        if self.writes and self.directory != self.source:  # else other ranks may be reading it
            partial = self.directory / f".{self.file}.part"
            with tensors_written(partial):
                with create_file(partial) as file:
                    np.save(file.buffer, kept)
                partial.replace(self.directory / self.file)
        self._kept = torch.from_numpy(kept).to(self.device)

    def held_out(self, sequences: Any) -> Reference:
        """The reference of held-out rows, which the first evaluation of a run computes, before the first step."""
        if self._held is None:
            self._held = replace(self, file=HELD_OUT, _kept=None)
            self._held.begin(sequences)
        return self._held

    def of(self, rows: NDArray[np.int64]) -> Tensor:
        """[len(rows)] log-probability of the answer of each row; 0 of a dummy row."""
        assert self._kept is not None
        at = torch.from_numpy(rows).to(self.device)
        return torch.where(at < 0, 0.0, self._kept[at])

    @torch.no_grad()
    def now(self, batch: dict[str, Tensor]) -> Tensor:
        """[B] log-probability of the answer of each row under the model as it is, without dropout."""
        training = self.model.training
        self.model.eval()
        logprobs = token_logprobs(self.model, **batch)
        self.model.train(training)
        return logprobs.double().sum(-1)

    def summed(self, values: Tensor) -> NDArray[np.float64]:
        """Sums of what data-parallel ranks have; ranks that share rows have the same."""
        return np.array(added(values)) / (self.plan.strategy.world_size // self.plan.strategy.dp)

    def _of_all(self, sequences: Any, rows: int) -> NDArray[np.float64]:
        """[rows] log-probability of every answer; ranks take turns, all as many."""
        size, dp = self.plan.workload.microbatch or 1, self.plan.strategy.dp
        found = torch.zeros(rows, dtype=torch.float64, device=self.device)
        for begin in range(0, rows, size * dp):
            mine = np.arange(size, dtype=np.int64) + begin + self.rank * size
            ids, labels = (
                torch.from_numpy(a).to(self.device)
                for a in sequences.read(np.minimum(mine, rows - 1))
            )
            logprobs = self.now({"input_ids": ids, "shift_labels": labels})
            inside = torch.from_numpy(mine < rows).to(self.device)
            at = torch.from_numpy(mine).to(self.device)[inside]
            found[at] = logprobs[inside]
        return self.summed(found)
