"""Learning-rate schedules as pure functions of the step; checkpoints store no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.config import SCHEDULE_ARGS, Training


@dataclass(frozen=True)
class LrSchedule:
    """Learning-rate schedule of a recipe's `training` section.

    Four schedules are native. Their factor (learning rate / peak) rises linearly during warm-up, from
    `1 / warmup_steps` in step 1 to 1 in the last warm-up step, and is 1 in the next step. It then decays towards
    `min_lr_ratio`, which it would reach one step after the last step of the run:

    * cosine: half a period of a cosine (Loshchilov and Hutter, SGDR, arXiv:1608.03983, one cycle).
    * linear: a straight line.
    * wsd: constant, then a straight line over the last `decay_steps` steps, by default a tenth of the run (Hu et al.,
      MiniCPM, arXiv:2404.06395; linear decay as in Hagele et al., arXiv:2405.18392).
    * constant: no decay.

    Transformers computes all other schedules. Most of them have learning rate 0 in step 1, and reach the peak in step
    `warmup_steps + 1`.
    """

    training: Training

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.training.lr * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1, divided by the peak; at least 0."""
        training, kind = self.training, self.training.lr_schedule
        if kind in SCHEDULE_ARGS:
            return max(0.0, self._transformers_factor(step - 1))
        start = training.warmup_steps
        if step <= start:
            return step / start
        if kind == "constant":
            return 1.0
        if kind == "wsd":
            start = max(start, training.steps - self._decay_steps)
        progress = min(max(step - 1 - start, 0) / max(training.steps - start, 1), 1.0)
        fall = (1 - math.cos(math.pi * progress)) / 2 if kind == "cosine" else progress
        return 1.0 - (1.0 - training.min_lr_ratio) * fall

    @property
    def _decay_steps(self) -> int:
        steps = self.training.decay_steps
        return max(1, self.training.steps // 10) if steps is None else steps

    @cached_property
    def _transformers_factor(self) -> Callable[[int], float]:
        from hyper_parallel.trainer.engine.transformers_schedules import transformers_factor

        training, kind = self.training, self.training.lr_schedule
        options = dict(training.lr_schedule_args)
        if kind == "warmup_stable_decay":
            options.setdefault("num_decay_steps", self._decay_steps)
            options.setdefault("min_lr_ratio", training.min_lr_ratio)
        elif "min_lr_rate" in SCHEDULE_ARGS[kind] and "min_lr" not in options:
            options.setdefault("min_lr_rate", training.min_lr_ratio)
        return transformers_factor(training, options)
