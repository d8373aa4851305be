"""Command line: thin typer commands that import heavy modules when they run.

The module `<command>_command.py` has the function of each command in `_COMMANDS`, or the `typer.Typer` named `app` of
each command with subcommands in `_GROUPS`. Data goes to stdout, logs and errors to stderr.

A `HyperParallelError` is printed without a traceback and exits with status 1, a usage error with 2, Ctrl-C with 130. An
`OSError` of a file or disk, and a missing training package, are printed as a `HyperParallelError`. A closed output pipe
exits with 1. Any other exception is a defect: its traceback is printed and the status is 70.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_COMMANDS = (
    "init", "data", "plan", "train", "parity", "generate", "report", "doctor", "calibrate", "predict",
)  # fmt: skip
_GROUPS = ("checkpoint", "config")


def application(only: str | None = None) -> typer.Typer:
    """Return the application with every command, or only with the command or group `only`."""
    from hyper_parallel.cli.app import build_app

    def named(command: str) -> Any:
        module = import_module(f"{__name__}.{command}_command")
        return getattr(module, command if command in _COMMANDS else "app")

    return build_app(
        [named(c) for c in _COMMANDS if only in (None, c)],
        [named(g) for g in _GROUPS if only in (None, g)],
    )


def main() -> None:
    """Run the `hyper-parallel` command; import only the module of the command that the first argument names, if any."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        from hyper_parallel.cli.overview import overview

        with suppress(OSError):  # on failure, `run` below writes the text again and reports the error
            sys.stdout.write(overview((*_COMMANDS, *_GROUPS)))
            sys.stdout.flush()
            return
    from hyper_parallel.cli.app import run

    first = sys.argv[1] if len(sys.argv) > 1 else None
    run(application(first if first in (*_COMMANDS, *_GROUPS) else None))


__all__ = ["application", "main"]
