"""The model before the first step, as values that its parameters take for a pass: no second model is laid out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import nn

from hyper_parallel.backends.torch import handle, local
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.index import INDEX
from hyper_parallel.trainer.checkpoints.manifest import step_name
from hyper_parallel.trainer.files import FileEntry
from hyper_parallel.trainer.input_checksums import RunInputs

FOLDER: Final = "reference"
"""In the run directory: the weights, in the form of a checkpoint, for runs that go on on any layout."""
REFERENCE_MODEL: Final = "weights of the reference model"
"""Name among the inputs of a run."""


class ReferenceWeights:
    """Weights before the first step, beside those that learn.

    It takes memory for the parameters that are trained, as this rank stores them; with adapters these are small.

    Args:
        model: Passed through `parallelize`; holds the values before the first step when the run begins.
        directory: The run's own.
        source: Directory of the run that this one goes on with; None: it begins.
        inputs: Checksums of what the run reads.

    Raises:
        CheckpointMismatch: HP702 when the reference is not the one of the run that goes on.
        CheckpointCorrupt: HP701 when the run that goes on has no reference, or a damaged one.
    """

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, directory: Path, source: Path | None, inputs: RunInputs
    ) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        if source is None:
            self._values = [local(p).clone() for p in self._trained]
        else:
            inputs.check(REFERENCE_MODEL, _checksum(source), source / FOLDER)
            before = [local(p).clone() for p in self._trained]
            weights = Checkpointer(source / FOLDER, keep=1, asynchronous=False, fingerprint={})
            weights.load(model, None)
            weights.close()
            self._values = [local(p).clone() for p in self._trained]
            for param, value in zip(self._trained, before, strict=True):
                local(param).copy_(value)
        if source != directory:
            with self.weights():
                kept = Checkpointer(directory / FOLDER, keep=1, asynchronous=False, fingerprint={})
                kept.save(0, model, None, {})
                kept.close()
        inputs.found[REFERENCE_MODEL] = _checksum(directory)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The model is the reference inside, and what it was afterwards, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()  # what a pass has gathered has the other values
        for param, value in zip(self._trained, self._values, strict=True):
            mine = local(param)  # of the present: the first pass gives uneven shards new tensors
            now = mine.clone()
            mine.copy_(value)
            value.copy_(now)


def _checksum(run: Path) -> str:
    """Return the checksum of the index of a run's reference, which has the checksums of all its tensors."""
    path = run / FOLDER / step_name(0) / INDEX
    return FileEntry.of(path).sha256[:32] if path.is_file() else "none"
