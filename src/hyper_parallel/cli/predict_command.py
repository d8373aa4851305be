"""`hyper-parallel predict`: step time and memory of the training runs in a CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.app import say


def predict(
    runs: Annotated[Path, typer.Argument(help="CSV of runs, one per row.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the rows with the predictions here.")
    ],
    cards: Annotated[
        Path | None,
        typer.Option(help="Folder of cards to use over the shipped ones.", file_okay=False),
    ] = None,
) -> None:
    """Predict step time, memory and every term of the runs in a CSV; imports no torch.

    Blank cells of step_s, tok_s_dev and mem_gib are filled; measured values stay. What was assumed of a row, or why
    it cannot be predicted, is in its column `assumptions`.
    """
    from hyper_parallel.calibration import predict_file, read_cards

    done, rows = predict_file(runs, output, read_cards(cards) if cards else None)
    left = f", {rows - done} cannot be predicted (see `assumptions`)" if rows > done else ""
    say(f"{done} of {rows} runs predicted{left}: {output}", err=True)
