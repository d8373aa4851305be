"""Commands and overrides in a hint, pasted: into the command line and into a recipe.

A pasted override has to be accepted by its own key. Whether the recipe is then complete depends on the run: tests that
provoke an error through a command paste its hint into the same command.
"""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from hyper_parallel.errors import HyperParallelError

RECIPE = "model: {path: llama-3-8b}\ndata: {source: words.jsonl}\n"
COMMAND = re.compile(r"hyper-parallel ((?:(?! or |, |;|`| \(|\) ).)+)")
OPTION = re.compile(r"(?:^|leave out |give )(--[a-z][a-z-]*)")
CALL = re.compile(r"[\w.]+\([^()]*\)")
"""Python that is pasted into a script: its keywords are no keys of a recipe."""
RENAMED = re.compile(r"the key is `([\w.]+)`")
PLACEHOLDER = re.compile(r"<|^\"|\b[A-Z][A-Z_']+\b|\.\.\.$|^[A-Z]$")
"""A value that only the user knows, or that is computed."""


def problems_of(hint: str) -> Iterator[str]:
    """Yield why a command, an option or an override of the hint does not exist or is not accepted."""
    for match in COMMAND.finditer(hint):
        yield from _command_problems(match[1])
    known = _options()
    yield from (f"no command has {name}" for name in OPTION.findall(hint) if name not in known)
    for key, value in _override_pattern().findall(CALL.sub("", hint)):
        if problem := _override_problem(key, value):
            yield problem


@cache
def _commands() -> dict[str, Any]:
    from hyper_parallel.cli import application

    commands: dict[str, Any] = {}
    for name, command in typer.main.get_command(application()).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {word}": one for word, one in inner.items()} or {name: command}
    return commands


@cache
def _options() -> frozenset[str]:
    params = [param for command in _commands().values() for param in command.params]
    return frozenset(name for param in params for name in (*param.opts, *param.secondary_opts))


def _command_problems(text: str) -> Iterator[str]:
    words = shlex.split(text)
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in _commands()), None)
    if name is None:
        yield f"no command `{text}`"
        return
    params = _commands()[name].params
    known = {"--help", *(n for param in params for n in (*param.opts, *param.secondary_opts))}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    yield from (f"`{name}` has no option {option}" for option in given if option not in known)


@cache
def _override_pattern() -> re.Pattern[str]:
    from hyper_parallel.config import Recipe

    value = r"\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|<[^>]*>|[^\s,`;')]+"
    return re.compile(rf"(?<![\w.])((?:{'|'.join(Recipe.model_fields)})(?:\.[a-z_0-9]+)*)=({value})")


@cache
def _recipe() -> Path:
    path = Path(tempfile.mkdtemp()) / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@cache
def _override_problem(key: str, value: str) -> str | None:
    from hyper_parallel.config import load_recipe
    from hyper_parallel.errors import BadValue, HyperParallelError, UnknownKey

    try:
        load_recipe(_recipe(), [f"{key}={value}"])
    except UnknownKey as error:
        return error.what
    except BadValue as error:
        return None if PLACEHOLDER.search(value) else f"{key}={value}: {error.what}"
    except HyperParallelError:
        pass
    return None


WORDS = {
    "RECIPE.yaml": "my.yaml", "RUN_DIR": "runs/run", "MODEL_DIR": "model.json", "VALUE": "1", "REGISTRY": "a.b",
    "TAG": "1",
    "HOST": "node", "FILE.jsonl": "my_data.jsonl", "FILE": "my_data.jsonl", "OUT.jsonl": "out.jsonl",
}  # fmt: skip


def filled(hint: str) -> str:
    """Return a hint with values for the words that stand for something only the user knows."""
    for word, value in WORDS.items():
        hint = re.sub(rf"\b{re.escape(word)}(?![\w.])", value, hint)
    return hint


def pasted(words: list[str], error: HyperParallelError) -> list[str] | None:
    """Return the words of the command after its hint is pasted; None for a command of another program."""
    hint = filled(error.hint)
    if match := re.search(r"hyper-parallel ((?:(?! or |, with|;|`).)*)", hint):
        return shlex.split(match[1])
    if hint.startswith("remove the key") or (renamed := RENAMED.match(hint)):
        key, new = _wrong_key(error), "" if hint.startswith("remove") else renamed[1]
        given = [word for word in words if word.partition("=")[0] == key]
        assert given, f"not pasted: {error.hint}"
        rest = [word for word in words if word not in given]
        return [*rest, *(f"{new}={word.partition('=')[2]}" for word in given if new)]
    if hint.startswith("did you mean"):
        given, meant = str(error.where or error.got).partition(": ")[0], hint.split("`")[1]
        assert {given, str(error.got)} & {*words}, (words, given)
        return [meant if word in (given, str(error.got)) else word for word in words]
    if hint.startswith(("ls ", "hf ", "mv ", "df ")):
        return None
    if hint.startswith("pip install"):
        hint = hint.partition(": ")[2]
        assert hint, "names how to do without the package"
    if hint.startswith("--"):
        name, left = hint.split()[0], []
        for before, word in zip(["", *words], words, strict=False):
            left += [] if name in (before, word) and word != words[0] else [word]
        return [*left, *shlex.split(hint)]
    first = hint.partition(", or")[0]
    text = " ".join(re.findall("`([^`]*)`", first)) if "`" in first else first
    added = [word for word in shlex.split(text) if "=" in word]
    assert added, f"not pasted: {error.hint}"
    kept = list(words)
    if error.code in ("HP101", "HP102") or "override" in error.what:
        key = re.search(r"(?:: |^)([\w.\[\]]+)", str(error.where).partition(" (")[0].rpartition(": ")[2])
        named = key[1].partition("[")[0] if key else ""
        kept = [w for w in words if not (named and re.match(rf"{re.escape(named)}\b", w))]
        kept = [w for w in kept if w.partition("=")[0] != ".".join(named.split(".")[:2])]
        kept = [w for w in kept if not named.startswith(f"{w.partition('=')[0]}.")]
        if "override" in error.what:
            kept = words[: words.index(str(error.got))]
    names = {word.partition("=")[0] for word in added}
    return [*(w for w in kept if w.partition("=")[0] not in names), *added]


def corrected_recipe(error: HyperParallelError) -> tuple[Path, str] | None:
    """Return the recipe that an error names, and its text with the hint followed: a line, another key or no key.

    None if the hint says none of these, or the wrong key is not in a file.
    """
    hint, name = error.hint or "", str(error.where).partition(": ")[0]
    line, renamed = re.match(r"write `([\w.]+): (.+)`", hint), RENAMED.match(hint)
    if not (line or renamed or hint.startswith("remove the key")):
        return None
    *sections, last = _wrong_key(error).split(".")
    try:
        tree = yaml.safe_load(Path(name).read_text())
        value = _section(tree, sections).pop(last)
        if line or renamed:
            *sections, last = (line or renamed)[1].split(".")
            _section(tree, sections)[last] = yaml.safe_load(line[2]) if line else value
    except (OSError, yaml.YAMLError, AttributeError, TypeError, KeyError):
        return None
    return Path(name), json.dumps(tree)


def _wrong_key(error: HyperParallelError) -> str:
    return str(error.where).partition(" (")[0].rpartition(": ")[2]


def _section(tree: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    for name in names:
        tree = tree.setdefault(name, {})
    return tree


def read_only(words: list[str]) -> list[str]:
    """Return the words of a command that reads the recipe of a longer one, with its overrides."""
    recipe, *overrides = (word for word in words[1:] if "=" in word or "." in word)
    return ["config", "show", recipe, *overrides]
