"""The page docs/results/peers.md, generated from the records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from integration_tests.peers.compare import TOLERANCE, verdict
from integration_tests.peers.rows import EPSILON, LEARNING_RATE, ROWS, STEPS, Row

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "results" / "peers.md"
_HEAD: Final = """# Side by side with TRL

<!-- Written by `python tools/peers.py --page` from docs/results/peers.json; do not edit. -->

Each row is one run of {steps} steps by `hyper-parallel train` and one by the trainer of TRL {trl} (transformers
{transformers}, torch {torch}, one CPU process), from the same weights and the same file of records. The models are
tiny and random. Both sides use AdamW (learning rate {rate:g}, epsilon {epsilon:g}, no clipping unless named) and learn
from all records in every step. `make peers` makes the environment and runs all rows; the table of rows is
`integration_tests/peers/rows.py`.

Our side computes in float64. So does the model on TRL's side, but most of its trainers compute log-probabilities in
float32; epsilon is large so that AdamW does not scale the rounding of small gradients up, and 100 times as large for
IPO, whose gradients are. Differences are relative,
those of a loss or a norm below 0.01 as if it were 0.01. The difference of weights is the largest one of any parameter
after step {steps}, over the largest update. `equal` means that all differences are at most {tolerance:g}.

"""
_COLUMNS: Final = (
    "comparison",
    "first loss",
    "first gradient norm",
    "difference of the loss",
    "of the norm",
    f"largest of {STEPS} losses",
    "of weights",
)


def _number(value: float | None, form: str) -> str:
    return "NaN" if value is None else format(value, form)


def _numbers(record: dict[str, Any]) -> str:
    """Return the cells of a row that ran on both sides."""
    cells, apart = [], record["apart"]
    for key in ("loss", "grad_norm"):
        own, theirs = (_number(record[side][key][0], ".6g") for side in ("own", "trl"))
        difference = apart[f"first_{key}"]
        same = difference is not None and difference <= TOLERANCE
        cells.append(own if same else f"{own}, TRL {theirs}")
    cells += [_number(apart[key], ".1e") for key in ("first_loss", "first_grad_norm", "losses", "weights")]
    return " | ".join(cells)


def _table(rows: list[tuple[Row, dict[str, Any]]]) -> list[str]:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for row, record in rows:
        numbers = f"{record['error']}" + " | " * 5 if "error" in record else _numbers(record)
        lines.append(f"| {row.name} | {numbers} |")
    return lines


def page(records: dict[str, Any]) -> str:
    """Return the text of the page."""
    found = [(row, records["rows"][row.name]) for row in ROWS if row.name in records["rows"]]
    kinds = {row.name: verdict(row, record) for row, record in found}
    count = Counter(kinds.values())
    head = _HEAD.format(
        steps=STEPS, rate=LEARNING_RATE, epsilon=EPSILON, tolerance=TOLERANCE,
        **{package: records[package] for package in ("trl", "transformers", "torch")},
    )  # fmt: skip
    summary = ", ".join(f"{count[kind]} {kind}" for kind in ("equal", "differs", "wrong", "fails") if count[kind])
    lines = [f"{len(found)} rows: {summary}.", "", "## Equal", ""]
    lines += _table([(row, record) for row, record in found if kinds[row.name] == "equal"])
    if named := [(row, record) for row, record in found if kinds[row.name] == "differs"]:
        lines += ["", "## Different, and why", "", *_table(named), ""]
        lines += [f"* **{row.name}**: {row.reason}." for row, _ in named]
    if wrong := [(row, record) for row, record in found if kinds[row.name] in ("wrong", "fails")]:
        lines += ["", "## Not explained", "", *_table(wrong)]
    return head + "\n".join(lines) + "\n"


def write_page(records: dict[str, Any]) -> None:
    """Write the page from the file of records."""
    PAGE.write_text(page(records), encoding="utf-8")
