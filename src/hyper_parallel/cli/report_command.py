"""`hyper-parallel report`: HTML page and Perfetto trace of a run, or a page that compares several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.app import say


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Run directories written by `hyper-parallel train`; several are compared.",
            show_default=False,
        ),
    ],
) -> None:
    """Write report.html (self-contained) and trace.json (for Perfetto) into each run directory.

    For several runs, also write comparison.html into the first one: overlaid curves, differing settings and results.
    """
    from hyper_parallel.reports import write_comparison, write_report

    for run_dir in dict.fromkeys(run_dirs):
        page, trace = write_report(run_dir)
        say(page)
        say(trace)
    if len(dict.fromkeys(run_dirs)) > 1:
        say(write_comparison(list(dict.fromkeys(run_dirs))))
