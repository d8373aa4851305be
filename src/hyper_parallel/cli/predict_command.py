"""`hyper-parallel predict`: predict step time and memory of the training runs in a CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.app import say


def predict(
    runs: Annotated[Path, typer.Argument(help="CSV file of runs, one per row.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write rows with predictions to this file.")],
    cards: Annotated[
        Path | None,
        typer.Option(
            help="Folder of cards (cost-model constants) that replace the shipped ones.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Predict step time, memory and every cost term of the runs in a CSV. Imports no torch.

    Predictions are added as columns. Blank cells of step_s, tok_s_dev and mem_gib are filled; measured values are kept.
    The column `assumptions` lists the assumptions for a row, or the reason why it cannot be predicted.
    """
    from hyper_parallel.calibration import predict_file, read_cards

    done, rows = predict_file(runs, output, read_cards(cards) if cards else None)
    rest = f", {rows - done} cannot be predicted (see `assumptions`)" if rows > done else ""
    say(f"{done} of {rows} runs predicted{rest}: {output}", err=True)
