"""How far plans of a small graph are from the best: the planner, all choices of up to three moves, the linear bound.

    python benchmarks/offload_small.py --json

All seconds are simulated. `best_of_moves` tries every set of at most three candidates, each emitted with three rules
for early reloads. What the planner takes longer than that, its selection loses. What lies between that and the bound is
the bound's own looseness (fractions of storages move, copies are cut) and what the emission rules lose, together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.offload import (
    Channel,
    MemoryMachine,
    least_time_bound,
    order_peak,
    plan_memory,
    use_definitions,
)
from hyper_parallel.offload._emit import Emitter
from hyper_parallel.offload._recompute import Recomputes
from hyper_parallel.offload._select import Selector


def chain(layers: int) -> MemoryProgram:
    """Forward and backward of a chain of matrix products; every layer saves its input, weights persist."""
    storages = [Storage("x", 1000, "activation")]
    operators = [Operator("input", (), (), (0,), 0.01)]
    weights = []
    for i in range(layers):
        storages += [
            Storage(f"w{i}", 400, "weight", True, True),
            Storage(f"h{i}", 1000, "activation"),
        ]
        weights.append(len(storages) - 2)
        below = 0 if i == 0 else len(storages) - 3
        operators.append(Operator("mm", (below, weights[-1]), (), (len(storages) - 1,), 1.0))
    above = len(storages) - 1
    for i in reversed(range(layers)):
        saved = 0 if i == 0 else 2 * i
        storages.append(Storage(f"d{i}", 1000, "activation" if i else "output", False, i == 0))
        reads = (above, weights[i], saved)
        operators.append(Operator("mm_back", reads, (), (len(storages) - 1,), 2.0))
        above = len(storages) - 1
    return MemoryProgram(f"chain of {layers}", tuple(storages), tuple(operators), 1)


def best_of_moves(
    program: MemoryProgram, m: MemoryMachine, order: tuple[int, ...], budget: int, limit_s: float
) -> tuple[float, int]:
    """Least seconds over all sets of at most three candidates, and how many programs were emitted."""
    again = Recomputes([list(u) for u in use_definitions(program, order).uses])
    movable = [s for s, x in enumerate(program.storages) if x.kind not in ("input", "output")]
    selector = Selector(program, m, order, again, movable, stall=True)
    best, tried = limit_s, 0
    for count in (1, 2, 3):
        for chosen in itertools.combinations(selector.candidates, count):
            gaps = [g for c in chosen for g in c.gaps]
            for window in (None, 4.0, 1.0):
                emitter = Emitter(program, m, order, gaps, again, budget, window=window)
                tried += 1
                if (
                    emitter.emit(best * (1 - 1e-9)) is not None
                    and emitter.peaks["device"] <= budget
                ):
                    best = min(best, emitter.clock.now_s)
    return best, tried


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    program = chain(args.layers)
    order = tuple(range(len(program.operators)))
    peak = order_peak(program, order)
    rows: list[dict[str, Any]] = []
    for bytes_s in (400.0, 800.0, 3000.0):
        m = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
        for share in (0.8, 0.7, 0.6):
            budget = int(peak * share)
            plan = plan_memory(program, m, budget_bytes=budget, recompute=False, reorder=False)
            bound = least_time_bound(program, m, order, budget, plan.seconds, recompute=False)
            best, tried = best_of_moves(program, m, order, budget, plan.seconds)
            rows.append(
                {
                    "bytes_s": bytes_s,
                    "budget_share": share,
                    "without_plan_s": program.seconds,
                    "planned_s": plan.seconds,
                    "best_of_moves_s": best,
                    "programs_tried": tried,
                    "bound_s": bound,
                    "planner_over_best": plan.seconds / best - 1,
                    "best_over_bound": best / bound - 1,
                }
            )
    result = {"what": "simulated", "command": sys.argv[1:], "program": program.name, "rows": rows}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
