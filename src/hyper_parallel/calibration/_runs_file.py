"""Files of runs: a CSV read, every row predicted, and written with the predictions beside what it said."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hyper_parallel.calibration._cells import MEASURED, NUMBERS, RowError, stated
from hyper_parallel.calibration._predict import Cards, Prediction, predict
from hyper_parallel.calibration._runs import REQUIRED, SHAPE, PublishedRun, read_run
from hyper_parallel.errors import HyperParallelError, OutputNotWritable, RunsUnreadable

_SURPLUS: Final = "more cells than columns"
"""Key of the cells of a row that no column names; no column has this name in lower case with blanks."""


def read_rows(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV of runs; commas, semicolons or tabs between cells, columns in any case.

    Raises:
        RunsUnreadable: HP314 when the file cannot be read or lacks the columns that a prediction needs.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.DictReader(
                file,
                delimiter=max(",;\t", key=head.count),
                restkey=_SURPLUS,
                restval="",
                strict=True,
            )
            columns = [_column(c) for c in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = [{k: str(v).strip() for k, v in row.items()} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunsUnreadable("the runs cannot be read", where=str(path), got=str(error)) from error
    twice = [name for name, count in Counter(columns).items() if name and count > 1]
    if twice:
        raise RunsUnreadable("the runs have a column twice", where=str(path), got=", ".join(twice))
    shape = () if "model" in columns else SHAPE
    if missing := [name for name in (*shape, *REQUIRED) if name not in columns]:
        raise RunsUnreadable(
            "the runs lack columns", where=str(path), got=f"without {', '.join(missing)}",
            allowed=", ".join((*SHAPE, *REQUIRED)),
        )  # fmt: skip
    columns = [name for name in columns if name]
    return columns, [{k: v for k, v in row.items() if k} for row in rows]


def _column(text: str) -> str:
    """Name of a column; those that mean something to us are lower case, the others stay as they are."""
    low = text.strip().lower().replace(" ", "_")
    return low if low in _KNOWN else text.strip()


_KNOWN: Final = frozenset(
    (*NUMBERS, *MEASURED, "id", "model", "device", "peak_tflops", "precision", "recompute", "stack", "source", "notes",
     "group")
)  # fmt: skip
"""Columns that are read."""


def read_runs(path: str | Path) -> Sequence[PublishedRun]:
    """The rows of a CSV that can be read."""
    found = []
    for row in read_rows(path)[1]:
        try:
            found.append(read_run(row))
        except RowError:
            continue
    return found


def predict_file(
    source: str | Path, output: str | Path, cards: Cards | None = None
) -> tuple[int, int]:
    """Predict every row of a CSV and write all its columns with the predictions.

    Columns added: predicted_step_s, predicted_tok_s_dev, predicted_mem_gib, interval_low_s, interval_high_s, one
    `term: NAME` per cause in seconds, assumptions. Where `step_s`, `tok_s_dev` or `mem_gib` says nothing it is filled
    with the prediction; a measured value is never replaced. A row that lacks what a prediction needs, or asks for the
    impossible, keeps its cells and says so in `assumptions`; any other failure is a defect of ours and ends here, with
    the row named.

    Returns:
        Rows predicted, and rows in the file.

    Raises:
        RunsUnreadable: HP314 when the file cannot be read or no row can be predicted (then the file is written all the
            same, with every row's reason).
        OutputNotWritable: HP105 when the output cannot be written.
    """
    columns, rows = read_rows(source)
    done: list[dict[str, str]] = []
    names: dict[str, None] = {}
    failures = 0
    for index, row in enumerate(rows):
        surplus = row.pop(_SURPLUS, None)
        try:
            if surplus is not None:
                raise RowError("the row has more cells than the header has columns")
            added = _cells(predict(read_run(row), cards))
        except (RowError, HyperParallelError) as error:
            failures += 1
            said = error.what if isinstance(error, HyperParallelError) else str(error)
            added = {"assumptions": f"not predicted: {said}"}
        except Exception as error:
            error.add_note(f"in row {index + 1} of {source} (id {row.get('id') or 'none'})")
            raise
        names |= dict.fromkeys(added)
        for name in MEASURED:
            if not stated(row, name) and f"predicted_{name}" in added:
                row[name] = added[f"predicted_{name}"]
        done.append({**row, **added})
    filled = ["id", *MEASURED]
    header = list(dict.fromkeys([*columns, *filled, *sorted(names, key=_column_order)]))
    try:
        with Path(output).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header, restval="")
            writer.writeheader()
            writer.writerows(done)
    except OSError as error:
        raise OutputNotWritable(
            "the predictions cannot be written", where="--output", got=f"{output}: {error.strerror}"
        ) from error
    if failures == len(rows):
        raise RunsUnreadable(
            "no row of the runs can be predicted",
            where=str(source),
            got=done[0]["assumptions"] if done else "no rows",
        )
    return len(rows) - failures, len(rows)


def _column_order(name: str) -> tuple[int, str]:
    first = (
        "predicted_step_s",
        "predicted_tok_s_dev",
        "predicted_mem_gib",
        "interval_low_s",
        "interval_high_s",
    )
    return (first.index(name), "") if name in first else (9 + (name == "assumptions"), name)


def _cells(p: Prediction) -> dict[str, str]:
    terms = {f"term: {t.name}": f"{float(t.seconds[0]):.6g}" for t in p.scores.time}
    return {
        "predicted_step_s": f"{p.step_s:.6g}",
        "predicted_tok_s_dev": f"{p.tokens_per_device_s:.6g}",
        "predicted_mem_gib": f"{p.memory_gib:.4g}",
        "interval_low_s": f"{p.low:.6g}",
        "interval_high_s": f"{p.high:.6g}",
        **terms,
        "assumptions": "; ".join(p.assumptions),
    }
