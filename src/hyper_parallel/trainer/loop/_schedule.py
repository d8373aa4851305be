"""Learning-rate schedules as pure functions of the step; checkpoints store no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hyper_parallel.config import Training


@dataclass(frozen=True, slots=True)
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

    All other schedules have the names and values of transformers. Their warm-up starts with rate 0 in step 1, and ends
    one step later than a native warm-up.
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
        if (formula := _TRANSFORMERS.get(self.kind)) is not None:
            return max(0.0, formula(self, step - 1))
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

    @property
    def least(self) -> float:
        """Lowest learning rate of a transformers schedule, divided by the peak."""
        if "min_lr" in self.args:
            return float(self.args["min_lr"]) / self.peak
        return float(self.args.get("min_lr_rate", self.args.get("min_lr_ratio", self.min_ratio)))


def _with_warmup(after: Callable[[LrSchedule, int], float]) -> Callable[[LrSchedule, int], float]:
    """Return a function of the step, counted from 0: linear warm-up from 0, then `after`."""

    def formula(s: LrSchedule, step: int) -> float:
        return step / s.warmup_steps if step < s.warmup_steps else after(s, step)

    return formula


def _progress(s: LrSchedule, step: int) -> float:
    return (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps)


def _cosine_wave(s: LrSchedule, progress: float) -> float:
    """Return a cosine between 1 and 0 with `num_cycles` periods (default: half a period) at `progress` in [0, 1]."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * s.args.get("num_cycles", 0.5) * progress))


def _scale_to_floor(s: LrSchedule, factor: float) -> float:
    return factor * (1.0 - s.least) + s.least


def _restarts(s: LrSchedule, step: int) -> float:
    progress = _progress(s, step)
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * ((s.args.get("num_cycles", 1) * progress) % 1.0)))


def _polynomial(s: LrSchedule, step: int) -> float:
    end = s.args.get("lr_end", 1e-7) / s.peak
    if step > s.steps:
        return float(end)
    remaining = 1.0 - (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps)
    return float((1.0 - end) * remaining ** s.args.get("power", 1.0) + end)


def _inverse_sqrt(s: LrSchedule, step: int) -> float:
    timescale = s.args.get("timescale", s.warmup_steps or 10_000)
    return 1.0 / math.sqrt((step + timescale - s.warmup_steps) / timescale)


def _min_lr_after_warmup(s: LrSchedule, step: int) -> float:
    """Return the rate of a warm-up followed by a cosine decay to `min_lr`.

    As in transformers, the decay is evaluated one step ahead. Warm-up starts at `warmup_lr_rate`, by default
    `1 / warmup_steps`.
    """
    warmup, first = s.warmup_steps, s.args.get("warmup_lr_rate")
    if step < warmup and first is None:
        return (step + 1.0) / max(1.0, warmup)
    if step < warmup:
        return float(first + (1.0 - first) * step / max(1, warmup - 1))
    progress = (step - warmup + 1.0) / max(1.0, s.steps - warmup)
    return _scale_to_floor(s, _cosine_wave(s, progress))


_DECAY_SHAPES: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Decay shapes: functions from progress in [0, 1] to a rate that falls from 1 to 0."""


def _warmup_stable_decay(s: LrSchedule, step: int) -> float:
    warmup, decay = s.warmup_steps, s.args.get("num_decay_steps", s.decay_steps)
    stable = s.args.get("num_stable_steps", s.steps - warmup - decay)
    if step < warmup:
        rise = _DECAY_SHAPES[s.args.get("warmup_type", "linear")]
        return _scale_to_floor(s, rise(1.0 - step / warmup))
    if step < warmup + stable:
        return 1.0
    if step >= warmup + stable + decay:
        return s.least
    progress, kind = (step - warmup - stable) / max(1, decay), s.args.get("decay_type", "cosine")
    return _scale_to_floor(
        s, _cosine_wave(s, progress) if kind == "cosine" else _DECAY_SHAPES[kind](progress)
    )


_TRANSFORMERS: Final = MappingProxyType(
    {
        "constant_with_warmup": _with_warmup(lambda _, __: 1.0),
        "cosine_with_min_lr": _with_warmup(
            lambda s, n: _scale_to_floor(s, _cosine_wave(s, _progress(s, n)))
        ),
        "cosine_with_restarts": _with_warmup(_restarts),
        "cosine_warmup_with_min_lr": _min_lr_after_warmup,
        "inverse_sqrt": _with_warmup(_inverse_sqrt),
        "polynomial": _with_warmup(_polynomial),
        "warmup_stable_decay": _warmup_stable_decay,
    }
)
"""Functions from the number of finished steps to the rate divided by the peak, by transformers' schedule name."""
