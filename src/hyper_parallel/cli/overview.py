"""Help of the whole command, written without typer: importing typer takes most of the time of `--help`.

A test compares the text with the one that typer writes.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import Final

_OPTIONS: Final = {
    "--version": "Print the version and exit.",
    "-q, --quiet": "Print results, warnings and errors only.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "-h, --help": "Show this message and exit.",
}
_COMMANDS: Final = {
    "init": "Write a recipe and the files it needs into ./recipes; without a name, list the recipes.",
    "data": "Show the training data of a recipe: format, counts, lengths, and examples with their targets marked.",
    "plan": "Print the best plan of a model on a machine. Needs no accelerator and imports no torch.",
    "train": "Train a model from a recipe. Starts local ranks unless another launcher has started them.",
    "parity": "Compare a recipe's layout with one rank, on a small copy of its model in float64.",
    "generate": "Continue a prompt with the model of a run; text is printed on stdout as it is generated.",
    "report": "Write report.html (self-contained) and trace.json (for Perfetto) into each run directory.",
    "doctor": "Report which features work on this machine and how to enable the others, or where hung ranks diverged.",
    "calibrate": "Fit device and stack cards to runs in a CSV, or to micro-benchmarks of this machine.",
    "predict": "Predict step time, memory and every cost term of the runs in a CSV. Imports no torch.",
    "checkpoint": "List, verify, inspect, export and import checkpoints.",
    "config": "Show a recipe as a run resolves it.",
}


def overview() -> str:
    """Return the help of the whole command for the width of the terminal, at most 100 columns."""
    width = max(min(shutil.get_terminal_size().columns, 100) - 2, 50)
    lines = ["Usage: hyper-parallel [OPTIONS] COMMAND [ARGS]...", ""]
    about = "Plan, train, generate and report on a supernode as if it were one computer."
    lines += textwrap.wrap(about, width, initial_indent="  ", subsequent_indent="  ")
    for title, rows in (("Options", _OPTIONS), ("Commands", _COMMANDS)):
        column = max(map(len, rows)) + 2
        lines += ["", f"{title}:"]
        for name, text in rows.items():
            first, *others = textwrap.wrap(text, width - column - 2)
            lines += [f"  {name:{column}}{first}", *(" " * (column + 2) + line for line in others)]
    return "\n".join(lines) + "\n"
