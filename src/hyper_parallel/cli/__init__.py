"""Command line: thin typer commands over the rooms; nothing heavy is imported before it is needed.

Each command is a function in its own module `_<command>.py`, and a name in `_COMMANDS`; a command with commands of its
own is a `typer.Typer` in `_GROUPS`. Their modules import only typer at the top; rooms are imported inside the function.
Data goes to stdout, logs and errors to stderr. A `HyperParallelError` is printed without a traceback and ends with
status 1, a usage error with 2, Ctrl-C with 130; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import typer

from hyper_parallel.cli._calibrate import calibrate
from hyper_parallel.cli._checkpoint import app as checkpoint
from hyper_parallel.cli._config import config
from hyper_parallel.cli._doctor import doctor
from hyper_parallel.cli._frame import build_app, run
from hyper_parallel.cli._generate import generate
from hyper_parallel.cli._plan import plan
from hyper_parallel.cli._predict import predict
from hyper_parallel.cli._report import report
from hyper_parallel.cli._train import train

_COMMANDS = (plan, train, generate, report, doctor, calibrate, predict)
_GROUPS = (checkpoint, config)


def application() -> typer.Typer:
    """The application with every command."""
    return build_app(_COMMANDS, _GROUPS)


def main() -> None:
    """Run the `hyper-parallel` command and exit."""
    run(application())


__all__ = ["application", "main"]
