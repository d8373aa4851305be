"""Existing paths with a name close to a missing one, for error hints."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hyper_parallel.received import Limits, read_text

_MOST_ENTRIES: Final = 2000
"""Maximum number of directory entries that are compared for a hint."""
_SIMILAR: Final = 0.65
"""Minimum similarity of names, by `difflib`."""
_MOST_TRIED: Final = 5
"""Maximum number of similar names per folder that `fits` checks, because `fits` may open files. Not measured."""
RECIPE_FOLDER: Final = "recipes"
"""Folder below the working directory into which `hyper-parallel init` writes recipes."""
_RECIPE_BYTES: Final = 65536
_SECTION: Final = re.compile(r"^(model|extends|model_name_or_path) *:", re.MULTILINE)
_RECORDS: Final = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
_COMPRESSED: Final = (".gz", ".zst")


def nearest_path(
    text: str,
    folders: Iterable[str | os.PathLike[str]] = (),
    fits: Callable[[Path], bool] = lambda _: True,
) -> str | None:
    """Return the existing path most likely meant by a missing one; None when no path is similar.

    Candidates in order: the same name in the working directory or in one of `folders`, a similar name in the folder of
    the missing path, a similar name in the working directory or in one of `folders`.

    Args:
        text: The missing path.
        folders: Further folders to search, such as that of a recipe. A path found there is returned with its folder.
        fits: Function that returns whether the caller can use a path; other paths are skipped. Default: use any path.
    """
    try:
        missing = Path(text).expanduser()
        places = list(dict.fromkeys([missing.parent, Path(), *map(Path, folders)]))
        roots = [place for place in places if place.is_dir()]
        for root in roots:
            same = root / missing.name
            if missing.name and same != missing and same.exists() and fits(same):
                return str(same)
        for root in roots:
            names = [name for name in _names(root) if root / name != missing]
            near = difflib.get_close_matches(missing.name, names, _MOST_TRIED, _SIMILAR)
            for name in near:
                if fits(root / name):
                    return str(root / name)
    except (OSError, ValueError, RuntimeError):  # not a valid path: too long, an unknown user
        return None
    return None


def export_hint(text: str) -> str | None:
    """Return a hint with the command that creates a missing path `RUN_DIR/export`; None for other paths."""
    path = Path(text)
    if path.name != "export" or path.parent == Path():
        return None
    return f"train the run that writes it: hyper-parallel train RECIPE.yaml {shlex.quote(f'output_dir={path.parent}')}"


def is_data_file(path: Path) -> bool:
    """Return whether a file name has the extension of a data file, such as `.jsonl` or `.csv.gz`."""
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return name.suffix.lower() in _RECORDS


def is_recipe_file(path: Path) -> bool:
    """Return whether a path is a YAML file with a top-level key that names a model or a parent recipe."""
    try:
        if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
            return False
        with path.open(encoding="utf-8", errors="replace") as file:
            return _SECTION.search(file.read(_RECIPE_BYTES)) is not None
    except OSError:
        return False


def some_recipe(data: str = "") -> str | None:
    """Return the path of a recipe in the working directory or its folder `recipes`; None without one.

    Recipes whose text contains `data`, the name of a data file, are preferred. Otherwise the working directory is
    preferred to `recipes`, and names earlier in alphabetical order.
    """
    recipes: list[Path] = []
    for folder in (Path(), Path(RECIPE_FOLDER)):
        try:
            names = sorted(_names(folder)) if folder.is_dir() else []
        except OSError:
            continue
        recipes += [folder / name for name in names if is_recipe_file(folder / name)]
    recipes.sort(key=lambda path: not _contains(path, data))
    return str(recipes[0]) if recipes else None


def _contains(path: Path, words: str) -> bool:
    try:
        return words in read_text(path, Limits(num_bytes=1024**2))
    except (OSError, ValueError):
        return False


def command_with_data(command: str, data: str) -> str:
    """Return `command` with the recipe of `some_recipe` and the file `data`; `hyper-parallel init` without a recipe."""
    recipe = some_recipe(Path(data).name)
    if recipe is None:
        return "hyper-parallel init"
    return shlex.join(["hyper-parallel", *command.split(), recipe, f"data.source={data}"])


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
