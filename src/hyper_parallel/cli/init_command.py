"""`hyper-parallel init`: copy a recipe from the package as a starting point."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Annotated, Final

import typer

from hyper_parallel.cli.app import say
from hyper_parallel.errors import BadValue, OutputNotWritable, written
from hyper_parallel.received import holds_text

_FIRST: Final = "quickstart"
"""Prefix of the recipe names that are listed first."""
_NAMED = re.compile(
    r"^extends: *(\S+)|(?:path: *|source: *|python recipes/)((?:models|data)/\S+\.(?:jsonl?|py))",
    re.MULTILINE,
)
"""Pattern of the parent, model, data and script files that a recipe names."""


def init(
    name: Annotated[str | None, typer.Argument(help="Recipe to write. Default: list all.", show_default=False)] = None,
) -> None:
    """Write a recipe and the files it needs into ./recipes; without a name, list the recipes."""
    folder = _folder()
    stems = (path.stem for path in folder.glob("*.yaml"))
    names = sorted(stems, key=lambda stem: (not stem.startswith(_FIRST), stem))
    if name is None:
        for known in names:
            say(f"{known}\n{_description(folder / f'{known}.yaml')}")
        say(f"\nnext:\n  hyper-parallel init {names[0]}")
        return
    if name not in names:
        near = get_close_matches(name, names, 1) or names[:1]
        hint = f"hyper-parallel init {near[0]}"
        raise BadValue("no recipe has this name", got=name, allowed=names, hint=hint)
    for target, text in _needed(folder, f"{name}.yaml").items():
        with written(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            exists = target.exists()
            if not exists:
                target.write_text(text, encoding="utf-8")
        say(f"unchanged: {target}" if exists else f"written: {target}")
    say("\nnext:\n" + "\n".join(_next_lines(folder, name, names)))


def _description(path: Path) -> str:
    """Return the comment at the head of a recipe file, wrapped and indented; indented lines of it are not wrapped."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    text = [line.removeprefix("#").removeprefix(" ") for line in lines]
    prose = " ".join(line for line in text if not line.startswith(" "))
    blocks = [textwrap.fill(prose, 76), *(line for line in text if line.startswith(" "))]
    return textwrap.indent("\n".join(blocks), "    ")


def _next_lines(folder: Path, name: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the next steps as lines: train recipes whose output this one reads, edit keys of missing files, train."""
    from hyper_parallel.config import load_recipe, paths_read
    from hyper_parallel.hub import parse_name
    from hyper_parallel.model import find_preset

    target = f"recipes/{name}.yaml"
    writers = {load_recipe(folder / f"{one}.yaml").recipe.output_dir: one for one in names}
    first, edits = [], []
    for key, value in paths_read(load_recipe(target).recipe):
        known = find_preset(value) is not None or parse_name(value) is not None
        is_named = key == "grpo.reward_funcs" and "/" not in value
        if Path(value).exists() or is_named or (key == "model.path" and known):
            continue
        writer = next((one for out, one in writers.items() if Path(out) in Path(value).parents), None)
        if writer is not None:
            first += [
                f"  hyper-parallel init {writer}",
                f"  hyper-parallel train recipes/{writer}.yaml",
            ]
        else:
            edits.append(f"  # edit {target}: {key} ({value} does not exist)")
    yield from [*first, *edits, f"  hyper-parallel train {target}"]


def _folder() -> Path:
    """Return the recipe folder of the package, or of the checkout for an editable install."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def _unused(name: str) -> str:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in names if not os.path.lexists(path))


def _needed(folder: Path, name: str) -> dict[Path, str]:
    """Return the texts of a recipe and the files it names, by target path; HP105 if a target has other content."""
    target, text = Path("recipes") / name, (folder / name).read_text(encoding="utf-8")
    needed: dict[Path, str] = {}
    for parent, data in _NAMED.findall(text) if name.endswith(".yaml") else ():
        if (folder / (file := parent or data)).is_file():  # other files are the user's
            needed |= _needed(folder, file)
    with written(target):
        if os.path.lexists(target) and not holds_text(target, text):
            raise OutputNotWritable(
                "a different file with this name exists",
                got=target,
                hint=shlex.join(["mv", str(target), _unused(f"{target}.mine")]),
            )
    return {**needed, target: text}
