"""Presets: config.json files of well-known models that ship with the package, found by name or hub id."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.json")))


def read_preset(name: str) -> dict[str, Any]:
    """The config of a preset; keys that start with `_` are ours: `_source`, `_aliases`."""
    values: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return values


def find_preset(text: str) -> str | None:
    """The preset a name or hub id stands for, or None.

    Case and punctuation do not matter. `org/name` must be a hub id the preset lists, because another organisation may
    publish another model under the same name; a name alone may be the preset's or the last part of such an id.
    """
    wanted = _normal(text)
    if "/" not in text and wanted in preset_names():
        return wanted
    for name in preset_names():
        aliases = read_preset(name).get("_aliases", [])
        known = aliases if "/" in text else [a.rpartition("/")[2] for a in aliases]
        if wanted in map(_normal, known):
            return name
    return None


def nearest_presets(text: str, count: int = 3) -> tuple[str, ...]:
    """Preset names that look most like a name."""
    close = difflib.get_close_matches(
        _normal(text.rpartition("/")[2]), preset_names(), count, cutoff=0.4
    )
    return tuple(close)


def _normal(text: str) -> str:
    return "/".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in text.split("/"))
