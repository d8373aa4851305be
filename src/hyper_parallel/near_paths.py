"""Paths that look like one that does not exist, for hints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_MOST_ENTRIES: Final = 2000
"""Entries of a folder that are compared; a hint is not worth reading more."""


def nearest_path(text: str, folders: Iterable[str | os.PathLike[str]] = ()) -> str | None:
    """Return an existing path that was probably meant by a missing one; None where no path is near.

    The same name in the working directory or in one of the folders comes first, then a near name in the same folder,
    then a near name in those.

    Args:
        text: The missing path.
        folders: Further folders to search, such as that of a recipe; paths in them are returned with the folder.
    """
    try:
        wanted = Path(text).expanduser()
        places = list(dict.fromkeys([wanted.parent, Path(), *map(Path, folders)]))
        roots = [place for place in places if place.is_dir()]
        for root in roots:
            if wanted.name and (root / wanted.name).exists():
                return str(root / wanted.name)
        for root in roots:
            names = _names(root)
            if near := difflib.get_close_matches(wanted.name, names, n=1, cutoff=0.7):
                return str(root / near[0])
    except (OSError, ValueError, RuntimeError):  # no path at all: too long, an unknown user's home
        return None
    return None


def export_hint(text: str) -> str | None:
    """Return the hint for a missing export of a run, which training writes; None for any other path."""
    path = Path(text)
    if path.name != "export" or path.parent == Path():
        return None
    return (
        f"train the run that writes it: hyper-parallel train RECIPE.yaml output_dir={path.parent}"
    )


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
