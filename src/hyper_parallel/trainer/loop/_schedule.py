"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.config import Training


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Learning rate of every step.

    Linear warm-up from `1 / warmup_steps` to 1, then one of four shapes. They begin at 1 in the step after warm-up and
    would reach `min_ratio` one step after the last, as transformers' schedulers do. No step trains at a rate of 0:

    * cosine: half a period of a cosine (Loshchilov and Hutter, SGDR, arXiv:1608.03983, one cycle).
    * linear: a straight line.
    * wsd: stable, then a straight line over the last `decay_steps` (Hu et al., MiniCPM, arXiv:2404.06395; the linear
      form of the decay as in Hagele et al., arXiv:2405.18392).
    * constant.
    """

    kind: str  # cosine, wsd, linear or constant
    peak: float  # learning rate after warm-up
    steps: int  # last step; steps are counted from 1
    warmup_steps: int = 0  # the last of them has the peak rate
    decay_steps: int = 0  # steps of the decay of wsd
    min_ratio: float = 0.0  # rate over the peak that the decay ends at

    @classmethod
    def of(cls, training: Training) -> LrSchedule:
        """The schedule a recipe's `training:` section describes."""
        decay = training.decay_steps
        return cls(
            kind=training.lr_schedule,
            peak=training.lr,
            steps=training.steps,
            warmup_steps=training.warmup_steps,
            decay_steps=max(1, training.steps // 10) if decay is None else decay,
            min_ratio=training.min_lr_ratio,
        )

    def lr(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Learning rate of a step over the peak, in [0, 1]."""
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
