"""Learning-rate schedules of transformers as functions of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def transformers_factor(
    name: str, lr: float, warmup_steps: int, steps: int, options: Mapping[str, Any]
) -> Callable[[int], float]:
    """Return a schedule of transformers: function from the number of finished steps to the rate divided by `lr`.

    `options` are the schedule's own arguments, as in `lr_scheduler_kwargs`.
    """
    from transformers import get_scheduler

    unused = torch.optim.SGD([nn.Parameter(torch.empty(1))], lr=lr)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
        scheduler = get_scheduler(
            name, unused, warmup_steps, steps, scheduler_specific_kwargs=dict(options)
        )
    return scheduler.lr_lambdas[0]
