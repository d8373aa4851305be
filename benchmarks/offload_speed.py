"""CPU seconds to capture and plan a training step, and to read the same plan from the cache.

    python benchmarks/offload_speed.py --json

A training step with Llama-8B shapes (32 layers, 8192 tokens, ZeRO-1 over 8 ranks) is captured under fake tensors, and
planned for the least peak, and for the least time under an ample, a tight and a very tight budget. `analysis_cpu_s`, a
part of `planning_cpu_s`, is the time for the operator order and use-definition chains. `cached_cpu_s` is the time of
the second call: hash the inputs, read the file, replay and time all actions, and check addresses. All times are CPU
seconds of one thread, without imports. `addition_ns`, the time of one addition in a Python loop before and after,
indicates the speed of a shared machine.
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

from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.memory import order_peak, plan_memory_cached, refine_order, use_definitions


def timed(layers: int, bandwidths: list[float], goals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Capture and analyse the step, plan every goal, read every plan from the cache, and return the times."""
    begin = time.process_time()
    captured = training(8192, layers, 8, 8)
    capture_s = time.process_time() - begin
    begin = time.process_time()
    program = ROOFLINE.annotate(captured)
    order, _ = refine_order(program)
    use_definitions(program, order)
    analysis_s = time.process_time() - begin
    start = order_peak(program, range(len(program.operators)))
    rows: list[dict[str, Any]] = []
    for gb_s in bandwidths:
        for name, goal in goals.items():
            row: dict[str, Any] = {"goal": name, "bandwidth_gb_s": gb_s}
            with tempfile.TemporaryDirectory() as folder:
                begin = time.process_time()
                try:
                    plan = plan_memory_cached(program, machine(gb_s), cache=Path(folder), **goal)
                except BudgetImpossible as error:
                    row["refused"] = error.allowed
                row["planning_cpu_s"] = time.process_time() - begin
                row["capture_analysis_planning_cpu_s"] = capture_s + row["planning_cpu_s"]
                if "refused" not in row:
                    begin = time.process_time()
                    again = plan_memory_cached(program, machine(gb_s), cache=Path(folder), **goal)
                    row["cached_cpu_s"] = time.process_time() - begin
                    if again != plan:
                        raise SystemExit("the cached plan is not the planned one")
                    row["simulated_peak_share"] = plan.peak_bytes["device"] / start
                    row["simulated_step_share"] = plan.seconds / program.seconds
                    row["arena_over_peak"] = plan.arena_bytes / plan.peak_bytes["device"] - 1
            rows.append(row)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {
        "operators": len(program.operators),
        "storages": len(program.storages),
        "capture_cpu_s": capture_s,
        "analysis_cpu_s": analysis_s,
        "most_planning_cpu_s": max(r["planning_cpu_s"] for r in rows),
        "most_capture_analysis_planning_cpu_s": max(r["capture_analysis_planning_cpu_s"] for r in rows),
        "most_cached_cpu_s": max(r.get("cached_cpu_s", 0.0) for r in rows),
        "rows": rows,
    }


def addition_ns() -> float:
    """Return the CPU nanoseconds of one iteration of a loop that adds."""
    total, turns = 0, 10_000_000
    begin = time.process_time()
    for i in range(turns):
        total += i
    return (time.process_time() - begin) / turns * 1e9


def main() -> None:
    """Measure, and print JSON or a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bandwidths", default="25,50,100,200")
    parser.add_argument("--budgets-gb", default="64,40,20")
    args = parser.parse_args()
    torch.set_num_threads(1)
    goals: dict[str, dict[str, Any]] = {
        "least peak at 2 % more time": {"max_slowdown": SLOWDOWN},
        **{
            f"least time under {float(gb):g} GB": {"budget_bytes": int(float(gb) * 1e9)}
            for gb in args.budgets_gb.split(",")
        },
    }
    links = [float(b) for b in args.bandwidths.split(",")]
    machine_ns = [addition_ns()]
    found = timed(args.layers, links, goals)
    machine_ns.append(addition_ns())
    result = {
        "what": "CPU seconds on this machine; peaks and steps are simulated",
        "command": sys.argv[1:],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "addition_ns": machine_ns,
        **found,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
