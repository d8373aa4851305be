"""Checks of a model and a layout with the arrays that the processor gives for the data, before ranks start."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from hyper_parallel.backends.torch.partial_use import refuse_other_inputs
from hyper_parallel.config import Recipe
from hyper_parallel.errors import Contradiction, ModelUnreadable
from hyper_parallel.ir import Plan


def check_media_inputs(model: nn.Module, plan: Plan, sequences: Any, recipe: Recipe) -> None:
    """Raise for a model or a layout that does not support the media of the data.

    Args:
        model: Model of the recipe.
        plan: Plan of the run.
        sequences: Training sequences with media.
        recipe: Recipe of the run.

    Raises:
        UnsupportedSharding: HP205 for cp, and for pp if the forward cannot run without the media.
        Contradiction: HP104 for offload and for step programs, whose steps all have the same shapes.
        ModelUnreadable: HP305 when the model's forward does not read them.
    """
    arrays = sequences.first_media()
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    axes = [axis for axis in ("pp", "cp") if getattr(plan.strategy, axis) > 1]
    refuse_other_inputs(model, axes, tensors)
    hints = {
        "offload": (recipe.offload.on, "offload.budget=null offload.max_slowdown=null"),
        "backend": (recipe.backend != "torch", "backend=torch"),
    }
    for key, (applies, hint) in hints.items():
        if applies:
            raise Contradiction(
                "planned steps repeat one shape, and images and recordings have different sizes",
                where=key,
                got=sorted(tensors),
                hint=hint,
            )
    known = inspect.signature(model.forward).parameters
    unread = [n for n, t in tensors.items() if t.is_floating_point() and n not in known]
    if unread:
        raise ModelUnreadable(
            f"the forward of {type(model).__name__} does not read `{unread[0]}`, so the media would have no effect",
            where="model.path",
            got=sorted(tensors),
            allowed="a model of text and of these media",
        )
