"""How far plans of small graphs are from the best: the planner's peak beside a bound in whole storages.

    python benchmarks/offload_small.py --json

Training steps of chains of 3 to 12 layers (16 to 61 operators): forward, backward and update, three kinds of copies.
The goal is the least peak at <= 2 % more time, without recomputation, in the order given. `bound_bytes` is the dual
bound of a mixed-integer program (HiGHS): a variable for every storage and position it may be away,
whole storages, what both channels carry between any two positions, and the seconds allowed. Copies may be cut there,
so a plan that reaches it need not exist. Everything is simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from typing import Any

from hyper_parallel.ir import MemoryProgram, Operator, Storage, StorageKind
from hyper_parallel.offload import Channel, MemoryMachine, order_peak, plan_memory
from hyper_parallel.offload._bound import least_peak_program

SLOWDOWN = 0.02


def chain(layers: int, act: int = 1000, weight: int = 400) -> MemoryProgram:
    """One training step; every layer has a cheap pointwise result and a matrix product."""
    storages: list[Storage] = []
    operators: list[Operator] = []

    def new(name: str, size: int, kind: StorageKind, kept: bool = False) -> int:
        storages.append(Storage(name, size, kind, kept, kept))
        return len(storages) - 1

    h = new("input", act, "input", True)
    weights = [new(f"w{i}", weight, "weight", True) for i in range(layers)]
    states = [new(f"m{i}", 2 * weight, "optimizer", True) for i in range(layers)]
    saved = []
    for i in range(layers):
        p, y = new(f"act{i}", act, "activation"), new(f"mm{i}", act, "activation")
        operators.append(Operator("pointwise", (h,), (), (p,), 0.01))
        operators.append(Operator("mm", (p, weights[i]), (), (y,), 1.0))
        saved.append((h, p))
        h = y
    d = new("loss_grad", act, "activation")
    operators.append(Operator("loss", (h,), (), (d,), 0.01))
    grads = [0] * layers
    for i in reversed(range(layers)):
        h, p = saved[i]
        grads[i] = new(f"g{i}", weight, "gradient")
        operators.append(Operator("mm_dw", (p, d), (), (grads[i],), 1.0, phase="backward"))
        below = new(f"d{i}", act, "activation")
        reads = (d, weights[i], h)
        operators.append(Operator("mm_dx", reads, (), (below,), 1.0, phase="backward"))
        d = below
    for i in range(layers):
        reads = (weights[i], states[i], grads[i])
        operators.append(Operator("adamw", reads, reads[:2], (), 0.05, phase="optimizer"))
    return MemoryProgram(f"chain of {layers}", tuple(storages), tuple(operators), 1)


def main() -> None:
    """Plan, bound, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    parser.add_argument("--layers", default="3,5,8,12")
    parser.add_argument("--bytes-s", default="300,800,1500,3000")
    parser.add_argument("--solver-s", type=float, default=30.0, help="limit per case")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers in map(int, args.layers.split(",")):
        program = chain(layers)
        order = tuple(range(len(program.operators)))
        limit_s = program.seconds * (1 + SLOWDOWN)
        for bytes_s in map(float, args.bytes_s.split(",")):
            machine = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
            begin = time.process_time()
            plan = plan_memory(
                program,
                machine,
                max_slowdown=SLOWDOWN,
                bandwidth_margin=0.0,
                recompute=False,
                reorder=False,
            )
            planned_s = time.process_time() - begin
            lp = least_peak_program(program, machine, order, limit_s, recompute=False)
            linear = lp.lower_bound() if len(lp.costs) < 1500 else None
            best, dual = lp.whole_optimum(args.solver_s)
            bound = max(dual, linear or 0.0)
            rows.append(
                {
                    "operators": len(order),
                    "bytes_s": bytes_s,
                    "start_peak_bytes": order_peak(program, order),
                    "simulated_peak_bytes": plan.peak_bytes["device"],
                    "slowdown": plan.seconds / program.seconds - 1,
                    "linear_bound_bytes": linear,
                    "bound_bytes": bound,
                    "relaxed_optimum_bytes": best,
                    "over_bound": plan.peak_bytes["device"] / bound - 1,
                    "planning_cpu_s": planned_s,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    over = [row["over_bound"] for row in rows]
    result = {
        "what": "simulated",
        "command": sys.argv[1:],
        "highspy": version("highspy"),
        "rows": rows,
        "within_3_percent": sum(o <= 0.03 for o in over),
        "cases": len(over),
        "worst_over_bound": max(over),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
