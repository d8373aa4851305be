"""Learning-rate schedules by the names of transformers, with the arguments that each takes."""

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
"""Schedules that are those of transformers at every step: names of `lr_scheduler_kwargs`, with types or words."""

_WITH_MIN_RATIO: Final = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""Of those, the ones that `training.min_lr_ratio` is an argument of."""


def check_schedule(training: Training, clash: Callable[..., None]) -> None:
    """Report arguments that the schedule of a recipe does not take, or that its arithmetic does not allow."""
    name, given = training.lr_schedule, training.lr_schedule_args
    known = SCHEDULE_ARGS.get(name, {})
    for key, value in given.items():
        kinds = known.get(key, ())
        is_number = bool(kinds) and isinstance(kinds[0], type)
        right = type(value) in kinds if is_number else value in kinds
        # A negative number or 0 would be divided by, or raise the rate again.
        if right and is_number and (value < 0 or (key == "timescale" and value == 0)):
            right = False
        if not right:
            what = "has no such argument" if not kinds else "does not take this value"
            clash(
                "training.lr_schedule_args",
                f"the schedule {name} {what}",
                f"lr_schedule={name}, {key}={value}",
                "set `training.lr_schedule_args={}`",
                ", ".join(map(_shown, kinds)) if kinds else (", ".join(known) or "no arguments"),
            )
    default = type(training).model_fields["min_lr_ratio"].default
    ends_itself = name in SCHEDULE_ARGS and name not in _WITH_MIN_RATIO
    if ends_itself and training.min_lr_ratio != default:
        end = training.min_lr_ratio * training.lr
        better = f"training.lr_schedule_args={{lr_end: {end:g}}}"
        if name != "polynomial":
            better = "training.lr_schedule=cosine"
        clash(
            "training.min_lr_ratio",
            f"`training.min_lr_ratio` has no effect on the schedule {name}",
            f"lr_schedule={name}, min_lr_ratio={training.min_lr_ratio:g}",
            f"set `{better}` and `training.min_lr_ratio=null`",
        )
    end = given.get("lr_end", 1e-7)
    if name == "polynomial" and isinstance(end, (int, float)) and end >= training.lr:
        clash(
            "training.lr_schedule_args",
            "the schedule polynomial ends below the peak learning rate",
            f"lr_end={end:g}, lr={training.lr:g}",
            f"set `training.lr_schedule_args={{lr_end: {training.lr / 10:g}}}`",
        )
    if {"min_lr", "min_lr_rate"} <= {*given} and name in SCHEDULE_ARGS:
        clash(
            "training.lr_schedule_args",
            "`min_lr` and `min_lr_rate` are two forms of one value",
            f"min_lr={given['min_lr']}, min_lr_rate={given['min_lr_rate']}",
            f"set `training.lr_schedule_args={{min_lr_rate: {given['min_lr_rate']}}}`",
        )


def _shown(kind: Any) -> str:
    return {int: "an integer >= 0", float: "a number >= 0"}.get(kind, str(kind))
