"""Trainer: data, training loop, checkpoints and generation.

Names are imported on first use, so importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "_calibrate": ("calibrate_first_run", "calibrate_local", "short_step"),
    "_dryrun": ("DryRun", "TracedRank", "differences", "dry_run", "trace_rank"),
    "job": ("Job", "prepare_job", "under_torchrun"),
    "_parity": ("Parity", "parity"),
    "run_samples": ("answer_held_out", "make_sample", "write_answers", "write_sample"),
    "run_start": ("run_job", "run_on_ray"),
    "checkpoints._own_loop": ("load", "save", "save_pretrained"),
    "engine.optimizer": ("build_optimizer", "parameter_groups"),
    "loop": ("Callback", "LrSchedule", "Summary", "startup_panel"),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
