"""`hyper-parallel init`: a recipe to start from, copied out of the package."""

from __future__ import annotations

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
    _copy(folder, f"{name}.yaml")
    say(f"\nnext:\n  hyper-parallel train recipes/{name}.yaml")


def _folder() -> Path:
    """The recipes of the package; of an editable install those of the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def _copy(folder: Path, name: str) -> None:
    """Copy a file and those that it names; a file that is there stays, and must be the same.

    Raises:
        OutputNotWritable: HP105 for another file of that name, or a folder that cannot be written.
    """
    target, text = Path("recipes") / name, (folder / name).read_text(encoding="utf-8")
    for found in _NAMED.findall(text):
        if (folder / (named := found[0] or found[1])).is_file():  # else it is a user's own
            _copy(folder, named)
    try:
        if target.exists() and target.read_text(encoding="utf-8") != text:
            raise OutputNotWritable(
                "there is another recipe of that name",
                got=target,
                hint=f"mv {target} {target}.mine",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputNotWritable(
            "the recipe cannot be written", got=f"{target}: {error.strerror}"
        ) from error
    say(f"written: {target}")
