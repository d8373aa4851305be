"""What the executor costs on a CPU: steps by plan against eager steps of the same model, in turns, in one process.

    python benchmarks/offload_overhead.py --json

Sides: `eager`; `identity`, a plan that moves nothing; `offload`, the least memory for 5 % more *simulated* time, with
copies on threads. An eager step pays for autograd and the Python of the model, a planned one for the executor: what an
identity step takes beside its kernels, per operator, in which the simulated device counts every storage. Of `narrow`
kernels are next to nothing. Bar: 15 us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _machine import machine
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.backends.torch.memory import PlannedDevice, capture_training, training_step
from hyper_parallel.backends.torch.memory._prepared import Prepared
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory

SIZES = {"narrow": (16, 32, 8), "small": (64, 4, 64), "medium": (384, 6, 256)}
"""Hidden size, layers, tokens."""
MOST_US = 15.0
LINK = Channel(5e9)
MACHINE = MemoryMachine(LINK, LINK)


def _made(name: str) -> tuple[Any, torch.optim.Optimizer]:
    hidden, layers, tokens = SIZES[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False,
    ))  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _batch(name: str, number: int) -> dict[str, Tensor]:
    tokens = SIZES[name][2]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 1024, (1, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _planned(name: str, offload: bool, stack: ExitStack) -> tuple[Any, MemoryPlan]:
    model, optimizer = _made(name)
    training_step(model, optimizer, _batch(name, 0))
    captured = capture_training(model, optimizer, _batch(name, 1))
    program = Roofline(3e10, 1e10).annotate(captured.program)
    goal: dict[str, Any] = {"max_slowdown": 0.05}
    if not offload:
        goal = {"budget_bytes": 1 << 50, "reorder": False, "recompute": False}
    plan = plan_memory(program, MACHINE, **goal)
    device = PlannedDevice(captured, plan, MACHINE, copies="threads" if offload else "at_issue")
    return stack.enter_context(device), plan


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians of one size."""
    with ExitStack() as stack:
        model, optimizer = _made(name)
        plain = (_batch(name, 0), _batch(name, 1))
        for batch in plain:
            training_step(model, optimizer, batch)
        identity, _ = _planned(name, False, stack)
        offload, plan = _planned(name, True, stack)
        sides: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
            "eager": lambda batch: training_step(model, optimizer, batch),
            "identity": lambda batch: identity.step(batch)[0],
            "offload": lambda batch: offload.step(batch)[0],
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(2, 2 + rounds):
            batch = _batch(name, number)
            losses = []
            for side, step in sides.items():
                start = time.perf_counter()
                losses.append(step(batch))
                seconds[side].append(time.perf_counter() - start)
            assert torch.equal(losses[0], losses[1])
            assert torch.equal(losses[0], losses[2])
        kernels = [ready.run for ready in identity.state.actions if isinstance(ready, Prepared)]
        alone: list[float] = []
        for _ in range(rounds):
            start = time.perf_counter()
            with torch.no_grad():
                for run in kernels:
                    run()
            alone.append(time.perf_counter() - start)
        medians = {side: statistics.median(found[2:]) for side, found in seconds.items()}
        copies = sum(action.kind in ("store", "prefetch") for action in plan.actions)
        beside_s = medians["identity"] - statistics.median(alone[2:])
        return {
            "step_s": medians,
            "kernels_s": statistics.median(alone[2:]),
            "host_us_per_operator": beside_s * 1e6 / len(kernels),
            "identity_over_eager": medians["identity"] / medians["eager"],
            "offload_over_eager": medians["offload"] / medians["eager"],
            "operators": len(plan.program.operators),
            "copies": copies,
            "copied_bytes": sum(plan.replayed.copied_bytes.values()),
            "peak_bytes": plan.peak_bytes["device"],
            "eager_peak_bytes": identity.plan.peak_bytes["device"],
        }


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, given.rounds) for name in given.sizes}
    passed = "narrow" not in found or found["narrow"]["host_us_per_operator"] <= MOST_US
    if given.json:
        facts = {"machine": machine(), "rounds": given.rounds, "passed": passed}
        print(json.dumps({**facts, "sizes": found}, indent=1))
        return int(not passed)
    for name, row in found.items():
        times = ", ".join(f"{side} {s * 1e3:.1f} ms" for side, s in row["step_s"].items())
        print(f"{name}: {times}; identity {row['identity_over_eager']:.2f}, "
              f"offload {row['offload_over_eager']:.2f} of eager; "
              f"{row['host_us_per_operator']:.1f} us per operator")  # fmt: skip
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
