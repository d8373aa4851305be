"""Reference model stored as parameter values, which are swapped in for a forward pass; there is no second model."""

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
"""Folder of the run directory with the weights as a checkpoint, for resumed runs on any layout."""
REFERENCE_MODEL: Final = "weights of the reference model"
"""Name in the input checksums of a run."""


class ReferenceWeights:
    """Weights before the first step, stored in addition to the trained weights.

    Memory: one copy of this rank's shards of the trained parameters, which are small with adapters.

    Args:
        model: Model passed through `parallelize`; has the weights before the first step if the run is new.
        directory: Directory of this run.
        source: Directory of the resumed run; None: a new run.
        inputs: Checksums of the run's inputs.

    Raises:
        CheckpointMismatch: HP702 when the reference is not the one of the resumed run.
        CheckpointCorrupt: HP701 when the resumed run has no reference, or a damaged one.
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
        """Swap in the reference weights inside the context; the trained weights are restored bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()  # gathered parameters have the previous values
        for param, value in zip(self._trained, self._values, strict=True):
            # Looked up at each call: the first pass replaces the tensors of uneven shards.
            shard = local(param)
            current = shard.clone()
            shard.copy_(value)
            value.copy_(current)


def _checksum(run: Path) -> str:
    """Return the checksum of the index of a run's reference, which covers the checksums of all its tensors."""
    path = run / FOLDER / step_name(0) / INDEX
    return FileEntry.of(path).sha256[:32] if path.is_file() else "none"
