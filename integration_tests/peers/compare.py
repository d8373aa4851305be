"""Runs both sides of a row and compares them."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from integration_tests.peers import inputs
from integration_tests.peers.own_side import run_forked, run_own
from integration_tests.peers.rows import Row

TOLERANCE: Final = 1e-5
_SMALL: Final = 0.01
"""Numbers below it are compared as if they were as large: a loss of GRPO is near 0."""


def apart(own: float, theirs: float) -> float:
    """Return the distance of two numbers over the larger one."""
    return abs(own - theirs) / max(abs(own), abs(theirs), _SMALL)


def largest(values: Iterable[float]) -> float:
    """Return the largest number, or NaN where one is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def make_inputs(row: Row, place: Path) -> None:
    """Save the model, the tokenizer and the records of a row."""
    model = place / "model"
    inputs.save_model(model, row.model, scores=row.trainer == "rm")
    inputs.save_tokenizer(model, row.template)
    inputs.write_records(place / "records.jsonl", row.records(row.count))


def weights_apart(own: dict[str, Any], theirs: dict[str, Any], before: dict[str, Any]) -> tuple[float, str]:
    """Return the largest distance of a weight over the largest update of any, and the parameter where it is."""
    assert own.keys() == theirs.keys() == before.keys(), "names of parameters differ"
    update = largest(float((theirs[name] - before[name]).abs().max()) for name in before)
    found = {name: float((own[name] - theirs[name]).abs().max()) for name in before}
    worst = max(found, key=lambda name: found[name])
    return largest(found.values()) / update, worst


def compare(row: Row, place: Path) -> dict[str, Any]:
    """Run both sides of a row and return its record."""
    from integration_tests.peers.trl_side import load_model, run_trl, weights_of

    make_inputs(row, place)
    own = run_own(row, place)
    theirs, before, after = run_trl(row, place)
    mine = weights_of(load_model(place / "own" / "export", scores=row.trainer == "rm"))
    weights, worst = weights_apart(mine, after, before)
    differences = {
        "first_loss": apart(own["loss"][0], theirs["loss"][0]),
        "first_grad_norm": apart(own["grad_norm"][0], theirs["grad_norm"][0]),
        "losses": largest(map(apart, own["loss"], theirs["loss"])),
        "weights": weights,
    }
    if row.trainer in ("sft", "pt"):  # elsewhere what both answers share may count or not
        differences["targets"] = apart(own["targets"], theirs["targets"])
    found = {"own": own, "trl": theirs, "apart": differences, "worst_parameter": worst}
    return without_nan(found)


def without_nan(value: Any) -> Any:
    """Return a value of JSON in which NaN has become null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def compare_in_child(row: Row, place: Path) -> dict[str, Any]:
    """Run `compare` in a forked process, so that no row sees what another has left; an error becomes a record."""
    result = place / "result.json"

    def work() -> None:
        try:
            record = compare(row, place)
        except Exception as error:
            traceback.print_exc()
            line = next(iter(str(error).strip().splitlines()), "")
            record = {"error": f"{type(error).__name__}: {line}"[:400]}
        result.write_text(json.dumps(record), encoding="utf-8")

    run_forked(work, place / "trl.log")
    if not result.is_file():
        return {"error": "the process ended without a result"}
    return json.loads(result.read_text(encoding="utf-8"))


def verdict(row: Row, record: dict[str, Any]) -> str:
    """Return `equal`, `differs` where the row says why, and else `wrong` or `fails`."""
    if "error" in record:
        return "fails"
    equal = all(value is not None and value <= TOLERANCE for value in record["apart"].values())
    if row.reason:
        return "wrong" if equal else "differs"
    return "equal" if equal else "wrong"
