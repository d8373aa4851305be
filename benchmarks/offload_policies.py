"""Simulated comparison of offload policies on a captured step with Llama-8B shapes.

    python benchmarks/offload_policies.py                     # training, a table
    python benchmarks/offload_policies.py --json              # the same as JSON
    python benchmarks/offload_policies.py --step prefill      # or decode
    python benchmarks/offload_policies.py --bandwidths 50 --goals peak --policies ours,checkpoint
    python benchmarks/offload_policies.py --clip              # gradients clipped to a global norm, as recipes do

The two goals are the least peak for at most 2 % more time than the step with everything kept, and the least time under
a budget. `keep`, `checkpoint` and `save-on-cpu` are recorded from the real implementations, in their own operator
order. The other policies are models with our operator order. All use the same simulator:

* keep: no copies and no recomputation.
* checkpoint: transformers' activation checkpointing with use_reentrant=False.
* save-on-cpu: `torch.autograd.graph.save_on_cpu`, with copies on the compute stream at the link's rate.
* recompute-only: our planner without copies.
* ours, ours-margin: our planner, without and with its default margin for links that are slower than stated.
* longest-gap, largest-first: evict activations in this order until the target is met, and reload as late as possible.
* on-demand: as longest-gap, but every reload is issued by its consumer.

`bandwidth_error` runs a plan for a wrong bandwidth at the true one, and compares it with the plan for the true one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import transformers
from _llama_8b import copied, inference, training
from _reload_bound import reload_bound
from _simple_policies import simple_policy

from hyper_parallel.errors import BudgetImpossible, HyperParallelError
from hyper_parallel.ir import MemoryProgram, replay
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    assign_addresses,
    clocked,
    identity_actions,
    order_peak,
    plan_memory,
    refine_order,
)

ROOFLINE = Roofline(flops_s=450e12, bytes_s=2.8e12)
SLOWDOWN = 0.02


@dataclass
class Row:
    """Simulated result of one policy."""

    policy: str
    goal: str
    bandwidth_gb_s: float
    simulated_peak_bytes: int | None
    simulated_step_s: float | None
    against_start: float | None = None
    against_keep_s: float | None = None
    against_checkpoint_s: float | None = None
    arena_over_peak: float | None = None
    device_bytes: int | None = None
    simulated_dram_bytes: int | None = None
    planning_cpu_s: float = 0.0
    note: str = ""


def fused(program: MemoryProgram, share: float) -> MemoryProgram:
    """Return the program with the bytes of operators other than matmuls scaled by `share`, as a model of fusion."""
    ops = (op if op.flops else replace(op, access_bytes=int(op.access_bytes * share)) for op in program.operators)
    return replace(program, operators=tuple(ops))


def machine(gb_s: float) -> MemoryMachine:
    """Return a machine whose copies take 10 us plus bytes / bandwidth, with both directions independent."""
    return MemoryMachine(Channel(gb_s * 1e9), Channel(gb_s * 1e9))


def best_peak(make: Callable[[int], tuple[int, float]], start: int, floor: int, limit_s: float) -> tuple[int, float]:
    """Bisect the target bytes of a policy; return the least achieved peak whose step takes at most `limit_s`."""
    found = (start, limit_s)
    low, high = floor, start
    for _ in range(8):
        target = (low + high) // 2
        peak, seconds = make(target)
        if seconds <= limit_s and peak < found[0]:
            found = (peak, seconds)
            high = min(target, peak)
        else:
            low = target
    return found


def rows_of(
    program: MemoryProgram,
    gb_s: float,
    goal: str,
    policies: list[str],
    budget: int,
    slowdown: float = SLOWDOWN,
    recorded: Mapping[str, MemoryProgram] | None = None,
) -> list[Row]:
    """Return the results of all policies for one bandwidth and goal; `recorded` are recorded steps by policy."""
    m, recorded = machine(gb_s), recorded or {}
    start = order_peak(program, range(len(program.operators)))
    order = refine_order(program)[0]
    limit_s = program.seconds * (1 + slowdown)
    wanted: dict[str, Any] = {"max_slowdown": slowdown} if goal == "peak" else {"budget_bytes": budget}
    rows = []
    for policy in policies:
        begin = time.process_time()
        row = Row(policy, goal, gb_s, None, None)
        try:
            if policy in ("ours", "ours-margin", "ours-copies-only", "recompute-only"):
                plan = plan_memory(
                    program,
                    m,
                    **wanted,
                    bandwidth_margin=None if policy == "ours-margin" else 0.0,
                    recompute=policy != "ours-copies-only",
                    move=() if policy == "recompute-only" else None,
                )
                row.simulated_peak_bytes = plan.peak_bytes["device"]
                row.simulated_step_s = plan.seconds
                row.device_bytes = plan.device_bytes
                row.arena_over_peak = plan.arena_bytes / plan.peak_bytes["device"] - 1
                row.simulated_dram_bytes = plan.peak_bytes["dram"]
            elif policy == "keep":
                row.simulated_peak_bytes, row.simulated_step_s = start, program.seconds
            elif policy in recorded:
                step = copied(recorded[policy], m.store)
                peak = order_peak(step, range(len(step.operators)))
                row.simulated_peak_bytes, row.simulated_step_s = peak, step.seconds
            else:

                def make(target: int, policy: str = policy) -> tuple[int, float]:
                    return simple_policy(program, m, order, policy, target)

                made = best_peak(make, start, start // 8, limit_s) if goal == "peak" else make(budget)
                row.simulated_peak_bytes, row.simulated_step_s = made
        except BudgetImpossible as error:
            row.note = f"{error.code}: {error.allowed}"
        except HyperParallelError as error:
            row.note = str(error)
        row.planning_cpu_s = round(time.process_time() - begin, 2)
        if row.simulated_peak_bytes is not None and row.simulated_step_s is not None:
            row.against_start = row.simulated_peak_bytes / start - 1
            row.against_keep_s = row.simulated_step_s / program.seconds - 1
            if "checkpoint" in recorded:
                row.against_checkpoint_s = row.simulated_step_s / recorded["checkpoint"].seconds - 1
            if goal == "time" and row.simulated_peak_bytes > budget:
                row.note = "above the budget"
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def bounds(program: MemoryProgram, gb_s: float, order: tuple[int, ...], limit_s: float) -> dict[str, Any]:
    """Return lower bounds on the peak of all plans at one bandwidth, with copies only and with recomputation."""
    found: dict[str, Any] = {"bandwidth_gb_s": gb_s}
    ends_s = list(accumulate(program.operators[i].seconds for i in order))
    for name, recompute in (("copies", False), ("copies_and_recompute", True)):
        bound = reload_bound(program, machine(gb_s), order, limit_s, recompute=recompute)
        found[name] = {**asdict(bound), "position_ends_s": ends_s[bound.position]}
    return found


def bandwidth_error(program: MemoryProgram, gb_s: float, budget: int) -> list[dict[str, Any]]:
    """Return the seconds lost by plans for a wrong bandwidth, for both goals."""
    rows = []
    goals: tuple[tuple[str, dict[str, Any]], ...] = (
        ("peak", {"max_slowdown": SLOWDOWN, "bandwidth_margin": 0.0}),
        ("time", {"budget_bytes": budget}),
    )
    for goal, wanted in goals:
        right = plan_memory(program, machine(gb_s), **wanted)
        for factor in (0.7, 1.3):
            wrong = plan_memory(program, machine(gb_s * factor), **wanted)
            clock = clocked(program, machine(gb_s), wrong.actions)
            rows.append(
                {
                    "goal": goal,
                    "true_gb_s": gb_s,
                    "assumed_gb_s": gb_s * factor,
                    "simulated_step_s": clock.now_s,
                    "simulated_cost": clock.now_s / right.seconds - 1,
                    "simulated_peak_bytes": wrong.peak_bytes["device"],
                    "simulated_right_peak_bytes": right.peak_bytes["device"],
                }
            )
    return rows


def main() -> None:
    """Capture the steps, plan them, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", choices=("training", "prefill", "decode"), default="training")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shards", type=int, default=8, help="ZeRO-1 ranks; 1: state unsharded in bf16")
    parser.add_argument("--model-loss", action="store_true", help="the model's own loss, not chunked")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    parser.add_argument("--clip", action="store_true", help="gradients are clipped to a global norm")
    parser.add_argument(
        "--pointwise-bytes",
        type=float,
        default=1.0,
        help="share that operators without products move",
    )
    parser.add_argument("--bandwidths", default="25,50,100,200")
    parser.add_argument("--goals", default="peak,time")
    parser.add_argument("--budget-gb", type=float, default=64.0)
    parser.add_argument(
        "--policies",
        default="ours,ours-margin,ours-copies-only,recompute-only,longest-gap,largest-first,on-demand,checkpoint,save-on-cpu,keep",
    )
    parser.add_argument("--skip-error", action="store_true", help="leave out the wrong bandwidths")
    args = parser.parse_args()
    if args.step == "training":
        chunks = None if args.model_loss else 8
        clip_norm = 1.0 if args.clip else None
        program = training(args.tokens, args.layers, chunks, args.shards, clip_norm)
    else:
        tokens = args.tokens if args.step == "prefill" else 1
        program = inference(tokens, args.tokens + 128, args.layers)
    program = ROOFLINE.annotate(fused(program, args.pointwise_bytes))
    order = refine_order(program)[0]
    start = order_peak(program, range(len(program.operators)))
    policies, links = args.policies.split(","), [float(b) for b in args.bandwidths.split(",")]
    recorded = {}
    if args.step == "training" and args.shards > 1:
        for policy, saving in (("checkpoint", "checkpoint"), ("save-on-cpu", "on_cpu")):
            other = training(args.tokens, args.layers, chunks, args.shards, clip_norm, saving)
            recorded[policy] = ROOFLINE.annotate(fused(other, args.pointwise_bytes))
    policies = [p for p in policies if p in recorded or p not in ("checkpoint", "save-on-cpu")]
    rows = [
        row
        for gb_s in links
        for goal in args.goals.split(",")
        for row in rows_of(
            program,
            gb_s,
            goal,
            policies,
            int(args.budget_gb * 1e9),
            args.slowdown,
            recorded,
        )
    ]
    identity = replay(program, program.on_device, identity_actions(program, order))
    arena = assign_addresses(identity.residency, program.sizes)[1]
    limit_s = program.seconds * (1 + args.slowdown)
    result = {
        "what": "simulated, not run on an accelerator",
        "command": sys.argv[1:],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "roofline": asdict(ROOFLINE),
        "operators": len(program.operators),
        "start_peak_bytes": start,
        "start_step_s": program.seconds,
        "identity_arena_over_peak": arena / max(identity.peak_bytes["device"], 1) - 1,
        "no_plan_below": [bounds(program, b, order, limit_s) for b in links],
        "rows": [asdict(row) for row in rows],
        "bandwidth_error": []
        if args.skip_error
        else [row for b in links for row in bandwidth_error(program, b, int(args.budget_gb * 1e9))],
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"simulated: start {start / 1e9:.1f} GB, step {program.seconds:.4f} s")
    for row in rows:
        if row.simulated_step_s is None:
            print(f"simulated {row.bandwidth_gb_s:>5.0f} GB/s {row.goal:<5}{row.policy:<18}{row.note}")
            continue
        print(
            f"simulated {row.bandwidth_gb_s:>5.0f} GB/s {row.goal:<5}{row.policy:<18}"
            f"{(row.simulated_peak_bytes or 0) / 1e9:>7.1f} GB {row.against_start or 0:>+7.1%}"
            f"{row.simulated_step_s:>9.4f} s {row.against_keep_s:>+7.1%}  {row.note}"
        )
    for least in result["no_plan_below"]:  # type: ignore[attr-defined]
        print(
            f"simulated {least['bandwidth_gb_s']:>5.0f} GB/s no plan by copies alone is below "
            f"{least['copies']['num_bytes'] / 1e9:.1f} GB, with recompute "
            f"{least['copies_and_recompute']['num_bytes'] / 1e9:.1f} GB"
        )
    for err in result["bandwidth_error"]:  # type: ignore[attr-defined]
        print(
            f"simulated {err['true_gb_s']:>5.0f} GB/s {err['goal']} planned at {err['assumed_gb_s']:.0f}: "
            f"{err['simulated_cost']:+.2%}"
        )


if __name__ == "__main__":
    main()
