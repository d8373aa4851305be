"""Checkpoint and model-file errors, HP7xx."""

from hyper_parallel.errors._base import HyperParallelError


class CheckpointCorrupt(HyperParallelError):
    """A file of a checkpoint is missing, truncated or altered, and no older intact one exists.

    Fix: restore the file named, or start again without resume.
    """

    code = "HP701"


class CheckpointMismatch(HyperParallelError):
    """A checkpoint belongs to another model or optimizer than the run that loads it.

    Fix: use the recipe the checkpoint was written with; only `parallel.*` and the world size may change.
    """

    code = "HP702"


class WeightsUnreadable(HyperParallelError):
    """A weight file of a model directory is missing, truncated, or lacks a parameter.

    Fix: fetch the file named again; names and shapes must match `config.json`.
    """

    code = "HP703"


class WeightsUninitialised(HyperParallelError):
    """A parameter or buffer has no initialisation rule, so training would start from undefined memory.

    Fix: give the module that holds it a `reset_parameters` method, or handle it in the model's `_init_weights`.
    """

    code = "HP704"
