"""Write docs/results/compatibility.md from docs/census.json: model types by axis, and layouts of 4 ranks by family.

    python tools/make_compatibility.py                 write the page from the recorded cells
    python tools/make_compatibility.py --run           run the cells of all families on 4 ranks first (minutes)
    python tools/make_compatibility.py --run phi3      run these rows first

`tools/census.py` records the model types. A cell of a family runs one step in float64 on 4 ranks, and compares the loss
and every gradient with one device. A refusal is shown with its sentence.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.parity.listed import Listed  # noqa: E402
from tests.parity.plain import Plain  # noqa: E402
from tests.parity.universal import FAMILIES, Reference, Setup, run  # noqa: E402

from hyper_parallel.errors import HyperParallelError, RankFailed  # noqa: E402
from hyper_parallel.ir import Strategy  # noqa: E402
from hyper_parallel.runtime import World, launch  # noqa: E402

PAGE = ROOT / "docs" / "results" / "compatibility.md"
DATA = ROOT / "docs" / "census.json"
PLAIN = "plain nn.Module"
LISTED = "list of experts"
NUMBER = re.compile(r"\d(\.\d+)?e[+-]\d+")
ROWS = (*FAMILIES, LISTED, PLAIN)
OWN: dict[str, type[Setup]] = {LISTED: Listed, PLAIN: Plain}
COLUMNS: dict[str, Strategy] = {
    "tp 4": Strategy(tp_x=4),
    "tp 2-D": Strategy(tp_x=2, tp_y=2),
    "cp ring": Strategy(dp_shard=2, cp=2, cp_kind="ring"),
    "cp Ulysses": Strategy(dp_shard=2, cp=2, cp_kind="ulysses"),
}
AXES = ("one rank", "dp_replicate", "dp_shard", "auto", "pp", "tp", "cp", "ep")
LIMIT = 1e-10
FAILS = "fails:"
"""Prefix of a cell that is neither equal to one device nor refused, which is a defect."""
PAGE_TEXT = """# Compatibility

<!-- Written by tools/make_compatibility.py from docs/census.json; do not edit. -->

The table lists types of transformers {transformers} on torch {torch}, shrunk and with random weights, run with
`hyper-parallel train` by `tools/census.py`. A cell is a run of two steps in float64. On one rank `ok` means that loss
and gradient norm of the first step equal those of plain transformers on the same tokens to 1e-10. On an axis `ok`
means that both steps equal those of one rank to 1e-10. The axes have two ranks (`ep`: dp_shard 2, ep 2). `auto` is the
layout that the planner chooses for 4 ranks, with full recompute. A number in parentheses is a refusal or a failure; its
sentence is below the table. An empty cell was not run.{older}

## Causal language models

{causal}

## Models of images and text, trained on text

{image_text}

## What the numbers say

{notes}

## Not trainable in plain transformers

With text alone, on a CPU, as the census shrinks them; one line of what plain transformers says:

{plain}

## MindSpore

Parts of `backend: mindspore` that were not run, because MindSpore on a CPU does not have them:

| part | reason |
|---|---|
| Ascend devices | no device; the runner selects the CPU |
| reduce-scatter of MindSpore | its CPU has no kernel; composed of an all-reduce and a slice |
| all-to-all of MindSpore | its CPU has no kernel; composed of an all-gather and a slice |
| `training.dtype: bfloat16` | its CPU has no matrix product or all-reduce of it; refused |
| graph kernels by DVM, `jit_level` | not run: no Ascend, where they are set; the CPU fuses by AKG |
| copies of memory plans (`offload`) | a CPU has one memory: peaks are simulated; `ops.move_to` of Ascend was not run |
| overlap of copies and computation | follows from asynchronous copies, which a CPU does not have; predicted only |
| weights and optimizer states on the host | inputs and outputs of the programs, which stay on the device |
| order of operators in a graph | MindSpore orders independent ones; collectives, copies and recomputation wait |
| collectives of a part of the ranks | its CPU has those of all ranks only; a group selects its part |
| exponential, logarithm and tanh in fused kernels | inexact in kernels of AKG for the CPU; kept outside of kernels |

## Layouts of four ranks

One training step of families with a hand-written reader, in float64, against the same step on one device: the largest
relative error over the loss and every gradient.

{families}

Degrees of the columns:

{columns}

`list of experts` is a Llama whose MLPs are lists of expert modules, `tests/parity/listed.py`; `plain nn.Module` is
`tests/parity/plain.py`, split by rules of its user.
"""


def setup_of(row: str) -> Setup:
    """Return model and batch of a row; the batch has two microbatches, so that pipeline stages can overlap."""
    return OWN[row](accumulation=2) if row in OWN else Setup(row, accumulation=2)


def cell(reference: Reference, strategy: Strategy) -> str:
    """Return the largest error of loss and gradients on 4 ranks, as `2e-15`, or the sentence of the refusal."""
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
    """Return all cells of one row by column."""
    reference = Reference(setup_of(row))
    return {name: cell(reference, strategy) for name, strategy in COLUMNS.items()}


class Notes:
    """Numbered notes to which cells refer; equal sentences share a number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def shown(self, value: str) -> str:
        """Return a cell for the page; a refusal becomes a reference to its note."""
        if value in ("", "ok") or NUMBER.fullmatch(value):
            return value
        return f"({self.numbers.setdefault(value, len(self.numbers) + 1)})"

    def lines(self) -> str:
        """Return the numbered sentences as Markdown."""
        return "\n".join(f"{n}. {sentence}" for sentence, n in self.numbers.items())


def table(rows: dict[str, dict[str, str]], columns: tuple[str, ...], notes: Notes) -> str:
    """Return rows as a Markdown table."""
    lines = ["| type | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in rows.items():
        shown = [notes.shown(cells.get(column, "")) for column in columns]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def counted(rows: dict[str, dict[str, str]], notes: Notes) -> str:
    """Return the totals per axis, followed by the table of model types that train in plain transformers."""
    trained = {name: cells for name, cells in rows.items() if cells["plain"] == "ok"}
    lines = [f"{len(trained)} of {len(rows)} types train in plain transformers. Of these:", ""]
    lines += ["| axis | ok | refused | differs or fails | not run |", "|---|---|---|---|---|"]
    for axis in AXES:
        kinds = Counter(kind(cells.get(axis, "")) for cells in trained.values())
        counts = " | ".join(str(kinds[k]) for k in ("ok", "refused", "wrong", "not run"))
        lines.append(f"| {axis} | {counts} |")
    return "\n".join([*lines, "", table(trained, AXES, notes)])


def kind(cell: str) -> str:
    """Return the state of a census cell, such as `ok` or `refused`."""
    if not cell:
        return "not run"
    return "ok" if cell == "ok" else "refused" if re.match(r"HP\d+:", cell) else "wrong"


def page(data: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    notes, images = Notes(), set(data["image_text"])
    types: dict[str, dict[str, str]] = data["types"]
    causal = counted({n: c for n, c in types.items() if n not in images}, notes)
    image_text = counted({n: c for n, c in types.items() if n in images}, notes)
    families = table(data["families"], tuple(COLUMNS), notes)
    older = [f"{name} ({made})" for name, made in data.get("older", {}).items()]
    return PAGE_TEXT.format(
        older=f"\n\nRows with cells of an older version: {', '.join(older)}." if older else "",
        transformers=data["transformers"],
        torch=data["torch"].split("+")[0],
        causal=causal,
        image_text=image_text,
        families=families,
        notes=notes.lines(),
        plain="\n".join(f"* {n}: `{c['plain']}`" for n, c in types.items() if c["plain"] != "ok"),
        columns="\n".join(f"* {name}: `{strategy}`" for name, strategy in COLUMNS.items()),
    )


def main(words: list[str]) -> None:
    """Run the cells of families that the arguments request, and write the page."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    if words[:1] == ["--run"]:
        if unknown := sorted(set(words[1:]) - set(ROWS)):
            sys.exit(f"no such row: {', '.join(unknown)}; rows: {', '.join(ROWS)}")
        for row in words[1:] or ROWS:
            data["families"][row] = row_cells(row)
            sys.stderr.write(f"{row}: {data['families'][row]}\n")
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
