"""Learning-rate schedules as pure functions of the step; checkpoints store no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hyper_parallel.config import SCHEDULE_ARGS, Training


@dataclass(frozen=True)
class LrSchedule:
    """Learning-rate schedule of a run.

    Four schedules are native. Their learning rate, divided by the peak, rises linearly from `1 / warmup_steps` to 1.
    Then the ratio is 1 in the next step, and decays to `min_ratio` at the step after the last step of the run. No step
    therefore has rate 0. The decay is:

    * cosine: half a period of a cosine (Loshchilov and Hutter, SGDR, arXiv:1608.03983, one cycle).
    * linear: a straight line.
    * wsd: constant, then a straight line over the last `decay_steps` (Hu et al., MiniCPM, arXiv:2404.06395; linear
      decay as in Hagele et al., arXiv:2405.18392).
    * constant: no decay.

    Transformers computes all other schedules. Most of them start their warm-up with rate 0 in step 1, and end it one
    step later than a native warm-up.
    """

    kind: str  # name of the schedule, as in `training.lr_schedule`
    peak: float  # learning rate after warm-up
    steps: int  # last step; steps are counted from 1
    warmup_steps: int = 0  # the last warm-up step has the peak rate
    decay_steps: int = 0  # steps of the decay of wsd and warmup_stable_decay
    min_ratio: float = 0.0  # final rate of the decay, divided by the peak
    args: Mapping[str, Any] = field(default_factory=dict)  # arguments of a transformers schedule

    @classmethod
    def of(cls, training: Training) -> LrSchedule:
        """Return the schedule of a recipe's `training:` section."""
        decay = training.decay_steps
        return cls(
            kind=training.lr_schedule,
            peak=training.lr,
            steps=training.steps,
            warmup_steps=training.warmup_steps,
            decay_steps=max(1, training.steps // 10) if decay is None else decay,
            min_ratio=training.min_lr_ratio,
            args=training.lr_schedule_args,
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the learning rate of a step divided by the peak, in [0, 1]."""
        if self.kind in SCHEDULE_ARGS:
            return max(0.0, self._transformers_factor(step - 1))
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.steps - self.decay_steps)
        progress = min(max(step - 1 - start, 0) / max(self.steps - start, 1), 1.0)
        fall = (1 - math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else progress
        return 1.0 - (1.0 - self.min_ratio) * fall

    @cached_property
    def _transformers_factor(self) -> Callable[[int], float]:
        from hyper_parallel.trainer.engine.transformers_schedules import transformers_factor

        options = dict(self.args)
        if self.kind == "warmup_stable_decay":
            options.setdefault("num_decay_steps", self.decay_steps)
            options.setdefault("min_lr_ratio", self.min_ratio)
        elif "min_lr_rate" in SCHEDULE_ARGS[self.kind] and "min_lr" not in options:
            options.setdefault("min_lr_rate", self.min_ratio)
        return transformers_factor(self.kind, self.peak, self.warmup_steps, self.steps, options)
