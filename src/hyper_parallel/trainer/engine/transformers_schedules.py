"""Learning-rate schedules of transformers as functions of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.config import Training


def transformers_factor(training: Training, options: dict[str, Any]) -> Callable[[int], float]:
    """Return a function from the number of finished steps to the learning rate divided by `training.lr`.

    The function is the schedule `training.lr_schedule` of transformers. `options` are the additional arguments of this
    schedule, which transformers calls `lr_scheduler_kwargs`.
    """
    from transformers import get_scheduler

    unused = torch.optim.SGD([nn.Parameter(torch.empty(1))], lr=training.lr)
    name, length = training.lr_schedule, (training.warmup_steps, training.steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
        scheduler = get_scheduler(name, unused, *length, scheduler_specific_kwargs=options)
    return scheduler.lr_lambdas[0]
