"""Regret of the planner on published runs: measured time of the layout it chooses, against the fastest layout.

Rows with equal model, device, number of devices, batch and precision but different layouts form one decision. The
planner chooses the row with the least predicted step time. The regret is the relative excess of its measured time over
the fastest row.

    python benchmarks/planner_regret.py RUNS.csv            # a table
    python benchmarks/planner_regret.py RUNS.csv --json     # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict

from hyper_parallel.calibration import PublishedRun, predict, read_cards, read_runs

DECISION = ("model", "device", "n_dev", "gbs", "seq", "precision")
LAYOUT = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "zero", "mbs", "recompute")


def groups(runs: list[PublishedRun]) -> dict[tuple[str, ...], list[PublishedRun]]:
    """Return the runs grouped by decision; a key contains the values that a group shares.

    Only measured runs count, and a decision has at least two layouts.
    """
    decisions: dict[tuple[str, ...], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.row.step_s:
            decisions[tuple(getattr(run.row, name) for name in DECISION)].append(run)
    return {
        key: some
        for key, some in decisions.items()
        if len({tuple(getattr(r.row, name) for name in LAYOUT) for r in some}) > 1
    }


def main() -> None:
    """Compute and print the regret of every decision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", help="CSV of published runs, columns as for `hyper-parallel predict`")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.runs is None:
        # The CSV of measured runs is not part of the repository; `make bench` continues without it.
        print(json.dumps({"skipped": "give a CSV of measured runs, see docs/explanation/cost_model.md"}))
        return
    cards = read_cards()
    rows = []
    for key, runs in groups(list(read_runs(args.runs))).items():
        predicted = {r.row.id: predict(r, cards).step_s for r in runs}
        measured = {r.row.id: float(r.row.step_s) for r in runs}
        chosen = min(predicted, key=lambda i: (predicted[i], i))
        best = min(measured, key=lambda i: (measured[i], i))
        rows.append(
            {
                **dict(zip(DECISION, key, strict=True)),
                "layouts": len(runs),
                "chosen": chosen,
                "best": best,
                "regret": measured[chosen] / measured[best] - 1.0,
            }
        )
    regrets = [row["regret"] for row in rows]
    summary = {
        "decisions": len(rows),
        "median_regret": statistics.median(regrets) if regrets else None,
        "worst_regret": max(regrets, default=None),
    }
    if args.json:
        print(json.dumps({"summary": summary, "rows": rows}, indent=1))
        return
    for row in rows:
        name = " ".join(str(row[n]) for n in DECISION)
        print(
            f"{name:<50} {row['layouts']} layouts  chose {row['chosen']:>4}  best {row['best']:>4}  {row['regret']:.1%}"
        )
    if regrets:
        print(f"{len(rows)} decisions: median {summary['median_regret']:.1%}, worst {summary['worst_regret']:.1%}")


if __name__ == "__main__":
    main()
