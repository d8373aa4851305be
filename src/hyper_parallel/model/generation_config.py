"""Reader of `generation_config.json`, which checks the end-of-text token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import ModelUnreadable, abbreviated
from hyper_parallel.received import Limits, foreign_target, read_json

GENERATION: Final = "generation_config.json"
"""File name of the generation config in transformers."""
_LIMITS: Final = Limits(num_bytes=1024**2, num_elements=100_000)


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """Return the content of a model directory's generation_config.json; None if the file does not exist.

    Raises:
        ModelUnreadable: HP305 when the file is a link that `foreign_target` finds, is unreadable or not a JSON object
            within limits, or its `eos_token_id` is not null, a token id or a list of token ids.
    """
    path = directory / GENERATION
    if not path.is_file():
        return None
    if (target := foreign_target(path, directory)) is not None:
        raise _unreadable(path, f"a link to {target}")
    try:
        values = read_json(path, _LIMITS)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    stops = values.get("eos_token_id")
    for stop in stops if isinstance(stops, list) else [stops]:
        is_token = isinstance(stop, int) and not isinstance(stop, bool) and stop >= 0
        if not is_token and (stop is not None or isinstance(stops, list)):
            raise _unreadable(path, f"eos_token_id: {abbreviated(stops)}")
    return values


def _unreadable(path: Path, got: str) -> ModelUnreadable:
    return ModelUnreadable(
        "the generation config is unreadable",
        where=str(path),
        got=got,
        allowed="a JSON object whose `eos_token_id` is a token, a list of tokens, or null",
        hint=f"fetch `{GENERATION}` again from where the model was published",
    )
