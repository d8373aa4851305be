"""Loading of the newest checkpoint among several directories."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import CheckpointCorrupt
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer


def load_newest(
    saved: Sequence[Checkpointer], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[int, dict[str, Any]]:
    """Load the newest intact checkpoint of several directories; return (step, extra values) like `Checkpointer.load`.

    Raises:
        CheckpointCorrupt, CheckpointFormat, CheckpointMismatch: See `Checkpointer.load`.
    """
    candidates = [
        (step, number) for number, s in enumerate(saved) for step in files.steps(s.directory)
    ]
    for step, number in sorted(candidates, reverse=True) if len(saved) > 1 else []:
        with suppress(CheckpointCorrupt):  # `load` has logged a warning that names the file
            return saved[number].load(model, optimizer, step)
    return saved[0].load(model, optimizer)
