"""Errors of sources that another recipe key than `data.source` names: an entry of a list, or `data.validation`.

Readers of a source write locations and hints for `data.source`. For other keys, `named_by` changes them, because a
pasted hint would otherwise change the other sources too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hyper_parallel.errors import HyperParallelError

MAIN: Final = "data.source"
VALIDATION: Final = "data.validation"
_OF_ENTRIES: Final = ("source", "name", "split", "format", "text_key", "columns", "roles", "ignore_keys")
"""Keys of `data` that an entry of a list of sources may have."""
_OF_BOTH: Final = ("name", "format", "text_key", "columns", "roles")
"""Keys of `data` that describe the records of the training data and of `data.validation`."""
_OVERRIDE: Final = re.compile(r"(stage|data\.(\w+)(?:\.(\w+))?)=(.*)", re.DOTALL)

Override = tuple[str, str, str]
"""Key of `data` ("" for `stage`), key below it ("" if there is none), and value."""


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """Change locations and hints of coded errors in the block for a source that the recipe key `key` names.

    `key` is `MAIN`, `VALIDATION`, or an entry such as `data.source[1]`.
    """
    try:
        yield
    except HyperParallelError as error:
        if key != MAIN:
            if (error.where or "").startswith(f"{MAIN}: "):
                error.where = f"{key}{str(error.where).removeprefix(MAIN)}"
            error.hint = error.hint and _hint(error.hint, key)
        raise


def _hint(hint: str, key: str) -> str:
    """Return a hint for the source named by `key`, given the hint for `data.source`."""
    changes = _overrides(hint)
    if not changes:
        return hint.replace(f"`{MAIN}`", f"`{key}`")
    return _validation_hint(hint, changes) if key == VALIDATION else _entry_hint(hint, changes, key)


def _overrides(hint: str) -> list[Override]:
    """Return the overrides in a hint that consists of overrides of `data` and `stage`; [] for any other hint."""
    try:
        matches = [_OVERRIDE.fullmatch(word) for word in shlex.split(hint)]
    except ValueError:
        return []
    valid = [match for match in matches if match is not None]
    return [(m[2] or "", m[3] or "", m[4]) for m in valid] if len(valid) == len(matches) else []


def _validation_hint(hint: str, changes: Sequence[Override]) -> str:
    resets = ("auto", "null")
    if any(not key or (key in _OF_BOTH and value not in resets) for key, _, value in changes):
        return f"give the records of `{VALIDATION}` the keys and the format of the training data"
    if ("split", "", "train") in changes:
        return f"set `{VALIDATION}_split` to the split for evaluation"
    if any(key == "seq_len" for key, _, _ in changes):
        return f"add data to `{VALIDATION}`, or train with {hint}"
    hint = hint.replace(f"{MAIN}=", f"{VALIDATION}=")
    return hint.replace("data.split=", "data.validation_split=")


def _entry_hint(hint: str, changes: Sequence[Override], key: str) -> str:
    if any(not name for name, _, _ in changes):
        return f"remove the entry `{key}`, or use a stage that reads its records"
    if not all(name in _OF_ENTRIES for name, _, _ in changes):
        return hint  # a key of all sources
    if any(value == "null" for _, _, value in changes):
        names = " and ".join(f"`{name}`" for name, _, _ in changes)
        return f"set {names} only in those entries of `{MAIN}` to which they apply"
    lines: dict[str, str] = {}
    for name, inner, value in changes:
        earlier = lines[name].rstrip("}") + ", " if name in lines else f"{name}: {{"
        lines[name] = f"{earlier}{inner}: {value}}}" if inner else f"{name}: {value}"
    return f"set in the entry `{key}`: {', '.join(lines.values())}"
