"""Accuracy of the cost model on published training runs, by leave-one-out cross-validation.

    python benchmarks/cost_model_accuracy.py RUNS.csv [--leave-out group|device|model|moe_model|stack] [--json]

For each group (or device, model, model with experts, stack), the constants of the cards are fitted without it, and its
runs are predicted. The error is the median over the rows of a group, then the median over groups. Columns of
RUNS.csv: see docs/explanation/cost_model.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np

from hyper_parallel.calibration import FOLDS, Fit, fit_runs, predict, read_cards, read_runs


def rank_correlation(fit: Fit) -> dict[str, float]:
    """Return, per model with at least 4 runs, the rank correlation of predicted and measured tokens/s per device."""
    correlations = {}
    key = lambda pair: pair[0].model.name  # noqa: E731
    pairs = sorted(zip(fit.runs, fit.left_out, strict=True), key=key)
    for name, rows in itertools.groupby(pairs, key=key):
        runs = list(rows)
        if len(runs) < 4:
            continue
        rate = [r.sequences * r.seq_len / r.step_s / r.devices for r, _ in runs]
        predicted = [x / np.exp(e) for x, (_, e) in zip(rate, runs, strict=True)]
        ranks = [np.argsort(np.argsort(v)) for v in (rate, predicted)]
        correlations[name] = float(np.corrcoef(*ranks)[0, 1])
    return correlations


def memory_errors(fit: Fit) -> list[dict[str, object]]:
    """Return predicted and published memory of each run, with the signed error."""
    rows = []
    for run in fit.runs:
        if measured := run.row.mem_gib:
            predicted = predict(run, fit.cards).memory_gib
            rows.append(
                {"id": run.row.id, "measured_gib": measured, "predicted_gib": round(predicted, 2),
                 "error": round(predicted / measured - 1.0, 4)}
            )  # fmt: skip
    return rows


def result_of(fit: Fit, left_out: str) -> dict[str, object]:
    """Return all results of one fit."""
    result: dict[str, object] = {"runs": len(fit.runs), "left_out": left_out}
    for kind in ("dense", "moe"):
        for name, residual in (
            ("believed", fit.before), ("fitted", fit.after), ("left_out", fit.left_out)
        ):  # fmt: skip
            e = fit.errors(residual, kind)
            result[f"{kind} {name}"] = {
                "groups": int(e.size),
                "median": round(float(np.median(e)), 4),
                "p90": round(float(np.quantile(e, 0.9)), 4),
                "worst": round(float(e.max()), 4),
            }
    result["rank correlation, left out"] = {k: round(v, 3) for k, v in rank_correlation(fit).items()}
    result["memory"] = memory_errors(fit)
    result["interval half width"] = {k: round(v, 4) for k, v in fit.interval.items()}
    result["share inside 80 % interval, left out"] = {k: round(v, 3) for k, v in fit.coverage.items()}
    result["factors"] = {k: round(float(np.exp(v)), 4) for k, v in fit.factors.items()}
    result["rows"] = [
        {"id": run.row.id, "believed": round(float(b), 4), "fitted": round(float(a), 4),
         "left_out": round(float(left), 4)}
        for run, b, a, left in zip(fit.runs, fit.before, fit.after, fit.left_out, strict=True)
    ]  # fmt: skip
    return result


def main() -> None:
    """Run the cross-validation, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", help="CSV of measured runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--leave-out", choices=FOLDS, default="group")
    parser.add_argument("--cards", type=Path, help="folder of cards; default: the shipped ones")
    options = parser.parse_args()
    if options.runs is None:
        # The CSV of measured runs is not part of the repository; `make bench` continues without it.
        print(json.dumps({"skipped": "give a CSV of measured runs, see docs/explanation/cost_model.md"}))
        return
    runs = read_runs(options.runs)
    fit = fit_runs(runs, read_cards(options.cards), leave_out=options.leave_out)
    result = result_of(fit, options.leave_out)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name, value in result.items():
        if name not in ("rows", "factors", "memory"):
            print(f"{name}: {value}")
    for row in result["memory"]:
        print(f"memory {row}")


if __name__ == "__main__":
    main()
