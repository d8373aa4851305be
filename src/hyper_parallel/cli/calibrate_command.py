"""`hyper-parallel calibrate`: fit cost-model cards to published runs or to micro-benchmarks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from hyper_parallel.cli.app import say
from hyper_parallel.cli.option_conflicts import refuse_ignored

_EXCLUDED: Final = {"runs": ("ranks", "check", "steps")}
"""For a parameter, the parameters that it leaves without effect: a fit to a CSV file measures nothing."""
_NEEDED: Final = {"steps": "check"}
"""For a parameter, the parameter without which it has no effect."""


def calibrate(
    ctx: typer.Context,
    runs: Annotated[
        Path | None,
        typer.Option(help="Fit the shipped cards to the runs in this CSV file.", dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            "--out",
            help="Output path: with --runs a folder for cards (default: only print), "
            "else the local card (default: in the user's cache).",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to measure with. Default: the ranks that `plan` assumes."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Train a few steps of this recipe; print the prediction error before and after."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of --check.")] = 12,
) -> None:
    """Fit the constants of the cost model (cards) to runs in a CSV, or to micro-benchmarks of this machine.

    Without --runs this machine is measured: matmul, attention, element-wise operators, collectives, and training steps
    of small models. Without --output, `plan` and `train` on the topology `local` then use the resulting card.
    """
    refuse_ignored(ctx, _EXCLUDED, _NEEDED)
    if runs is not None:
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
