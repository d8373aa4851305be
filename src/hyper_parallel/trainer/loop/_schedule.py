"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore."""

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
    """Learning rate of every step.

    Four schedules are this project's. Linear warm-up from `1 / warmup_steps` to 1, then one of four shapes, which begin
    at 1 in the step after warm-up and would reach `min_ratio` one step after the last. No step trains at a rate of 0:

    * cosine: half a period of a cosine (Loshchilov and Hutter, SGDR, arXiv:1608.03983, one cycle).
    * linear: a straight line.
    * wsd: stable, then a straight line over the last `decay_steps` (Hu et al., MiniCPM, arXiv:2404.06395; the linear
      form of the decay as in Hagele et al., arXiv:2405.18392).
    * constant.

    The others have the names of transformers and its values at every step: their warm-up begins at 0, one step later
    than that of the four.
    """

    kind: str
    peak: float  # learning rate after warm-up
    steps: int  # last step; steps are counted from 1
    warmup_steps: int = 0  # the last of them has the peak rate
    decay_steps: int = 0  # steps of the decay of wsd and warmup_stable_decay
    min_ratio: float = 0.0  # rate over the peak that the decay ends at
    args: Mapping[str, Any] = field(
        default_factory=dict
    )  # of transformers' schedules, by its names

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
            args=training.lr_schedule_args,
        )

    def lr(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Learning rate of a step over the peak, in [0, 1]."""
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
        """Rate over the peak that a schedule of transformers ends at."""
        if "min_lr" in self.args:
            return float(self.args["min_lr"]) / self.peak
        return float(self.args.get("min_lr_rate", self.args.get("min_lr_ratio", self.min_ratio)))


def _with_warmup(after: Callable[[LrSchedule, int], float]) -> Callable[[LrSchedule, int], float]:
    """Return a formula over steps counted from 0 that begins with a linear warm-up from 0."""

    def formula(s: LrSchedule, step: int) -> float:
        return step / s.warmup_steps if step < s.warmup_steps else after(s, step)

    return formula


def _progress(s: LrSchedule, step: int) -> float:
    return (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps)


def _wave(s: LrSchedule, progress: float) -> float:
    """Cosine from 1 that passes `num_cycles` periods; half a period by default."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * s.args.get("num_cycles", 0.5) * progress))


def _floored(s: LrSchedule, factor: float) -> float:
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
    """Cosine to `min_lr` that is one step ahead; its warm-up begins at `warmup_lr_rate`, or at one step's share."""
    warm, first = s.warmup_steps, s.args.get("warmup_lr_rate")
    if step < warm and first is None:
        return (step + 1.0) / max(1.0, warm)
    if step < warm:
        return float(first + (1.0 - first) * step / max(1, warm - 1))
    progress = (step - warm + 1.0) / max(1.0, s.steps - warm)
    return _floored(s, _wave(s, progress))


_BENDS: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Falls from 1 to 0 over a progress from 0 to 1."""


def _stable(s: LrSchedule, step: int) -> float:
    warm, decay = s.warmup_steps, s.args.get("num_decay_steps", s.decay_steps)
    stable = s.args.get("num_stable_steps", s.steps - warm - decay)
    if step < warm:
        rise = _BENDS[s.args.get("warmup_type", "linear")]
        return _floored(s, rise(1.0 - step / warm))
    if step < warm + stable:
        return 1.0
    if step >= warm + stable + decay:
        return s.least
    progress, kind = (step - warm - stable) / max(1, decay), s.args.get("decay_type", "cosine")
    return _floored(s, _wave(s, progress) if kind == "cosine" else _BENDS[kind](progress))


_TRANSFORMERS: Final = MappingProxyType(
    {
        "constant_with_warmup": _with_warmup(lambda _, __: 1.0),
        "cosine_with_min_lr": _with_warmup(lambda s, n: _floored(s, _wave(s, _progress(s, n)))),
        "cosine_with_restarts": _with_warmup(_restarts),
        "cosine_warmup_with_min_lr": _min_lr_after_warmup,
        "inverse_sqrt": _with_warmup(_inverse_sqrt),
        "polynomial": _with_warmup(_polynomial),
        "warmup_stable_decay": _stable,
    }
)
"""Factor of the step that has so many before it, by transformers' name of the schedule."""
