"""The simulated step against real steps with several gloo ranks of a small model, pipelines included.

For every layout: the closed form of the cost model, the event simulation of the same plan, and the measured median. The
last column is the share of the step that pipeline ranks stand idle in the simulation.

    python benchmarks/simulator_accuracy.py            # a table
    python benchmarks/simulator_accuracy.py --json     # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from small_runs import recipe, run

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.mpmd import bubble_fraction
from hyper_parallel.planner import simulate_plan

LAYOUTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "one rank": ({"dp_shard": 1}, {"microbatch": 2}),
    "dp_shard=2": ({"dp_shard": 2}, {"microbatch": 2}),
    "tp=2": ({"tp": 2}, {"microbatch": 2}),
    "pp=2 1f1b": ({"pp": 2}, {"microbatch": 2}),
    "pp=2 gpipe": ({"pp": 2, "schedule": "gpipe"}, {"microbatch": 2}),
    "pp=2 interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"microbatch": 2},
    ),
    "pp=2 zb-h1": ({"pp": 2, "schedule": "zb-h1"}, {"microbatch": 2}),
    "pp=2 uneven": ({"pp": 2, "stage_layers": [1, 3]}, {"microbatch": 2}),
    "pp=4 1f1b": ({"pp": 4}, {"microbatch": 1}),
}


def main() -> None:
    """Train every layout and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="simulator_accuracy_") as folder:
        for index, (name, (parallel, training)) in enumerate(LAYOUTS.items()):
            if args.only not in name:
                continue
            try:
                one = run(recipe(parallel, training, args.steps), Path(folder) / str(index))
            except (RuntimeError, HyperParallelError) as error:
                rows.append({"layout": name, "refused": str(error).splitlines()[0]})
                continue
            rows.append(
                {
                    "layout": name,
                    "measured_s": one.step_s,
                    "closed_form_s": one.plan.step_s,
                    "simulated_s": one.simulated_s,
                    "simulated_idle": bubble_fraction(simulate_plan(one.plan)),
                }
            )
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        if "refused" in row:
            print(f"{row['layout']:<20} refused: {row['refused']}")
            continue
        print(
            f"{row['layout']:<20} measured {row['measured_s']:.3f} s  closed form {row['closed_form_s']:.3f} s  "
            f"simulated {row['simulated_s']:.3f} s ({row['simulated_s'] / row['measured_s'] - 1:+.0%})  "
            f"idle {row['simulated_idle']:.0%}"
        )


if __name__ == "__main__":
    main()
