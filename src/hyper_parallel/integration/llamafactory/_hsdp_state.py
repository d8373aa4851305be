"""Checkpoint and export functions that LlamaFactory's trainer calls.

Checkpoints are written by `hyper_parallel.save` and can be read on any layout and number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel.integration.llamafactory._fsdp2 import model_of
from hyper_parallel.integration.llamafactory.parallel_model import export, wait

HSDP_MODEL_NAME: Final = "hsdp_model"
_FOLDER: Final = f"{HSDP_MODEL_NAME}_0"
_SCHEDULER: Final = "scheduler.pt"


def save_hsdp_checkpoint(
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    output_dir: str | Path,
    should_save_scheduler: bool = True,
) -> None:
    """Save weights and optimizer state in `hsdp_model_0`, and the scheduler in `scheduler.pt`; all ranks must call.

    Raises:
        OutputNotWritable: HP105 when the folder cannot be written.
    """
    target = Path(output_dir)
    hp.save(_plain(model), getattr(optimizer, "optimizer", optimizer), target / _FOLDER)
    if should_save_scheduler and lr_scheduler is not None and dist.get_rank() == 0:
        torch.save(lr_scheduler.state_dict(), target / _SCHEDULER)
    wait()


def load_hsdp_model(model: nn.Module, checkpoint_dir: str | Path) -> bool:
    """Load the weights of a checkpoint, and return whether `checkpoint_dir` contains one.

    Raises:
        CheckpointCorrupt: HP701 for damaged files. CheckpointMismatch: HP702 with the first different tensor.
    """
    folder = Path(checkpoint_dir, _FOLDER)
    if not folder.is_dir():
        return False
    hp.load(_plain(model), None, folder)
    return True


def load_hsdp_optimizer_and_scheduler(
    optimizer: Any, lr_scheduler: Any, checkpoint_dir: str | Path
) -> None:
    """Load weights, optimizer state and scheduler state of a checkpoint; do nothing if there is none.

    Raises:
        CheckpointCorrupt: HP701 for damaged files. CheckpointMismatch: HP702 with the first different tensor.
        BadValue: HP102 for an optimizer that does not belong to a prepared model.
    """
    folder = Path(checkpoint_dir, _FOLDER)
    if not folder.is_dir():
        return
    plain = getattr(optimizer, "optimizer", optimizer)
    hp.load(model_of(p for group in plain.param_groups for p in group["params"]), plain, folder)
    saved = Path(checkpoint_dir, _SCHEDULER)
    if lr_scheduler is not None and saved.is_file():
        lr_scheduler.load_state_dict(torch.load(saved, weights_only=True))


def export_to_hf_format(model: nn.Module, tokenizer: Any, save_dir: str | Path) -> None:
    """Write a folder for `from_pretrained`, or an adapter for peft; all ranks must call this."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    export(_plain(model), Path(save_dir), tokenizer)


def _plain(model: nn.Module) -> nn.Module:
    """Return the original module of a module compiled by `torch.compile`; any other module unchanged."""
    return getattr(model, "_orig_mod", model)
