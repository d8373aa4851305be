"""`hyper-parallel calibrate`: cards from published runs, or from micro-benchmarks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.app import say
from hyper_parallel.errors import Contradiction


def calibrate(
    runs: Annotated[
        Path | None,
        typer.Option(help="Fit the shipped cards to the runs of this CSV.", dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            "--out",
            help="Where to write: a folder of cards with --runs, else the local card. "
            "Default: only print, or the user's cache.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to measure with. Default: as `plan` uses.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Train some steps of this recipe; print the error before and after."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of --check.")] = 12,
) -> None:
    """Fit device and stack cards: to runs in a CSV, or to micro-benchmarks of this machine.

    Without --runs this machine is measured in about a minute (matmul, attention, element-wise, collectives, a small
    training step), and `plan` and `train` on the topology `local` use the card from then on.
    """
    if runs is not None:
        if check is not None or ranks is not None:
            raise Contradiction(
                "runs of a CSV are not measured on this machine",
                got="--runs with --check or --ranks",
                hint=f"hyper-parallel calibrate --runs {runs}",
            )
        _from_runs(runs, output)
        return
    from hyper_parallel.trainer import calibrate_local

    for line in calibrate_local(output, ranks, check, steps):
        say(line)


def _from_runs(runs: Path, output: Path | None) -> None:
    from hyper_parallel.calibration import fit_runs, read_cards, read_runs, write_cards

    fit = fit_runs(read_runs(runs), read_cards())
    for line in fit.summary():
        say(line)
    if output is not None:
        for path in write_cards(output, fit):
            say(f"card written to {path}", err=True)
