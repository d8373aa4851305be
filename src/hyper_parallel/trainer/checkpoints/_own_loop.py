"""save and load for a training loop of the user's own: the checkpoints of the trainer, in one call each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch import handle
from hyper_parallel.backends.torch.weights.lora import has_adapters
from hyper_parallel.errors import BadValue, LossNotFinite
from hyper_parallel.trainer.checkpoints.adapter_files import export_adapter
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import MAX_FILE_BYTES, export_hf

_ALL: Final = sys.maxsize


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    *,
    step: int = 0,
    keep: int | None = None,
    **extra: Any,
) -> None:
    """Save model and optimizer, to be loaded on any layout; every rank calls this.

    The checkpoint appears whole or not at all, with a checksum of every file.

    Args:
        model: A model that passed through `parallelize`.
        optimizer: Its optimizer; None: weights only.
        path: Folder of checkpoints, visible to all ranks; this one is its `step_00000010`, say. One of the same step is
            replaced.
        step: Completed optimizer steps.
        keep: Newest checkpoints kept in the folder; None: all.
        extra: JSON values that `load` gives back, such as an epoch or `scheduler.state_dict()`; those of rank 0 count.

    Raises:
        OutputNotWritable: HP105 when the folder cannot be written.
        BadValue: HP102 for an extra value that is none of JSON.
        LossNotFinite: HP604 when a trained parameter or a state of the optimizer is NaN or infinite; nothing is saved.
    """
    plan = handle(model).plan
    fingerprint = {
        "model": plan.model.fingerprint,
        "optimizer": type(optimizer).__name__.lower(),
        "param_dtype": plan.workload.param_dtype,
    }
    for name, value in extra.items():
        _check_json(name, value)
    checkpoints = Checkpointer(path, keep=keep or _ALL, asynchronous=False, fingerprint=fingerprint)
    try:
        checkpoints.save(step, model, optimizer, extra)
    except LossNotFinite as error:
        error.hint = (
            f"hp.load(model, optimizer, {str(path)!r}), and train on with a smaller learning rate"
        )
        raise
    finally:
        checkpoints.close()


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    *,
    step: int | None = None,
) -> dict[str, Any]:
    """Load what `save` has written into a model and an optimizer, in place; every rank calls this.

    Args:
        model: A model that passed through `parallelize` and holds storage, on any layout.
        optimizer: Its optimizer, of the same kind as the one saved; None: weights only.
        path: The folder given to `save`, or the `checkpoints` folder of a run.
        step: This checkpoint; None: the newest one whose files are intact.

    Returns:
        The extra values of the save, and `step`.

    Raises:
        CheckpointCorrupt: HP701 when no intact checkpoint is there.
        CheckpointMismatch: HP702 with the first tensor that differs between the checkpoint and this model.
    """
    checkpoints = Checkpointer(path, keep=1, asynchronous=False, fingerprint=None)
    try:
        found, extra = checkpoints.load(model, optimizer, step)
    finally:
        checkpoints.close()
    return {**extra, "step": found}


def save_pretrained(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write a model of transformers as a directory that `from_pretrained` reads; every rank calls this.

    Tensors of the pretrained files that the model does not use, such as prediction layers, are written unchanged. A
    model with adapters is written as an adapter of peft.

    Args:
        model: A model of transformers that passed through `parallelize`, on any layout.
        path: The directory. An earlier one of this kind is replaced if nothing in it has changed since; any other that
            is not empty is refused.
        tokenizer: Directory whose tokenizer files are copied; None: none.
        max_file_bytes: Size at which a file of weights is closed; None: 5 GiB.

    Raises:
        ModelUnreadable: HP305 for a model that is not one of transformers.
        OutputNotWritable: HP105 when the directory cannot be written.
        LossNotFinite: HP604 when a trained parameter is NaN or infinite.
    """
    if has_adapters(model):
        export_adapter(model, tokenizer, path)
        return
    config = getattr(model, "config", None)
    export_hf(model, config, tokenizer, path, max_file_bytes=max_file_bytes or MAX_FILE_BYTES)


def _check_json(name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as cause:
        raise BadValue(
            f"`{name}` cannot be saved beside a checkpoint: it is no JSON value",
            got=type(value).__name__,
            allowed="numbers, texts, true, false, None, and lists and dicts of them",
        ) from cause
