"""Reference model of a run: the model before the first step.

DPO and KTO need only log-probabilities of this model. They are computed once before the first step and saved as
`reference.npy`, or `reference_holdout.npy` for held-out answers; resumed runs load these files. GRPO needs the weights
of this model. A copy of them is swapped into the trained model for a forward pass, so there is no second model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.backends.torch import data_share, handle, local, token_logprobs
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.serde import create_file
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.index import INDEX
from hyper_parallel.trainer.checkpoints.manifest import START_OVER, step_name
from hyper_parallel.trainer.files import FileEntry, tensors_written
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages.sampling import sum_over_data_ranks

REFERENCE: Final = "reference.npy"
HELD_OUT: Final = "reference_holdout.npy"
_NAMES: Final = {
    REFERENCE: "reference log-probabilities",
    HELD_OUT: "held-out reference log-probabilities",
}
"""Name of each file in the run's record of input checksums."""


@dataclass
class Reference:
    """Log-probabilities of a run's answers under the reference model, on every rank.

    Attributes:
        model: Trained model.
        plan: Parallel layout and batch sizes of the run.
        writes: Whether this process writes the file of log-probabilities.
        directory: Directory of this run.
        source: Directory of the run that is resumed; None: a new run.
        inputs: Checksums of the run's input models.
        file: Name of the file of log-probabilities.
    """

    model: nn.Module
    plan: Plan
    writes: bool
    directory: Path
    source: Path | None
    inputs: RunInputs = field(default_factory=RunInputs)
    file: str = REFERENCE
    _values: Tensor | None = None
    _held_out: Reference | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return handle(self.model).device

    def begin(self, sequences: Any) -> None:
        """Compute the log-probabilities of all answers in `sequences`, or load them from the resumed run.

        Raises:
            CheckpointMismatch: HP702 when the resumed run's file is missing, was altered, or is for other data.
            OutputNotWritable: HP105 when the file of this run cannot be written.
        """
        rows = len(sequences)
        if self.source is not None:
            path = self.source / self.file
            try:
                values = np.load(path)
            except (OSError, ValueError):  # absent or damaged
                values = None
            if values is None or values.shape != (rows,):
                problem = "the resumed run lacks its reference log-probabilities, which trained weights cannot give"
                if values is not None:
                    problem = "the resumed run has reference log-probabilities of another number of answers"
                raise CheckpointMismatch(
                    problem,
                    where=str(path),
                    got="no file that can be read" if values is None else f"{len(values)} answers",
                    allowed=f"{rows} answers",
                    hint=START_OVER,
                )
        else:
            values = self._compute(sequences, rows)
        checksum = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:32]
        self.inputs.check(_NAMES[self.file], checksum, (self.source or self.directory) / self.file)
        if self.writes and self.directory != self.source:  # else other ranks may be reading it
            partial = self.directory / f".{self.file}.part"
            with tensors_written(partial):
                with create_file(partial) as file:
                    np.save(file.buffer, values)
                partial.replace(self.directory / self.file)
        self._values = torch.from_numpy(values).to(self.device)

    def held_out(self, sequences: Any) -> Reference:
        """Return the reference of the held-out answers; the first call computes or loads their log-probabilities."""
        if self._held_out is None:
            self._held_out = replace(self, file=HELD_OUT, _values=None)
            self._held_out.begin(sequences)
        return self._held_out

    def reference_logprobs(self, rows: NDArray[np.int64]) -> Tensor:
        """Return [len(rows)] log-probabilities of the answers in `rows`; 0 for a padding row (-1)."""
        assert self._values is not None
        index = torch.from_numpy(rows).to(self.device)
        return torch.where(index < 0, 0.0, self._values[index])

    @torch.no_grad()
    def current_logprobs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return [B] log-probabilities of the answers in a batch under the current weights, without dropout."""
        training = self.model.training
        self.model.eval()
        logprobs = token_logprobs(self.model, **batch)
        self.model.train(training)
        return logprobs.double().sum(-1)

    def _compute(self, sequences: Any, rows: int) -> NDArray[np.float64]:
        """Return [rows] log-probabilities of all answers; every rank runs the same number of forward passes."""
        size, dp = self.plan.workload.microbatch or 1, self.plan.strategy.dp
        values = torch.zeros(rows, dtype=torch.float64, device=self.device)
        for begin in range(0, rows, size * dp):
            own_rows = np.arange(size, dtype=np.int64) + begin + data_share(self.model)[0] * size
            ids, labels = (torch.from_numpy(a).to(self.device) for a in sequences.read(np.minimum(own_rows, rows - 1)))
            logprobs = self.current_logprobs({"input_ids": ids, "shift_labels": labels})
            inside = torch.from_numpy(own_rows < rows).to(self.device)
            index = torch.from_numpy(own_rows).to(self.device)[inside]
            values[index] = logprobs[inside]
        return np.array(sum_over_data_ranks(values, self.plan.strategy))


FOLDER: Final = "reference"
"""Folder in the run directory that holds the reference weights as a checkpoint, for resumed runs on any layout."""
REFERENCE_MODEL: Final = "weights of the reference model"
"""Name of the reference weights in the run's record of input checksums."""


class ReferenceWeights:
    """Copy of the trained parameters as they were before the first step.

    The copy takes the memory of this rank's shards of the trained parameters.

    Args:
        model: Model passed through `parallelize`; in a new run it has the reference weights.
        directory: Directory of this run.
        source: Directory of the run that is resumed; None: a new run.
        inputs: Checksums of the run's input models.

    Raises:
        CheckpointMismatch: HP702 when the saved reference weights have changed since the checkpoint was saved.
        CheckpointCorrupt: HP701 when the resumed run's reference weights are missing or damaged.
        OutputNotWritable: HP105 when the weights cannot be saved.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, directory: Path, source: Path | None, inputs: RunInputs) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        if source is None:
            self._values = [local(p).clone() for p in self._trained]
        else:
            inputs.check(REFERENCE_MODEL, _checksum(source), source / FOLDER)
            current = [local(p).clone() for p in self._trained]
            weights = Checkpointer(source / FOLDER, keep=1, asynchronous=False, fingerprint={})
            weights.load(model, None)
            weights.close()
            self._values = [local(p).clone() for p in self._trained]
            for param, value in zip(self._trained, current, strict=True):
                local(param).copy_(value)
        if source != directory:
            with self.weights():
                saved = Checkpointer(directory / FOLDER, keep=1, asynchronous=False, fingerprint={})
                saved.save(0, model, None, {})
                saved.close()
        inputs.checksums[REFERENCE_MODEL] = _checksum(directory)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Return a context in which the model has the reference weights; its exit restores the trained weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()  # discard all-gathered parameters, which have the old values
        for param, value in zip(self._trained, self._values, strict=True):
            # FSDP's first forward pass replaces the local tensors of uneven shards, so do not cache them.
            shard = local(param)
            current = shard.clone()
            shard.copy_(value)
            value.copy_(current)


def _checksum(run: Path) -> str:
    """Return the checksum of the checkpoint index of a run's reference weights; "none" without a checkpoint."""
    path = run / FOLDER / step_name(0) / INDEX
    return FileEntry.of(path).sha256[:32] if path.is_file() else "none"
