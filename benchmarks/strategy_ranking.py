"""Predicted against measured step time of random legal strategies of a small model on this machine.

Run `hyper-parallel calibrate` first, so that the prediction uses the cards of this machine. Then

    python benchmarks/strategy_ranking.py                       # 20 strategies on 4 ranks, a table
    python benchmarks/strategy_ranking.py --number 8 --json     # fewer, as JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from small_runs import legal, rank_correlation, run


def main() -> None:
    """Train every strategy and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="strategy_ranking_") as folder:
        for index, values in enumerate(legal(args.ranks, args.number, args.steps, args.seed)):
            one = run(values, Path(folder) / str(index))
            w = one.plan.workload
            rows.append(
                {
                    "strategy": str(one.plan.strategy),
                    "microbatch": w.microbatch,
                    "accumulation_steps": w.accumulation_steps,
                    "predicted_s": one.plan.step_s,
                    "measured_s": one.step_s,
                }
            )
    predicted, measured = ([float(r[name]) for r in rows] for name in ("predicted_s", "measured_s"))
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    summary = {
        "strategies": len(rows),
        "rank_correlation": rank_correlation(predicted, measured),
        "median_error": statistics.median(errors),
    }
    if args.json:
        print(json.dumps({"summary": summary, "rows": rows}, indent=1))
        return
    for row in sorted(rows, key=lambda r: float(r["measured_s"])):
        print(
            f"{row['measured_s']:8.3f} s  predicted {row['predicted_s']:8.3f} s  "
            f"microbatch {row['microbatch']}  {row['strategy']}"
        )
    print(
        f"rank correlation {summary['rank_correlation']:.3f}, median error {summary['median_error']:.1%}"
    )


if __name__ == "__main__":
    main()
