"""`hyper-parallel report`: the HTML page and the Perfetto trace of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(help="Directory that `hyper-parallel train` wrote.", show_default=False),
    ],
) -> None:
    """Write report.html (self-contained) and trace.json (for Perfetto) into a run directory."""
    from hyper_parallel.reports import write_report

    page, trace = write_report(run_dir)
    typer.echo(page)
    typer.echo(trace)
