"""CPU seconds from a model to a usable memory plan, and from the same inputs to the cached one.

    python benchmarks/offload_speed.py --json

A training step of Llama-8B shapes (32 layers, 8192 tokens, ZeRO-1 over 8), captured under fake tensors. `cached_cpu_s`
is the whole second call: hashing program, machine and goal, reading the file, replaying and timing every action,
checking addresses. CPU seconds of one process with one thread; the libraries are imported before.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _llama_8b import training
from offload_policies import ROOFLINE, SLOWDOWN, machine

from hyper_parallel.offload import order_peak, plan_memory_cached, refine_order, use_definitions


def main() -> None:
    """Capture, plan, read the plan again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--front-end", choices=("eager", "graph"), default="eager")
    parser.add_argument("--bandwidths", default="25,50,100,200")
    parser.add_argument("--budget-gb", type=float, default=64.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    captured = training(8192, args.layers, 8, 8, args.front_end)
    capture_s = time.process_time() - begin
    begin = time.process_time()
    program = ROOFLINE.annotate(captured)
    order, _ = refine_order(program)
    use_definitions(program, order)
    analysis_s = time.process_time() - begin
    start = order_peak(program, range(len(program.operators)))
    goals: dict[str, dict[str, Any]] = {
        "least peak at 2 % more time": {"max_slowdown": SLOWDOWN},
        f"least time under {args.budget_gb:.0f} GB": {"budget_bytes": int(args.budget_gb * 1e9)},
    }
    rows: list[dict[str, Any]] = []
    for gb_s in map(float, args.bandwidths.split(",")):
        for name, goal in goals.items():
            with tempfile.TemporaryDirectory() as folder:
                begin = time.process_time()
                plan = plan_memory_cached(program, machine(gb_s), cache=Path(folder), **goal)
                planned = time.process_time()
                again = plan_memory_cached(program, machine(gb_s), cache=Path(folder), **goal)
                cached = time.process_time()
                if again != plan:
                    raise SystemExit("the cached plan is not the planned one")
            rows.append(
                {
                    "goal": name,
                    "bandwidth_gb_s": gb_s,
                    "planning_cpu_s": planned - begin,
                    "cached_cpu_s": cached - planned,
                    "capture_analysis_planning_cpu_s": capture_s + planned - begin,
                    "simulated_peak_share": plan.peak_bytes["device"] / start,
                    "arena_over_peak": plan.arena_bytes / plan.peak_bytes["device"] - 1,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "what": "CPU seconds on this machine; peaks are simulated",
        "command": sys.argv[1:],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "operators": len(program.operators),
        "storages": len(program.storages),
        "capture_cpu_s": capture_s,
        "analysis_cpu_s": analysis_s,
        "most_capture_analysis_planning_cpu_s": max(
            r["capture_analysis_planning_cpu_s"] for r in rows
        ),
        "most_cached_cpu_s": max(r["cached_cpu_s"] for r in rows),
        "rows": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
