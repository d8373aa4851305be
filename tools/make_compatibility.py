"""Write docs/compatibility.md: every family on every axis, with the largest error against one device.

    python tools/make_compatibility.py                 run all cells and write the page (minutes, 4 CPU ranks)
    python tools/make_compatibility.py phi3 olmo2      run these rows, keep the others of the page

A cell runs one step in float64 on 4 ranks and compares the loss and every gradient with one device. What the planner or
`parallelize` refuses is listed with its sentence; anything else that goes wrong is shown as an error of ours.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from tests.parity.listed import Listed  # noqa: E402
from tests.parity.plain import Plain  # noqa: E402
from tests.parity.universal import FAMILIES, Reference, Setup, run  # noqa: E402

from hyper_parallel.errors import HyperParallelError, RankFailed  # noqa: E402
from hyper_parallel.ir import Strategy  # noqa: E402
from hyper_parallel.runtime import World, launch  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
PLAIN = "plain nn.Module"
LISTED = "list of experts"
NUMBER = re.compile(r"\d(\.\d+)?e[+-]\d+")
ROWS = (*FAMILIES, LISTED, PLAIN)
OWN: dict[str, type[Setup]] = {LISTED: Listed, PLAIN: Plain}
COLUMNS: dict[str, Strategy] = {
    "dp_replicate": Strategy(dp_replicate=4),
    "dp_shard": Strategy(dp_shard=4),
    "tp 2": Strategy(dp_shard=2, tp_x=2),
    "tp 4": Strategy(tp_x=4),
    "tp 2-D": Strategy(tp_x=2, tp_y=2),
    "cp ring": Strategy(dp_shard=2, cp=2, cp_kind="ring"),
    "cp Ulysses": Strategy(dp_shard=2, cp=2, cp_kind="ulysses"),
    "ep": Strategy(dp_shard=4, ep=4),
    "pp": Strategy(dp_shard=2, pp=2),
    "recompute": Strategy(dp_shard=2, tp_x=2, recompute="full"),
}
LIMIT = 1e-10
FAILS = "fails:"
"""Begin of a cell that is neither equal to one device nor refused: an error of ours."""
HEAD = """# Compatibility

<!-- Written by tools/make_compatibility.py, which runs every cell; do not edit. -->

Each cell is one training step of a tiny model of the family on 4 ranks, in float64, against the same step on one
device: the largest relative error over the loss and every gradient. Numbers in parentheses are refusals, listed below.
The models are those of transformers {transformers}, unchanged, on torch {torch}.

"""
FOOT = """
Degrees of the columns, on 4 ranks:

{columns}

`list of experts` is a Llama whose MLPs are lists of expert modules, `tests/parity/listed.py`; `plain nn.Module` is
`tests/parity/plain.py`, split by rules of its user.
"""


def setup_of(row: str) -> Setup:
    """Model and batch of a row: two microbatches, so that a pipeline has something to overlap."""
    return OWN[row](accumulation=2) if row in OWN else Setup(row, accumulation=2)


def cell(reference: Reference, strategy: Strategy) -> str:
    """Largest error over loss and gradients on 4 ranks, as `2e-15`; or the sentence of the refusal."""
    expected = reference.result
    try:
        reference.setup.plan(strategy)
    except HyperParallelError as error:
        return error.what

    def rank(_: int) -> tuple[float, float] | str:
        with World.join("cpu") as world:
            try:
                found = run(reference.setup, reference.model, strategy, world)
            except HyperParallelError as error:
                return error.what
        errors = [
            float((grad - expected.grads[name]).abs().max() / expected.grads[name].abs().max())
            for name, grad in found.grads.items()
        ]
        return found.share, max(errors, default=0.0)

    try:
        results = launch(rank, 4, timeout_s=240)
    except RankFailed as error:
        raised = re.findall(r"^\s*((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", str(error), re.M)
        return f"{FAILS} {(raised or [error.what])[-1]}"
    refused = next((r for r in results if isinstance(r, str)), None)
    if refused is not None:
        return refused
    loss = sum(share for share, _ in results)
    worst = max(abs(loss - expected.share) / abs(expected.share), *(e for _, e in results))
    return f"{worst:.0e}" if worst <= LIMIT else f"{FAILS} differs by {worst:.0e}"


def row_cells(row: str) -> dict[str, str]:
    """All cells of one row."""
    reference = Reference(setup_of(row))
    return {name: cell(reference, strategy) for name, strategy in COLUMNS.items()}


def page(table: dict[str, dict[str, str]]) -> str:
    """The table as Markdown, each different refusal once below it."""
    refusals: dict[str, int] = {}

    def shown(value: str) -> str:
        if NUMBER.fullmatch(value):
            return value
        return f"({refusals.setdefault(value, len(refusals) + 1)})"

    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        cells = " | ".join(shown(table[row][name]) for name in COLUMNS)
        lines.append(f"| {row} | {cells} |")
    notes = [f"{number}. {sentence}" for sentence, number in refusals.items()]
    degrees = "\n".join(f"* {name}: `{strategy}`" for name, strategy in COLUMNS.items())
    head = HEAD.format(transformers=version("transformers"), torch=torch.__version__.split("+")[0])
    return head + "\n".join([*lines, "", *notes]) + "\n" + FOOT.format(columns=degrees)


def read_page(text: str) -> dict[str, dict[str, str]]:
    """The cells of a page: row to column to number or sentence."""
    refusals = {f"({n})": sentence for n, sentence in re.findall(r"^(\d+)\. (.+)$", text, re.M)}
    lines = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    names = lines[0][1:]
    return {
        row: {n: refusals.get(v, v) for n, v in zip(names, values, strict=True)}
        for row, *values in lines[2:]
    }


def main(rows: list[str]) -> None:
    """Run the rows, all of them without arguments, and write the page."""
    if unknown := sorted(set(rows) - set(ROWS)):
        sys.exit(f"no such row: {', '.join(unknown)}; rows: {', '.join(ROWS)}")
    table = read_page(PAGE.read_text(encoding="utf-8")) if rows else {}
    for row in rows or ROWS:
        table[row] = row_cells(row)
        sys.stderr.write(f"{row}: {table[row]}\n")
    PAGE.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
