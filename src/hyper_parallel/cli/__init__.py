"""Command line: thin typer commands over the rooms; nothing heavy is imported before it is needed.

Each command is a function in its own module `_<command>_command.py`, and a name in `_COMMANDS`; one with subcommands
is a `typer.Typer` in `_GROUPS`. Their modules import only typer at the top; rooms are imported inside the function.
Data goes to stdout, logs and errors to stderr. A `HyperParallelError` is printed without a traceback and ends with
status 1, a usage error with 2, Ctrl-C with 130; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import typer

from hyper_parallel.cli._calibrate_command import calibrate
from hyper_parallel.cli._checkpoint_command import app as checkpoint
from hyper_parallel.cli._config_command import config
from hyper_parallel.cli._doctor_command import doctor
from hyper_parallel.cli._frame import build_app, run
from hyper_parallel.cli._generate_command import generate
from hyper_parallel.cli._init_command import init
from hyper_parallel.cli._parity_command import parity
from hyper_parallel.cli._plan_command import plan
from hyper_parallel.cli._predict_command import predict
from hyper_parallel.cli._report_command import report
from hyper_parallel.cli._train_command import train

_COMMANDS = (init, plan, train, parity, generate, report, doctor, calibrate, predict)
_GROUPS = (checkpoint, config)


def application() -> typer.Typer:
    """The application with every command."""
    return build_app(_COMMANDS, _GROUPS)


def main() -> None:
    """Run the `hyper-parallel` command and exit."""
    run(application())


__all__ = ["application", "main"]
