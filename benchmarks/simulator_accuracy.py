"""Predicted, simulated and measured step times of a small model on gloo ranks, for layouts on every axis.

For every layout: the closed form of the cost model, the event simulation of the same plan, and the measured step. The
last column is the simulated fraction of idle time of pipeline ranks. All three account for ranks that share cores.

    python benchmarks/simulator_accuracy.py            # a table
    python benchmarks/simulator_accuracy.py --json     # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from _small_runs import MODEL, measure, recipe, with_experts

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.mpmd import bubble_fraction
from hyper_parallel.planner import plan_recipe, simulate_plan
from hyper_parallel.topology import detect_local

PAIR = {"microbatch": 2}
LAYOUTS: tuple[tuple[str, int, dict[str, object], dict[str, object]], ...] = (
    ("one rank", 1, {"dp_shard": 1}, PAIR),
    ("dp_shard=2", 2, {"dp_shard": 2}, PAIR),
    ("dp_replicate=2", 2, {"dp_replicate": 2}, PAIR),
    ("tp=2", 2, {"tp": 2}, PAIR),
    ("cp=2 ring", 2, {"cp": 2}, PAIR),
    ("cp=2 ulysses", 2, {"cp": 2, "cp_kind": "ulysses"}, PAIR),
    ("ep=2", 2, {"dp_shard": 2, "ep": 2}, PAIR),
    ("pp=2 1f1b", 2, {"pp": 2}, PAIR),
    ("pp=2 gpipe", 2, {"pp": 2, "schedule": "gpipe"}, PAIR),
    ("pp=2 interleaved", 2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, PAIR),
    ("pp=2 zb-h1", 2, {"pp": 2, "schedule": "zb-h1"}, PAIR),
    ("pp=2 uneven", 2, {"pp": 2, "stage_layers": [1, 3]}, PAIR),
    ("pp=4 1f1b", 4, {"pp": 4}, {"microbatch": 1}),
    ("tp_x=2 tp_y=2", 4, {"tp_x": 2, "tp_y": 2}, PAIR),
    ("dp_shard=2 tp=2", 4, {"dp_shard": 2, "tp": 2}, PAIR),
    ("pp=2 dp_shard=2", 4, {"pp": 2, "dp_shard": 2}, PAIR),
)


def main() -> None:
    """Train every layout, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="simulator_accuracy_") as folder:
        experts = with_experts(Path(folder))
        for ranks in sorted({ranks for _, ranks, _, _ in LAYOUTS}):
            names, recipes = [], []
            for name, wanted, parallel, training in LAYOUTS:
                if wanted != ranks or args.only not in name:
                    continue
                one = recipe(parallel, training, experts if "ep" in parallel else MODEL)
                try:
                    plan_recipe(one)
                except HyperParallelError as error:
                    rows.append({"layout": name, "refused": str(error).splitlines()[0]})
                    continue
                names.append(name)
                recipes.append(one)
            for name, done in zip(names, measure(recipes, ranks) if recipes else [], strict=True):
                timeline = simulate_plan(done.plan)
                rows.append(
                    {
                        "layout": name,
                        "ranks": ranks,
                        "measured_s": done.step_s,
                        "slowest_over_fastest_round": done.spread,
                        "closed_form_s": done.plan.step_s,
                        "simulated_s": timeline.end_s,
                        "simulated_idle": bubble_fraction(timeline),
                    }
                )
    if args.json:
        machine = {
            "machine": detect_local(2).description,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        print(json.dumps({**machine, "rows": rows}, indent=1))
        return
    for row in rows:
        if "refused" in row:
            print(f"{row['layout']:<20} refused: {row['refused']}")
            continue
        measured = row["measured_s"]
        print(
            f"{row['layout']:<20} measured {measured:.3f} s  closed form {row['closed_form_s']:.3f} s "
            f"({row['closed_form_s'] / measured - 1:+.0%})  simulated {row['simulated_s']:.3f} s "
            f"({row['simulated_s'] / measured - 1:+.0%})  idle {row['simulated_idle']:.0%}"
        )


if __name__ == "__main__":
    main()
