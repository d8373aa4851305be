"""Help text of `hyper-parallel`, written without typer, whose import takes most of the time of `--help`.

A test compares the text with typer's.
"""

from __future__ import annotations

import pkgutil
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

ABOUT: Final = "Plan, train, generate and report on a supernode as if it were one computer."
VERSION: Final = "Print the version and exit."
QUIET: Final = "Print results, warnings and errors only."
_OPTIONS: Final = {
    "--version": VERSION,
    "-q, --quiet": QUIET,
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "-h, --help": "Show this message and exit.",
}
_SUMMARY: Final = re.compile(r'^(?:def \w+\(.*?"""|app = typer.Typer\(.*?help=")(.*?)(?:\n\n|")', re.M | re.S)
"""Pattern of the first paragraph of the first function's docstring in a module, or of the help of a group."""


def overview(commands: Sequence[str]) -> str:
    """Return the text of `hyper-parallel --help` for `commands`, wrapped to the terminal, at most 100 columns."""
    width = max(min(shutil.get_terminal_size().columns, 100) - 2, 50)
    lines = ["Usage: hyper-parallel [OPTIONS] COMMAND [ARGS]...", ""]
    lines += textwrap.wrap(ABOUT, width, initial_indent="  ", subsequent_indent="  ")
    summaries = {command: _summary(command) for command in commands}
    for title, rows in (("Options", _OPTIONS), ("Commands", summaries)):
        column = max(map(len, rows)) + 2
        lines += ["", f"{title}:"]
        for name, text in rows.items():
            first, *others = textwrap.wrap(text, width - column - 2)
            lines += [f"  {name:{column}}{first}", *(" " * (column + 2) + line for line in others)]
    return "\n".join(lines) + "\n"


def _summary(command: str) -> str:
    """Return the first paragraph of a command's docstring, or the help of its group, read from its source file."""
    source = (pkgutil.get_data(__package__, f"{command}_command.py") or b"").decode()
    match = _SUMMARY.search(source)
    assert match is not None, command
    return " ".join(match[1].split())
