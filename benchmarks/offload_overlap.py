"""Simulated step times of memory plans with and without overlap of communication and computation.

    python benchmarks/offload_overlap.py                 # Llama-8B shapes, FSDP over 8, a table
    python benchmarks/offload_overlap.py --json          # the same as JSON
    python benchmarks/offload_overlap.py --layers 8 --links 50 --budgets 0.8,0.6   # also plans with copies

The step of one FSDP rank is captured under fake tensors on a fake process group. Variants: every collective is waited
for where it was recorded; the recorded order, with each collective waited for where its result is needed; and the
orders from which the planner chooses.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from _llama_8b import llama
from _model_steps import capture_training, training_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    clocked,
    identity_actions,
    order_peak,
    overlapped,
    plan_memory,
)

ROOFLINE = Roofline(flops_s=450e12, bytes_s=2.8e12)
MACHINE = MemoryMachine(Channel(50e9), Channel(50e9))
DEPTHS = (1, 2)


def captured(layers: int, ranks: int, tokens: int) -> MemoryProgram:
    """Return the program of a training step on one FSDP rank, with float32 shards gathered in bfloat16."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with FakeTensorMode():
        model: Any = llama(layers, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        training_step(model, optimizer, batch)
        return capture_training(model, optimizer, batch).program


def waited_at_once(program: MemoryProgram) -> MemoryProgram:
    """Return the program with collectives as computation, so that nothing overlaps with them."""
    operators = (replace(op, seconds=op.seconds + op.comm_s, comm_s=0.0, group="") for op in program.operators)
    return replace(program, operators=tuple(operators))


def seconds(program: MemoryProgram, order: Any) -> tuple[float, float]:
    """Return the simulated seconds of a step without copies, and the seconds in which computation waits for ranks."""
    clock = clocked(program, MACHINE, identity_actions(program, order))
    return clock.now_s, clock.join_s


def rows(program: MemoryProgram) -> list[dict[str, Any]]:
    """Return the results of all variants of one step."""
    recorded = tuple(range(len(program.operators)))
    ways = [
        ("waited for at once", waited_at_once(program), recorded),
        ("recorded order", program, recorded),
        *((f"begun {n} ahead", program, overlapped(program, recorded, n)) for n in DEPTHS),
    ]
    found = []
    for name, way, order in ways:
        step_s, join_s = seconds(way, order)
        peak = order_peak(way, order)
        found.append({"way": name, "step_s": step_s, "exposed_s": join_s, "peak_bytes": peak})
    return found


def budgets(program: MemoryProgram, shares: list[float]) -> list[dict[str, Any]]:
    """Return plans with and without overlap, for budgets given as fractions of the recorded order's peak."""
    whole = order_peak(program, range(len(program.operators)))
    found = []
    for share in shares:
        row: dict[str, Any] = {"budget_bytes": int(whole * share), "share": share}
        for name, way in (("at_once_s", waited_at_once(program)), ("beside_s", program)):
            try:
                row[name] = plan_memory(way, MACHINE, budget_bytes=int(whole * share)).seconds
            except BudgetImpossible as error:
                row[name] = None
                row["least_bytes"] = error.least_bytes
        found.append(row)
    return found


def main() -> None:
    """Print the results as a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--links", default="450,50,25", help="GB/s of a rank to the others")
    parser.add_argument("--budgets", default="", help="shares of the recorded order's peak")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plain = ROOFLINE.annotate(captured(args.layers, args.ranks, args.tokens))
    results = []
    for gb_s in map(float, args.links.split(",")):
        link = Channel(gb_s * 1e9)
        operators = (
            replace(op, seconds=0.0, comm_s=link.seconds(op.access_bytes)) if op.group else op for op in plain.operators
        )
        program = replace(plain, operators=tuple(operators))
        shares = [float(s) for s in args.budgets.split(",") if s]
        result = {
            "link_gb_s": gb_s,
            "compute_s": program.seconds,
            "link_s": program.comm_seconds,
            "ways": rows(program),
            "budgets": budgets(program, shares),
        }
        results.append(result)
        if not args.json:
            print(f"{gb_s:g} GB/s: compute {program.seconds:.4f} s, link {program.comm_seconds:.4f} s")
            for row in result["ways"]:
                print(
                    f"  {row['way']:20} {row['step_s']:.4f} s, waiting {row['exposed_s']:.4f} s, "
                    f"{row['peak_bytes'] / 1e9:.1f} GB"
                )
            for row in result["budgets"]:
                print(f"  {row}")
    if args.json:
        facts = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({**vars(args), "machine": facts, "simulated": results}, indent=1))


if __name__ == "__main__":
    main()
