"""Predicted against measured step time of random legal strategies of a small model on this machine.

First run `hyper-parallel calibrate`, so that predictions use the cards of this machine. Then

    python benchmarks/strategy_ranking.py                       # 20 strategies on 4 ranks, a table
    python benchmarks/strategy_ranking.py --ranks 8 --json      # on 8 ranks, as JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics

import torch
from _small_runs import legal, measure, rank_correlation

from hyper_parallel.topology import detect_local


def main() -> None:
    """Train every strategy, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for one in measure(legal(args.ranks, args.number, args.seed), args.ranks, args.rounds, args.steps):
        w = one.plan.workload
        rows.append(
            {
                "strategy": str(one.plan.strategy),
                "recompute": one.plan.strategy.recompute,
                "cp_kind": one.plan.strategy.cp_kind,
                "microbatch": w.microbatch,
                "accumulation_steps": w.accumulation_steps,
                "predicted_s": one.plan.step_s,
                "measured_s": one.step_s,
                "slowest_over_fastest_round": one.spread,
                "terms": {t.name: t.seconds for t in one.plan.cost},
            }
        )
    predicted, measured = ([float(r[name]) for r in rows] for name in ("predicted_s", "measured_s"))
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    summary = {
        "ranks": args.ranks,
        "machine": detect_local(args.ranks).description,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "strategies": len(rows),
        "rank_correlation": rank_correlation(predicted, measured),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }
    if args.json:
        print(json.dumps({"summary": summary, "rows": rows}, indent=1))
        return
    for row in sorted(rows, key=lambda r: float(r["measured_s"])):
        print(
            f"{row['measured_s']:8.3f} s  predicted {row['predicted_s']:8.3f} s  x{row['microbatch']} "
            f"{row['recompute']:<5} {row['cp_kind']:<10} {row['strategy']}"
        )
    print(f"rank correlation {summary['rank_correlation']:.3f}, median error {summary['median_error']:.1%}")


if __name__ == "__main__":
    main()
