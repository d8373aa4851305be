"""Errors of sources that another recipe key than `data.source` names: an entry of a list, or `data.validation`.

Readers of a source write locations and hints for `data.source`. `SourceKey` changes them for other keys, because a
pasted hint would otherwise change the other sources too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hyper_parallel.errors import Caller, overrides, value_text
from hyper_parallel.trainer.data.record_keys import as_value

MAIN: Final = "data.source"
VALIDATION: Final = "data.validation"
_OF_ENTRIES: Final = ("source", "name", "split", "format", "text_key", "columns", "roles", "ignore_keys")
"""Keys of `data` that an entry of a list of sources may have."""
_TEXTS: Final = ("name", "split", "text_key")
"""Keys whose overrides are literal texts, which YAML could read as another type."""
_OF_BOTH: Final = ("name", "format", "text_key", "columns", "roles")
"""Keys of `data` that describe the records of the training data and of `data.validation`."""


@dataclass(frozen=True, slots=True)
class SourceKey(Caller):
    """Recipe key that names a source in errors: `MAIN`, `VALIDATION`, or an entry such as `data.source[1]`."""

    key: str = MAIN

    def where(self, text: str) -> str:
        """Return a location with `key` in place of `data.source`."""
        return f"{self.key}{text.removeprefix(MAIN)}" if text.startswith(f"{MAIN}: ") else text

    def sentence(self, text: str) -> str:
        """Return a sentence with `key` in place of `data.source`."""
        return text.replace(f"`{MAIN}`", f"`{self.key}`")

    def hint(self, changes: Mapping[str, object]) -> str | None:
        """Return the hint for another key than `data.source`; None: overrides of the recipe fix the problem."""
        if self.key == MAIN or not all(key == "stage" or key.startswith("data.") for key in changes):
            return None
        return _validation_hint(changes) if self.key == VALIDATION else self._entry_hint(changes)

    def _entry_hint(self, changes: Mapping[str, object]) -> str | None:
        if "stage" in changes:
            return f"remove the entry `{self.key}`, or use a stage that reads its records"
        names = [key.removeprefix("data.").split(".", 1) for key in changes]
        if not all(name[0] in _OF_ENTRIES for name in names):
            return None  # a key of all sources
        if None in changes.values():
            shown = " and ".join(f"`{'.'.join(name)}`" for name in names)
            return f"set {shown} only in those entries of `{MAIN}` to which they apply"
        entry: dict[str, object] = {}
        for (name, *inner), value in zip(names, changes.values(), strict=True):
            former = entry.get(name)
            value = as_value(value) if name in _TEXTS and isinstance(value, str) else value
            entry[name] = {**(former if isinstance(former, dict) else {}), inner[0]: value} if inner else value
        lines = (f"{name}: {value_text(value)}" for name, value in entry.items())
        return f"set in the entry `{self.key}`: {', '.join(lines)}"


def _validation_hint(changes: Mapping[str, object]) -> str:
    names = {key.removeprefix("data.").partition(".")[0]: value for key, value in changes.items()}
    if "stage" in names or any(name in _OF_BOTH and value not in ("auto", None) for name, value in names.items()):
        return f"give the records of `{VALIDATION}` the keys and the format of the training data"
    if names.get("split") == "train":
        return f"set `{VALIDATION}_split` to the split for evaluation"
    if "seq_len" in names:
        return f"add data to `{VALIDATION}`, or train with {overrides(changes)}"
    own = {MAIN: VALIDATION, "data.split": f"{VALIDATION}_split"}
    return overrides({own.get(key, key): value for key, value in changes.items()})
