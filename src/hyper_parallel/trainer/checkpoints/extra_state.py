"""`extra.json`: JSON values saved with the tensors of a checkpoint (extra values). Imports no framework.

A user's own training loop may store any JSON object. The trainer stores a `TrainerExtra`. A checkpoint that the trainer
loads counts as damaged if its values do not have the types and ranges of `TrainerExtra`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from hyper_parallel.errors import BadValue
from hyper_parallel.received import LimitExceeded, Limits, check_value, read_json
from hyper_parallel.serde import DecodeError, decode
from hyper_parallel.trainer.files import Damaged
from hyper_parallel.units import MiB

EXTRA: Final = "extra.json"
EXTRA_LIMITS: Final = Limits(16 * MiB)

CheckExtra = Callable[[int, dict[str, Any]], str]
"""Validator that takes a step and its extra values, and returns an error text, or "" if they are valid."""

_OPEN: Final = ConfigDict(strict=True, extra="allow")
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 53)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


@with_config(_OPEN)
class _Position(TypedDict):
    """Position of a run in its training data."""

    step: _Count
    sequences_seen: _Count
    sequences_per_step: _Positive
    fingerprint: str
    seed: int
    shuffle: bool
    num_sequences: NotRequired[_Count]
    place: NotRequired[tuple[_Count, _Count, _Count] | tuple[_Count, _Count, _Count, str]]


@with_config(_OPEN)
class _Resume(TypedDict):
    """Record of one resume: the step, and the recipe keys that changed since the checkpoint."""

    step: _Count
    changed: dict[str, Any]


@with_config(_OPEN)
class _Stopping(TypedDict):
    """State of early stopping: lowest held-out loss, and number of consecutive evaluations without improvement."""

    best: _Number | None
    waited: _Count


@with_config(_OPEN)
class _Scale(TypedDict):
    """State of the dynamic loss scale: its value, and number of finite steps since the last change or overflow."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: _Count


@with_config(_OPEN)
class TrainerExtra(TypedDict):
    """Extra values of a checkpoint written by the trainer; checkpoints of earlier versions may lack some."""

    data: _Position
    run: NotRequired[dict[str, Any]]
    metrics: NotRequired[dict[str, _Number]]
    resumes: NotRequired[list[_Resume]]
    early_stopping: NotRequired[_Stopping]
    loss_scale: NotRequired[_Scale]
    snapshot: NotRequired[str]


@with_config(_OPEN)
class ImportedExtra(TypedDict):
    """Extra values of an imported model, which is stored as a checkpoint of step 0."""

    run: NotRequired[dict[str, Any]]


def check_trainer_extra(step: int, extra: dict[str, Any]) -> str:
    """Return an error text for the extra values of a trainer's checkpoint or an imported model, or "" if valid."""
    try:
        decode(TrainerExtra if step else ImportedExtra, extra, extra="allow")
    except DecodeError as error:
        return str(error)
    if step and extra["data"]["step"] != step:
        return f"$.data.step: {extra['data']['step']} in the checkpoint of step {step}"
    return ""


def encode_extra(extra: dict[str, Any]) -> str:
    """Return extra values as the text of `extra.json`; raise LimitExceeded if `read_extra` would reject its size."""
    text = json.dumps(extra, indent=1, sort_keys=True) + "\n"
    if len(text) > EXTRA_LIMITS.num_bytes:
        raise LimitExceeded(f"{len(text):,} bytes, more than {EXTRA_LIMITS.num_bytes:,}")
    check_value(extra, EXTRA_LIMITS)
    return text


def normalize_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Return extra values as `read_extra` will return them, for example with lists for tuples.

    Raises:
        BadValue: HP102 for a value that is not JSON, and for values that are too large.
    """
    extra = {name: json_value(name, value) for name, value in extra.items()}
    try:
        encode_extra(extra)
    except LimitExceeded as error:
        raise BadValue(
            "the extra values of the checkpoint are too large",
            got=str(error),
            hint="save large states as tensors of the model, or in a file of your own",
        ) from None
    return extra


def json_value(name: str, value: Any) -> Any:
    """Return `value` after a JSON round trip.

    Raises:
        BadValue: HP102 for a value that is not JSON; `name` names it in the error.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise BadValue(
            f"`{name}` cannot be saved with a checkpoint: it is not a JSON value",
            got=type(value).__name__,
            allowed="numbers, strings, True, False, None, and lists and dicts of them",
            hint="store numbers, strings, or lists of numbers (`value.tolist()`) instead",
        ) from error


def read_extra(checkpoint: Path) -> dict[str, Any]:
    """Return the extra values of a checkpoint; raise Damaged if the file is not a JSON object within the limits."""
    path = checkpoint / EXTRA
    try:
        extra = read_json(path, EXTRA_LIMITS)
    except (OSError, ValueError) as error:
        raise Damaged(path, f"not readable as JSON ({error})") from None
    if not isinstance(extra, dict):
        raise Damaged(path, "no JSON object")
    return extra
