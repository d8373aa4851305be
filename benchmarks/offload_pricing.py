"""The closed form for offload copies beside memory plans of captured steps; every number printed is simulated.

    python benchmarks/offload_pricing.py --json                       # the 8B step and small models
    python benchmarks/offload_pricing.py --models llama-8b --links 50
    python benchmarks/offload_pricing.py --json --plans FILE          # simulated seconds of an earlier result

For every model, link and budget: what `cost.Load` predicts a step to take longer, and what the plan of `plan_memory`
takes longer in the simulator, with and without recomputation, as shares of the step with everything kept. The load is
read off the captured program (bytes and seconds around its peak), so only the closed form is compared, not the cost
model's sizes.

llama-8b is the step of `_llama_8b.py` (450 TFLOP/s, 2.8 TB/s). The small models are 6 layers of their family at width
512 and 1024 tokens, bfloat16, with AdamW, on a thousandth of that machine. Their products are narrow, so a byte is kept
for less work: their links are a thousandth of four times those of the 8B step. The form was worked out on the steps of
llama; qwen3 and gpt2 were priced once, afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _llama_8b import training
from _machine import machine as facts
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.offload import capture_training, training_step
from hyper_parallel.cost import Load
from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.ir import MemoryProgram
from hyper_parallel.offload import Channel, MemoryMachine, Roofline, plan_memory, refine_order
from hyper_parallel.offload._recompute import Chains
from hyper_parallel.offload._usedef import live_bytes, use_definitions

SMALL = {
    "llama": {"intermediate_size": 1408, "num_key_value_heads": 4},
    "qwen3": {"intermediate_size": 1408, "num_key_value_heads": 4, "head_dim": 64},
    "gpt2": {},
}
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)
"""Budgets of the small models, as shares of the peak with everything kept."""
BUDGETS = (75e9, 64e9, 50e9, 40e9, 25e9, 10e9)
"""Budgets of the 8B step, in bytes; its peak is 83.1 GB."""


def small(family: str) -> MemoryProgram:
    """One training step of a small model of a family."""
    shapes: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    if family == "gpt2":
        shapes = {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 1024}
    config = AutoConfig.for_model(family, vocab_size=8192, **shapes, **SMALL[family])
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(1, 1024, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        training_step(model, optimizer, batch, loss_chunks=4)
        return capture_training(model, optimizer, batch, loss_chunks=4).program


def load_of(program: MemoryProgram, budget: float, link: float, again: bool) -> Load:
    """The load of a step of one microbatch: bytes that rest at its peak, and the seconds before and after it.

    Updates move into the backward pass, since nothing clips: states may leave until the end.
    """
    order = refine_order(program)[0]
    chains = use_definitions(program, order)
    ends = np.cumsum([program.operators[i].seconds for i in order])
    live = live_bytes(program, chains).astype(float)
    peak, finder = int(np.argmax(live)), Chains(program, chains)
    resting = dict.fromkeys(("optimizer", "weight", "gradient", "activation"), 0.0)
    alive = np.zeros(len(order))
    passing, products = [0.0, 0.0], [0.0, 0.0]
    for s, storage in enumerate(program.storages):
        uses = chains.uses[s]
        if not uses and not storage.persistent:
            continue
        first = 0 if storage.at_start else uses[0]
        last = len(order) - 1 if storage.at_end else uses[-1]
        if storage.kind == "activation":
            alive[first : last + 1] += program.sizes[s]
        if not first <= peak <= last or peak in uses or storage.kind not in resting:
            continue
        resting[storage.kind] += program.sizes[s]
        chain = finder.of_longest_gap(s) if again and storage.kind == "activation" else None
        if chain is None:
            continue
        names = {program.operators[o].name for o in chain.operators}
        if any("attention" in name for name in names):
            continue
        flops = any(program.operators[o].flops for o in chain.operators)
        found = products if flops else passing
        found[0] += program.sizes[s]
        found[1] += chain.seconds
    forward, after = float(ends[peak]), float(ends[-1] - ends[peak])
    budget -= program.staging_bytes  # what is made beside the arena
    values = (
        live[peak] - budget, (live - alive).max() - budget, program.staging_bytes, np.inf, *resting.values(),
        passing[0], products[0], passing[1], products[1], forward, after, after, 1.0, 1.0, 1.0, link,
    )  # fmt: skip
    return Load(*(np.full(1, float(v)) for v in values))


def rows_of(
    name: str, links: list[float], known: dict[tuple[Any, ...], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Predicted and simulated, for every link and budget."""
    large = name == "llama-8b"
    scale, faster = (1.0, 1.0) if large else (1e-3, 4.0)
    program = Roofline(450e12 * scale, 2.8e12 * scale).annotate(
        training(8192, 32, 8, 8) if large else small(name)
    )
    order = refine_order(program)[0]
    start = float(live_bytes(program, use_definitions(program, order)).max())
    rows = []
    for link in links:
        channel = Channel(link * 1e9 * scale * faster)
        machine = MemoryMachine(channel, channel)
        for budget in BUDGETS if large else [share * start for share in SHARES]:
            row: dict[str, Any] = {
                "model": name, "link_gb_s": channel.bytes_s / 1e9, "budget_bytes": int(budget), "start_bytes": start,
                "step_s": program.seconds, "planning_cpu_s": 0.0,
            }  # fmt: skip
            earlier = known.get((name, row["link_gb_s"], row["budget_bytes"]))
            for again in (True, False):
                kind = "recompute" if again else "copies"
                load = load_of(program, budget, channel.bytes_s, again)
                row[f"predicted_{kind}"] = float(load.best()[1][0]) / program.seconds
                if load.missing_bytes[0] > 0:
                    row[f"predicted_{kind}"] = None
                if earlier is not None:
                    taken = (f"simulated_{kind}", f"note_{kind}", "planning_cpu_s")
                    row |= {name: earlier[name] for name in taken if name in earlier}
                    continue
                begin = time.process_time()
                try:
                    plan = plan_memory(program, machine, budget_bytes=int(budget), recompute=again)
                    row[f"simulated_{kind}"] = plan.seconds / program.seconds - 1.0
                except BudgetImpossible as error:
                    row[f"simulated_{kind}"] = None
                    row[f"note_{kind}"] = f"{error.code}: {error.allowed}"
                row["planning_cpu_s"] += time.process_time() - begin
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predicted and simulated shares of the step are apart, by what the simulated step takes longer."""
    found: dict[str, Any] = {}
    for kind in ("recompute", "copies"):
        told = [
            (r[f"predicted_{kind}"], r[f"simulated_{kind}"])
            for r in rows
            if r[f"simulated_{kind}"] is not None and r[f"predicted_{kind}"] is not None
        ]
        for low, high in ((-1.0, 0.1), (0.1, 0.5), (0.5, np.inf)):
            off = [abs(p - t) for p, t in told if low < t <= high]
            if off:
                found[f"{kind}, simulated up to {high:+.0%}"] = {
                    "cases": len(off), "within_5_percent_of_the_step": sum(x <= 0.05 for x in off),
                    "median": float(np.median(off)), "largest": max(off),
                    "predicted_less": sum(p < t for p, t in told if low < t <= high),
                }  # fmt: skip
        found[f"{kind}, possible or not"] = {
            said: sum(
                (r[f"predicted_{kind}"] is None, r[f"simulated_{kind}"] is None) == both for r in rows
            )
            for said, both in {
                "both possible": (False, False), "both impossible": (True, True),
                "predicted impossible only": (True, False), "no plan only": (False, True),
            }.items()
        }  # fmt: skip
    return found


def main() -> None:
    """Capture, predict, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-8b," + ",".join(SMALL))
    parser.add_argument("--links", default="25,50,100")
    parser.add_argument("--plans", type=Path, help="take simulated seconds from this result")
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    args = parser.parse_args()
    links = [float(x) for x in args.links.split(",")]
    earlier = json.loads(args.plans.read_text(encoding="utf-8")) if args.plans else {"rows": ()}
    known = {(r["model"], r["link_gb_s"], r["budget_bytes"]): r for r in earlier["rows"]}
    rows = [row for name in args.models.split(",") for row in rows_of(name, links, known)]
    result = {
        "what": "simulated, not run on an accelerator",
        "command": sys.argv[1:],
        "planned_by": earlier.get("planned_by") or {"command": sys.argv[1:], **facts()},
        "summary": summary(rows),
        "rows": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
