"""Errors for options that a command would ignore, because another option is given or missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from typer import Context

from hyper_parallel.cli.app import is_quiet
from hyper_parallel.errors import Contradiction


def typed_options(ctx: Context) -> dict[str, Any]:
    """Return a dict from name to value of the options and arguments on the command line, without defaults."""
    names = [param.name or "" for param in ctx.command.params]
    typed = [n for n in names if str(ctx.get_parameter_source(n)).endswith("COMMANDLINE")]
    return {name: ctx.params[name] for name in typed}


def refuse_ignored(
    ctx: Context, excluded: Mapping[str, Collection[str]], needed: Mapping[str, str] | None = None
) -> None:
    """Raise an error if the command line has an option without effect.

    Args:
        ctx: Context of the running command. Options are named by their parameters; `quiet` is `--quiet`.
        excluded: For an option, the options that it leaves without effect.
        needed: For an option, the option without which it has no effect.

    Do not list options that only forbid something, such as `--no-code`.

    Raises:
        Contradiction: HP104 for the first option of `excluded`, else of `needed`, whose rule is broken.
    """
    typed = {*typed_options(ctx), *(["quiet"] if is_quiet() else [])}
    words = {p.name: max(p.opts, key=len) for p in ctx.command.params} | {"quiet": "--quiet"}
    for name, others in excluded.items():
        if name in typed and (ignored := [words[n] for n in words if n in typed and n in others]):
            _refuse(ignored, f"with {words[name]}", f"or {words[name]}")
    for name, other in (needed or {}).items():
        if name in typed and other not in typed:
            _refuse([words[name]], f"without {words[other]}", f"or give {words[other]}")


def _refuse(ignored: list[str], condition: str, alternative: str) -> None:
    names = ", ".join(ignored)
    raise Contradiction(
        f"{names} {'has' if len(ignored) == 1 else 'have'} no effect {condition}",
        where=ignored[0],
        hint=f"leave out {names}, {alternative}",
    )
