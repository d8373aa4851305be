"""Contradictions of a learning-rate schedule with its arguments."""

from __future__ import annotations

from typing import Any, Final

from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules
from hyper_parallel.config._sections import Training
from hyper_parallel.config.schedules import SCHEDULE_ARGS

_WITH_MIN_RATIO: Final = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""Schedules of transformers that use `training.min_lr_ratio`."""


def _invalid_arguments(recipe: Recipe) -> list[dict[str, Any]]:
    known, invalid = SCHEDULE_ARGS.get(recipe.training.lr_schedule, {}), []
    for key, value in recipe.training.lr_schedule_args.items():
        names = {"key": key, "value": value}
        if not (allowed := known.get(key, ())):
            names |= {
                "problem": "has no such argument",
                "allowed": ", ".join(known) or "no arguments",
            }
            invalid.append(names)
        elif not _is_valid(key, value, allowed):
            words = ", ".join(map(_describe, allowed))
            invalid.append(names | {"problem": "does not accept this value", "allowed": words})
    return invalid


def _is_valid(key: str, value: Any, allowed: tuple[Any, ...]) -> bool:
    if not isinstance(allowed[0], type):
        return value in allowed
    # A timescale of 0 is a division by 0; negative numbers can raise the learning rate after its peak.
    return type(value) in allowed and value >= 0 and not (key == "timescale" and value == 0)


def _describe(allowed: Any) -> str:
    return {int: "an integer >= 0", float: "a number >= 0"}.get(allowed, str(allowed))


def _unused_ratio(recipe: Recipe) -> dict[str, str] | None:
    training, name = recipe.training, recipe.training.lr_schedule
    is_default = training.min_lr_ratio == Training.model_fields["min_lr_ratio"].default
    if is_default or name not in SCHEDULE_ARGS or name in _WITH_MIN_RATIO:
        return None
    change = "training.min_lr_ratio=null"
    if name == "polynomial" and training.min_lr_ratio < 1 and "lr_end" not in training.lr_schedule_args:
        return {"change": f"training.lr_schedule_args.lr_end={training.min_lr_ratio * training.lr:g} {change}"}
    if name == "polynomial" or training.lr_schedule_args:
        return {"change": change}
    return {"change": f"training.lr_schedule=cosine`, or `{change}"}


def _high_end(recipe: Recipe) -> dict[str, float] | None:
    training = recipe.training
    end = training.lr_schedule_args.get("lr_end", 1e-7)
    is_high = isinstance(end, (int, float)) and end >= training.lr
    if training.lr_schedule != "polynomial" or not is_high:
        return None
    return {"end": end, "lower": training.lr / 10}


SCHEDULE_RULES: Final[Rules] = (
    Rule("training.lr_schedule_args", _invalid_arguments,
         "the schedule {training.lr_schedule} {problem}", "lr_schedule={training.lr_schedule}, {key}={value!s}",
         "set `training.lr_schedule_args.{key}=null`", "{allowed}"),
    Rule("training.min_lr_ratio", _unused_ratio,
         "`training.min_lr_ratio` has no effect on the schedule {training.lr_schedule}",
         "lr_schedule={training.lr_schedule}, min_lr_ratio={training.min_lr_ratio:g}",
         "set `{change}`"),
    Rule("training.lr_schedule_args", _high_end,
         "the schedule polynomial must end below the peak learning rate",
         "lr_end={end:g}, lr={training.lr:g}", "set `training.lr_schedule_args.lr_end={lower:g}`"),
    Rule("training.lr_schedule_args",
         lambda r: r.training.lr_schedule in SCHEDULE_ARGS
         and {"min_lr", "min_lr_rate"} <= {*r.training.lr_schedule_args} and r.training.lr_schedule_args,
         "`min_lr` and `min_lr_rate` are two forms of one value", "min_lr={min_lr!s}, min_lr_rate={min_lr_rate!s}",
         "set `training.lr_schedule_args.min_lr=null`"),
)  # fmt: skip
