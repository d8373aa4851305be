"""Command line: thin typer commands over the rooms; nothing heavy is imported before it is needed.

Each command is a function in its own module `_<command>_command.py`, and a name in `_COMMANDS`; one with subcommands
is a `typer.Typer` named `app`, and a name in `_GROUPS`. Their modules import only typer at the top; rooms are imported
inside the function. Data goes to stdout, logs and errors to stderr. A `HyperParallelError` is printed without a
traceback and ends with status 1, a usage error with 2, Ctrl-C with 130; anything else is a defect and keeps its
traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer

from hyper_parallel.cli.app import build_app, run

_COMMANDS = (
    "init", "data", "plan", "train", "parity", "generate", "report", "doctor", "calibrate", "predict",
)  # fmt: skip
_GROUPS = ("checkpoint", "config")


def application(only: str | None = None) -> typer.Typer:
    """The application with every command, or with one."""

    def named(command: str) -> Any:
        module = import_module(f"{__name__}.{command}_command")
        return getattr(module, command if command in _COMMANDS else "app")

    return build_app(
        [named(c) for c in _COMMANDS if only in (None, c)],
        [named(g) for g in _GROUPS if only in (None, g)],
    )


def main() -> None:
    """Run the `hyper-parallel` command and exit; one that is named first is imported alone."""
    first = sys.argv[1] if len(sys.argv) > 1 else None
    run(application(first if first in (*_COMMANDS, *_GROUPS) else None))


__all__ = ["application", "main"]
