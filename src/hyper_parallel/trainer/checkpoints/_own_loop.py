"""Checkpoints and exports for user training loops: `save`, `load` and `save_pretrained`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch import handle
from hyper_parallel.backends.torch.weights.huggingface import model_of_part
from hyper_parallel.backends.torch.weights.lora import has_adapters
from hyper_parallel.errors import (
    BadValue,
    CheckpointCorrupt,
    CheckpointFormat,
    CheckpointMismatch,
    LossNotFinite,
)
from hyper_parallel.trainer.checkpoints.adapter_files import export_adapter
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.manifest import START_OVER
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
    """Save model and optimizer as a checkpoint that loads on any layout. Collective: every rank calls this.

    For a model with adapters, only the adapters and the other trained parameters are saved.

    Args:
        model: Model passed through `parallelize`.
        optimizer: Optimizer of the model; None: weights only.
        path: Folder of checkpoints, visible to all ranks. The checkpoint becomes a subfolder such as `step_00000010`,
            and an existing one of the same step is replaced.
        step: Number of completed optimizer steps.
        keep: Number of newest intact checkpoints to keep, at least 1. Checkpoints of later steps always stay. None:
            keep all.
        extra: JSON values that `load` returns, such as an epoch or `scheduler.state_dict()`. The values of
            rank 0 are stored.

    Raises:
        TypeError: The model did not pass through `parallelize`.
        OutputNotWritable: HP105 when the folder is not writable, or the replaced subfolder contains other files.
        BadValue: HP102 for `keep` below 1, for an extra value or an optimizer state that cannot be stored as JSON or a
            tensor, or for an optimizer with a parameter that is not part of the model.
        UnsupportedSharding: HP205 for a tensor whose sharding cannot be stored, such as `Partial` placements.
        LossNotFinite: HP604 when a trained parameter or an optimizer state is NaN or infinite; no file is written.
    """
    plan = handle(model).plan
    if keep is not None and keep < 1:
        raise BadValue("`keep` of `hp.save` is below 1", where="keep", got=keep, allowed="1, 2, ..., or None for all")
    fingerprint = {
        "model": plan.model.fingerprint,
        "optimizer": type(optimizer).__name__.lower(),
        "param_dtype": plan.workload.param_dtype,
    }
    checkpoints = Checkpointer(path, keep=_ALL if keep is None else keep, asynchronous=False, fingerprint=fingerprint)
    try:
        checkpoints.save(step, model, optimizer, extra)
    except LossNotFinite as error:
        restart = "train again"
        if checkpoints.latest() is not None:
            restart = f"hp.load(model, optimizer, {str(path)!r}), and train on"
        error.hint = f"{restart} with a smaller learning rate"
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
    """Load a checkpoint written by `save` into a model and an optimizer, in place. Collective: every rank calls this.

    Args:
        model: Model passed through `parallelize`, on any layout, not on the meta device.
        optimizer: Optimizer of the same class as the saved one. It stays unchanged if the checkpoint was saved without
            an optimizer. None: load only weights.
        path: Folder passed to `save`, or the `checkpoints` folder of a run.
        step: Step to load; None: the newest intact checkpoint.

    Returns:
        Dict of the `extra` values passed to `save`, and `step`.

    Raises:
        CheckpointCorrupt: HP701 when there is no intact checkpoint, or none of `step`.
        CheckpointFormat: HP740 when an earlier version wrote it.
        CheckpointMismatch: HP702 naming the first difference between the checkpoint and this model or optimizer.
        BadValue, UnsupportedSharding: HP102, HP205 for a model or optimizer that `save` rejects.
    """
    checkpoints = Checkpointer(path, keep=1, asynchronous=False, fingerprint=None)
    try:
        loaded_step, extra = checkpoints.load(model, optimizer, step)
    except (CheckpointCorrupt, CheckpointFormat, CheckpointMismatch) as error:
        # The hints of `Checkpointer` name recipe keys.
        error.hint = (error.hint or "").replace(f" with `{START_OVER}`", " without `hp.load`")
        raise
    finally:
        checkpoints.close()
    return {**extra, "step": loaded_step}


def save_pretrained(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write a transformers model as a directory that `from_pretrained` loads. Collective: every rank calls this.

    Tensors of the pretrained files that the model does not use, such as multi-token prediction layers, are copied
    unchanged. For a model with adapters, only the adapters and the other trained parameters are written, for peft.

    Args:
        model: Transformers model passed through `parallelize`, on any layout.
        path: Directory to write. An earlier export is replaced if its files are unchanged; any other directory that is
            not empty is rejected.
        tokenizer: Directory whose tokenizer files are copied; None: no tokenizer.
        max_file_bytes: Maximum bytes of a weight file, unless a single tensor is larger. None: 5 GiB. Adapters are
            written to one file.

    Raises:
        ModelUnreadable: HP305 for a model that is not a transformers model, or whose file format joins several layers.
        BadValue, NoData: HP102, HP602 for `max_file_bytes` below 1, or for tokenizer files that cannot be copied.
        OutputNotWritable, RunInUse: HP105, HP720 when the directory is rejected, not writable or in use.
        LossNotFinite: HP604 when a trained parameter is NaN or infinite.
    """
    if max_file_bytes is not None and max_file_bytes < 1:
        raise BadValue("the size is below 1 byte", where="max_file_bytes", got=max_file_bytes, allowed="1, 2, ...")
    if has_adapters(model):
        export_adapter(model, tokenizer, path)
        return
    config = getattr(model_of_part(model), "config", None)
    export_hf(model, config, tokenizer, path, max_file_bytes=max_file_bytes or MAX_FILE_BYTES)
