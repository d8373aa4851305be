"""Size of planned arenas relative to the peak of live bytes, over many programs and goals.

    python benchmarks/offload_addresses.py --json
    python benchmarks/offload_addresses.py --parts llama --layers 32

* random: random programs of 3 to 24 operators, from the generator of the tests, on random machines.
* tiny: training, prefill and decode of six model families with three layers, and the models of `offload_overhead.py`.
* llama: training, prefill and decode with Llama-8B shapes.

Every program is planned for six goals. For a plan whose arena exceeds the peak by more than 2 %, an exact search looks
for addresses within 2 %. `impossible` means that none exist, `unknown` that the search ended without a result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import HealthCheck, Phase, given, seed, settings

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory import (
    MemoryMachine,
    Roofline,
    order_peak,
    plan_memory,
)

ALLOWED = 0.02
SLOWDOWNS = (0.0, 0.02, 0.05)
BUDGETS = (0.9, 0.6, 0.3)
Case = tuple[str, MemoryProgram, MemoryMachine]


def random_cases(count: int) -> Iterator[Case]:
    """Yield random programs."""
    from tests.memory.test_random_programs import machines, programs

    cases: list[Case] = []

    @seed(1)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(), machines())
    def draw(program: MemoryProgram, machine: MemoryMachine) -> None:
        cases.append((f"random {len(cases)}", program, machine))

    draw()
    yield from cases


def tiny_cases() -> Iterator[Case]:
    """Yield recorded steps of tiny models."""
    import offload_overhead
    import torch
    from _model_steps import capture_inference, capture_training, training_step
    from tests.torch_memory.models import FAMILIES, static_cache, tiny_model, tokens
    from tests.torch_memory.test_parity import MACHINE, ROOFLINE, captured_training, forward

    torch.set_num_threads(1)
    for family in FAMILIES:
        for name, clip in (("train", None), ("train, clipped", 0.5)):
            program = ROOFLINE.annotate(captured_training(family, clip)[2].program)
            yield f"{family} {name}", program, MACHINE
        for name, length in (("prefill", 12), ("decode", 1)):
            model = tiny_model(family).eval()
            cache = static_cache(model)
            if length == 1:
                forward(model, cache, tokens(0, length=12))
            inputs = {"input_ids": tokens(20, length=length)}
            program = ROOFLINE.annotate(capture_inference(model, inputs, cache).program)
            yield f"{family} {name}", program, MACHINE
    for size in offload_overhead.SIZES:
        model, optimizer = offload_overhead._made(size)
        training_step(model, optimizer, offload_overhead._batch(size, 0))
        captured = capture_training(model, optimizer, offload_overhead._batch(size, 1))
        program = Roofline(3e10, 1e10).annotate(captured.program)
        yield f"{size} train", program, offload_overhead.MACHINE


def llama_cases(layers: int) -> Iterator[Case]:
    """Yield steps with Llama-8B shapes, captured under fake tensors."""
    from _llama_8b import inference, training
    from offload_policies import ROOFLINE, machine

    yield "llama-8b train", ROOFLINE.annotate(training(8192, layers, 8, 8)), machine(50)
    yield "llama-8b prefill", ROOFLINE.annotate(inference(8192, 8320, layers)), machine(50)
    yield "llama-8b decode", ROOFLINE.annotate(inference(1, 8320, layers)), machine(50)


def rows_of(name: str, program: MemoryProgram, machine: MemoryMachine) -> list[dict[str, Any]]:
    """Return the results of one program for six goals."""
    start = order_peak(program, range(len(program.operators)))
    goals: list[tuple[str, dict[str, Any]]] = [(f"{s:.0%} more time", {"max_slowdown": s}) for s in SLOWDOWNS]
    goals += [(f"{b:.0%} of the bytes", {"budget_bytes": int(start * b)}) for b in BUDGETS]
    rows = []
    for goal, wanted in goals:
        begin = time.process_time()
        try:
            plan = plan_memory(program, machine, **wanted)
        except HyperParallelError:
            continue
        peak = plan.peak_bytes["device"]
        if peak:
            rows.append(
                {
                    "case": name,
                    "goal": goal,
                    "stays": len(plan.addresses),
                    "peak_bytes": peak,
                    "arena_over_peak": plan.arena_bytes / peak - 1,
                    "staging_over_peak": program.staging_bytes / peak,
                    "within": plan.arena_bytes <= (1 + ALLOWED) * peak,
                    "planning_cpu_s": time.process_time() - begin,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Plan all cases and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="every plan, not only those over 2 %%")
    parser.add_argument("--parts", default="random,tiny,llama")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--random", type=int, default=100)
    args = parser.parse_args()
    made = {
        "random": lambda: random_cases(args.random),
        "tiny": tiny_cases,
        "llama": lambda: llama_cases(args.layers),
    }
    result: dict[str, Any] = {
        "what": "simulated, not run on an accelerator",
        "command": sys.argv[1:],
    }
    for part in args.parts.split(","):
        rows = [row for case in made[part]() for row in rows_of(*case)]
        over = [row for row in rows if not row["within"]]
        worst = max((row["arena_over_peak"] for row in rows if row["within"]), default=0.0)
        result[part] = {
            "plans": len(rows),
            "worst_within_2_percent": worst,
            "over_2_percent": over,
            "most_planning_cpu_s": max(row["planning_cpu_s"] for row in rows),
        }
        if args.json and part != "random":
            result[part]["rows"] = rows
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
