"""Commands and overrides in a hint, pasted: into the command line and into a recipe.

A pasted override has to be accepted by its own key. Whether the recipe is then complete depends on the run: tests that
provoke an error through a command paste its hint into the same command.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

RECIPE = "model: {path: llama-3-8b}\ndata: {source: words.jsonl}\n"
COMMAND = re.compile(r"hyper-parallel ((?:(?! or |, |;|`| \(|\) ).)+)")
OPTION = re.compile(r"(?:^|leave out |give )(--[a-z][a-z-]*)")
CALL = re.compile(r"[\w.]+\([^()]*\)")
"""Python that is pasted into a script: its keywords are no keys of a recipe."""
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

    value = r"\{[^}]*\}|\[[^\]]*\]|<[^>]*>|[^\s,`;')]+"
    return re.compile(
        rf"(?<![\w.])((?:{'|'.join(Recipe.model_fields)})(?:\.[a-z_0-9]+)*)=({value})"
    )


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
