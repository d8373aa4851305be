"""Learning-rate schedules with transformers' names, and the arguments of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from hyper_parallel.config._sections import Training

ScheduleName = Literal[
    "cosine",
    "wsd",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "polynomial",
    "warmup_stable_decay",
]

_NUMBER: Final = (int, float)
_SHAPES: Final = ("linear", "cosine", "1-sqrt")

SCHEDULE_ARGS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = MappingProxyType(
    {
        "constant_with_warmup": {},
        "cosine_with_min_lr": {"num_cycles": _NUMBER, "min_lr": _NUMBER, "min_lr_rate": _NUMBER},
        "cosine_with_restarts": {"num_cycles": _NUMBER},
        "cosine_warmup_with_min_lr": {
            "num_cycles": _NUMBER,
            "min_lr": _NUMBER,
            "min_lr_rate": _NUMBER,
            "warmup_lr_rate": _NUMBER,
        },
        "inverse_sqrt": {"timescale": _NUMBER},
        "polynomial": {"lr_end": _NUMBER, "power": _NUMBER},
        "warmup_stable_decay": {
            "num_decay_steps": (int,),
            "num_stable_steps": (int,),
            "warmup_type": _SHAPES,
            "decay_type": _SHAPES,
            "min_lr_ratio": _NUMBER,
            "num_cycles": _NUMBER,
        },
    }
)
"""Schedules that equal transformers' at every step: `lr_scheduler_kwargs` names with allowed types or words."""

_WITH_MIN_RATIO: Final = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""Transformers schedules that use `training.min_lr_ratio`."""


def check_schedule(training: Training, conflict: Callable[..., None]) -> None:
    """Report schedule arguments that are unknown or have an invalid value."""
    name, args = training.lr_schedule, training.lr_schedule_args
    known = SCHEDULE_ARGS.get(name, {})
    for key, value in args.items():
        allowed = known.get(key, ())
        is_number = bool(allowed) and isinstance(allowed[0], type)
        is_valid = type(value) in allowed if is_number else value in allowed
        # A timescale of 0 is a division by 0; negative numbers can raise the learning rate after its peak.
        if is_valid and is_number and (value < 0 or (key == "timescale" and value == 0)):
            is_valid = False
        if not is_valid:
            problem = "does not accept this value" if allowed else "has no such argument"
            conflict(
                "training.lr_schedule_args",
                f"the schedule {name} {problem}",
                f"lr_schedule={name}, {key}={value}",
                "set `training.lr_schedule_args={}`",
                ", ".join(map(_describe, allowed))
                if allowed
                else (", ".join(known) or "no arguments"),
            )
    default = type(training).model_fields["min_lr_ratio"].default
    ignores_ratio = name in SCHEDULE_ARGS and name not in _WITH_MIN_RATIO
    if ignores_ratio and training.min_lr_ratio != default:
        end = training.min_lr_ratio * training.lr
        better = f"training.lr_schedule_args={{lr_end: {end:g}}}"
        if name != "polynomial":
            better = "training.lr_schedule=cosine"
        conflict(
            "training.min_lr_ratio",
            f"`training.min_lr_ratio` has no effect on the schedule {name}",
            f"lr_schedule={name}, min_lr_ratio={training.min_lr_ratio:g}",
            f"set `{better}` and `training.min_lr_ratio=null`",
        )
    end = args.get("lr_end", 1e-7)
    if name == "polynomial" and isinstance(end, (int, float)) and end >= training.lr:
        conflict(
            "training.lr_schedule_args",
            "the schedule polynomial must end below the peak learning rate",
            f"lr_end={end:g}, lr={training.lr:g}",
            f"set `training.lr_schedule_args={{lr_end: {training.lr / 10:g}}}`",
        )
    if {"min_lr", "min_lr_rate"} <= {*args} and name in SCHEDULE_ARGS:
        conflict(
            "training.lr_schedule_args",
            "`min_lr` and `min_lr_rate` are two forms of one value",
            f"min_lr={args['min_lr']}, min_lr_rate={args['min_lr_rate']}",
            f"set `training.lr_schedule_args={{min_lr_rate: {args['min_lr_rate']}}}`",
        )


def _describe(allowed: Any) -> str:
    return {int: "an integer >= 0", float: "a number >= 0"}.get(allowed, str(allowed))
