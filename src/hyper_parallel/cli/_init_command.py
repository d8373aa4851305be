"""`hyper-parallel init`: a recipe to start from, copied out of the package."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli._frame import say
from hyper_parallel.errors import BadValue, OutputNotWritable

_NAMED = re.compile(
    r"^extends: *(\S+)|(?:path: *|source: *)((?:models|data)/\S+\.jsonl?)", re.MULTILINE
)
"""Other files of the folder that a recipe names."""


def init(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to write. Default: list them.", show_default=False),
    ] = None,
) -> None:
    """Write a recipe, and what it needs, into ./recipes; without a name, list the recipes."""
    folder = _folder()
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name is None:
        for known in names:
            first = (folder / f"{known}.yaml").read_text(encoding="utf-8").partition("\n")[0]
            say(f"{known}\n    {first.removeprefix('# ')}")
        say(f"\nnext:\n  hyper-parallel init {names[1]}")
        return
    if name not in names:
        near = get_close_matches(name, names, 1) or names[1:2]
        hint = f"hyper-parallel init {near[0]}"
        raise BadValue("there is no such recipe", got=name, allowed=names, hint=hint)
    for target, text in _needed(folder, f"{name}.yaml").items():
        _write(target, text)
    say(f"\nnext:\n  hyper-parallel train recipes/{name}.yaml")


def _folder() -> Path:
    """The recipes of the package; of an editable install those of the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def _needed(folder: Path, name: str) -> dict[Path, str]:
    """Return the text of a file and of those that it names, by where they are to be; a file that is there is the same.

    Raises:
        OutputNotWritable: HP105 for another file of that name, or one that cannot be read.
    """
    target, text = Path("recipes") / name, (folder / name).read_text(encoding="utf-8")
    needed: dict[Path, str] = {}
    for found in _NAMED.findall(text):
        if (folder / (named := found[0] or found[1])).is_file():  # else it is a user's own
            needed |= _needed(folder, named)
    try:
        if os.path.lexists(target) and target.read_text(encoding="utf-8") != text:
            raise OutputNotWritable(
                "there is another recipe of that name",
                got=target,
                hint=f"mv {target} {target}.mine",
            )
    except (OSError, UnicodeDecodeError) as error:
        raise OutputNotWritable("the recipe cannot be written", got=f"{target}: {error}") from error
    return {**needed, target: text}


def _write(target: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        OutputNotWritable: HP105 for a folder that cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise OutputNotWritable(
            "the recipe cannot be written", got=f"{target}: {error.strerror}"
        ) from error
    say(f"written: {target}")
