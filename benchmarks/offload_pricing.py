"""Closed-form prediction of offload cost, compared with simulated memory plans of captured steps.

    python benchmarks/offload_pricing.py --jobs 2 --json              # all models, 20 minutes
    python benchmarks/offload_pricing.py --models llama-8b --links 50
    python benchmarks/offload_pricing.py --json --plans FILE          # simulated seconds of an earlier result

For every model, link and budget, extra seconds of a step are predicted by `cost.OffloadDemand`, and simulated for the
plan of `plan_memory`, with and without recomputation, as fractions of the step without offload. The demand (bytes and
seconds around the peak) is read from the captured program, so the comparison covers the closed form only, and not the
cost model's sizes.

Models: llama-8b is the step of `_llama_8b.py` (450 TFLOP/s, 2.8 TB/s), also with 8 of its 32 layers. clipped has 8
layers, bfloat16 state and gradient clipping. moe has 8 layers with the shapes of Qwen3-30B-A3B and 32 experts. deepseek
has 6 layers with latent attention and 16 narrower experts. fsdp and qwen3 have 6 layers of width 512 and 1024 tokens,
on a machine a thousand times slower, with links 250 times slower, because their narrow matmuls do less work per byte;
fsdp is one of 8 ranks of a fake process group.

The closed form was developed on llama-8b, its 8-layer variant and moe. clipped, fsdp and qwen3 were not used to choose
it. deepseek showed that results that are idle too briefly for copies must count as candidates for recomputation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _llama_8b import as_flash, llama, training
from _machine import machine as facts
from _model_steps import capture_training, training_step
from _recompute_sets import cheapest_at_peak, recompute_density, recompute_sets
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.cost import OffloadDemand
from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.ir import MemoryProgram, Operator
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    plan_memory,
    refine_order,
)
from hyper_parallel.memory.candidates import OffloadCandidates
from hyper_parallel.memory.def_use import live_bytes, use_definitions
from hyper_parallel.memory.memory_planner import baseline_seconds
from hyper_parallel.memory.recompute import ChainFinder, choose_recomputes

DEVELOPED = ("llama-8b", "llama-8b-8-layers", "moe")
"""Models on which the closed form was developed."""
LARGE = (*DEVELOPED, "clipped", "deepseek")
MODELS = (*LARGE, "fsdp", "qwen3")
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 8192}  # fmt: skip
SHARES = (0.75, 0.55, 0.4)
"""Budgets, as shares of the peak with everything kept."""
BUDGETS = (64e9, 50e9, 40e9)
"""Budgets of the 8B step, in bytes; its peak is 83.1 GB."""
LONGER = (0.01, 0.03)
"""Additional candidate sets: total recomputation time as a fraction of the step."""
COLLECTIVES_BYTES_S = 1.8e9
"""Bytes/s that a rank of fsdp sends and receives."""


def captured(name: str) -> MemoryProgram:
    """Return the program of a model's training step, with the seconds of its operators."""
    made = {"moe": moe, "clipped": clipped, "deepseek": deepseek, "fsdp": fsdp, "qwen3": qwen3}
    if name in LARGE:
        layers = 32 if name == "llama-8b" else 8
        program = made[name]() if name in made else training(8192, layers, 8, 8)
        return Roofline(450e12, 2.8e12).annotate(program)
    program = Roofline(450e9, 2.8e9).annotate(made[name]())
    link = Channel(COLLECTIVES_BYTES_S)
    operators = (
        replace(op, seconds=0.0, comm_s=link.seconds(op.access_bytes)) if op.group else op for op in program.operators
    )
    return replace(program, operators=tuple(operators))


def moe() -> MemoryProgram:
    """Return the step of a mixture of experts with grouped matmuls, whose sizes do not depend on the data."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=32, num_experts_per_tok=8,
        vocab_size=65536, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with FakeTensorMode():
        return step_of(AutoModelForCausalLM.from_config(as_flash(config), dtype=torch.bfloat16), 8192, 8)


def clipped() -> MemoryProgram:
    """Return the step of 8 layers of Llama-8B with bfloat16 state and clipping, which delays all updates."""
    with FakeTensorMode():
        return step_of(llama(8), 8192, 8, clip_norm=1.0)


def deepseek() -> MemoryProgram:
    """Return the step of a model with latent attention, shared experts and bfloat16 state."""
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, n_group=1,
        topk_group=1, first_k_dense_replace=1, vocab_size=65536,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with FakeTensorMode():
        return step_of(AutoModelForCausalLM.from_config(as_flash(config), dtype=torch.bfloat16), 8192, 8)


def qwen3() -> MemoryProgram:
    """Return the step of a small dense model with bfloat16 state."""
    config = AutoConfig.for_model("qwen3", head_dim=64, **SMALL)
    with FakeTensorMode():
        return step_of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), 1024, 4)


def fsdp() -> MemoryProgram:
    """Return the step of one of 8 FSDP ranks of a small model, with float32 shards gathered in bfloat16."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        program = step_of(fully_shard(model, mesh=mesh, mp_policy=policy), 1024, None)
    dist.destroy_process_group()
    return refilled(program)


def step_of(model: Any, tokens: int, chunks: int | None, clip_norm: float | None = None) -> MemoryProgram:
    """Return the step of a model with AdamW on one sequence."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    training_step(model, optimizer, batch, loss_chunks=chunks)
    return capture_training(model, optimizer, batch, clip_norm=clip_norm, loss_chunks=chunks).program


def refilled(program: MemoryProgram) -> MemoryProgram:
    """Return the program with gathered parameters as new allocations.

    Under fake tensors, the capture does not record that FSDP frees their storages.
    """
    storages, operators = list(program.storages), list[Operator]()
    now: dict[int, int] = {}
    for op in program.operators:
        fills = op.name == "fsdp.split_with_sizes_copy"
        for s in op.writes if fills else ():
            now[s] = len(storages)
            storages.append(replace(storages[s], kind="activation", at_start=False, at_end=False))
        made = tuple(now[s] for s in op.writes) if fills else ()
        reads = tuple(now.get(s, s) for s in op.reads if not (fills and s in op.writes))
        writes = () if fills else tuple(now.get(s, s) for s in op.writes)
        operators.append(replace(op, reads=reads, writes=writes, allocs=(*op.allocs, *made)))
    gone = [replace(x, num_bytes=0) if s in now else x for s, x in enumerate(storages)]
    return replace(program, storages=tuple(gone), operators=tuple(operators))


def load_of(program: MemoryProgram, budget: float, channel: Channel, again: bool) -> OffloadDemand:
    """Return the offload demand of a step: bytes that are idle at its peak, and seconds for copies before and after it.

    A channel can evict until the point at which live bytes, plus the bytes that it has carried by then, reach the peak,
    and
    correspondingly for reloads. Updated state can be evicted from the first update on. A storage counts as resident if
    it
    is idle around the peak for less time than its copies take. If updates run within the backward pass, state whose
    last
    copy would outlast the step also counts as resident.
    """
    order = refine_order(program)[0]
    chains = use_definitions(program, order)
    ends = np.cumsum([program.operators[i].seconds for i in order])
    live = live_bytes(program, chains.uses).astype(float)
    peak = int(np.argmax(live))
    operators = [program.operators[i] for i in order]
    first_update = next(
        at for at, op in enumerate(operators)
        if op.phase == "optimizer" and any(program.storages[s].kind in ("weight", "expert") for s in op.writes)
    )  # fmt: skip
    inside = any(op.phase == "backward" for op in operators[first_update:])
    kinds = {"optimizer": 0, "weight": 1, "expert": 1, "gradient": 2, "activation": 3}
    resting, alive = [0.0] * 4, np.zeros(len(order))
    for s, storage in enumerate(program.storages):
        uses, size = chains.uses[s], float(program.sizes[s])
        if not uses and not storage.persistent:
            continue
        first = 0 if storage.at_start else uses[0]
        last = len(order) - 1 if storage.at_end else uses[-1]
        if storage.kind == "activation":
            alive[first : last + 1] += size
        if not first <= peak <= last or peak in uses or storage.kind not in kinds:
            continue
        copy_s, before = channel.seconds(storage.num_bytes), [u for u in uses if u < peak]
        idle_s = ends[min((u for u in uses if u > peak), default=-1)]
        idle_s -= ends[before[-1]] + copy_s if before and not storage.persistent else 0.0
        idle_s -= ends[peak] if storage.persistent else 0.0
        written = chains.writes[s] if storage.persistent else ()
        outlasts = inside and bool(written) and ends[written[-1]] + copy_s > ends[-1]
        if idle_s >= copy_s and not outlasts:
            resting[kinds[storage.kind]] += size
    passing = products = (0.0, 0.0)
    if again:
        passing, products = computed_again(program, channel, order)
        # Storages that are idle too briefly for copies may still be recomputed.
        resting[3] = max(resting[3], passing[0] + products[0])
    fewer_s = (live[peak] - live) / channel.bytes_s
    forward = float((np.append(0.0, ends[:peak]) + fewer_s[: peak + 1]).min())
    backward = float((ends[-1] - ends[peak:] + fewer_s[peak:]).min())
    update = float(ends[-1] - ends[first_update])
    budget -= program.staging_bytes  # staging bytes outside the arena
    values = (
        live[peak] - budget, (live - alive).max() - budget, program.staging_bytes, np.inf, *resting,
        passing[0], products[0], passing[1], products[1], forward, backward, update, 1.0, 1.0, 1.0, channel.bytes_s,
    )  # fmt: skip
    return OffloadDemand(*(np.full(1, float(v)) for v in values))


def computed_again(
    program: MemoryProgram, channel: Channel, order: tuple[int, ...]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (freed bytes of the peak, seconds) of a cheap set of results to recompute, and of the remaining results.

    Results are considered in sets, because the inputs of a recomputed result must stay resident. The cheap set frees
    most
    bytes per second among sets that free at least half of all recomputable bytes.
    """
    chains = use_definitions(program, order)
    finder = ChainFinder(program, chains)
    density = recompute_density(finder)
    machine = MemoryMachine(channel, channel)
    sets = recompute_sets(program, machine, density)
    sets += [cheapest_at_peak(program, chains, density, x * program.seconds) for x in LONGER]
    most = float(live_bytes(program, chains.uses).max())
    found = []
    for chosen in sets:
        dropped = choose_recomputes(finder, chosen)
        profile = OffloadCandidates(program, machine, order, dropped, ()).profile
        found.append((max(most - float(profile.max()), 0.0), dropped.seconds))
    largest = max(found)
    halves = [x for x in found if 2.0 * x[0] >= largest[0] > 0.0] or [(0.0, 0.0)]
    cheap = max(halves, key=lambda x: x[0] / max(x[1], 1e-9))
    return cheap, (largest[0] - cheap[0], max(largest[1] - cheap[1], 0.0))


def rows_of(name: str, link: float, known: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return predicted and simulated extra time of a model and link, one row per budget.

    `known` are rows of an earlier result, by model, link and budget; their simulated values are reused.
    """
    torch.set_num_threads(1)
    program = captured(name)
    order = refine_order(program)[0]
    start = float(live_bytes(program, use_definitions(program, order).uses).max())
    step_s = baseline_seconds(program, reorder=True)
    channel = Channel(link * 1e9 * (1.0 if name in LARGE else 4e-3))
    machine = MemoryMachine(channel, channel)
    rows = []
    for budget in BUDGETS if name == "llama-8b" else [share * start for share in SHARES]:
        row: dict[str, Any] = {
            "model": name, "link_gb_s": channel.bytes_s / 1e9, "budget_bytes": int(budget), "start_bytes": start,
            "step_s": step_s, "planning_cpu_s": 0.0,
        }  # fmt: skip
        earlier = known.get((name, row["link_gb_s"], row["budget_bytes"]))
        for again in (True, False):
            kind = "recompute" if again else "copies"
            load = load_of(program, budget, channel, again)
            row[f"predicted_{kind}"] = float(load.cheapest()[1][0]) / step_s
            if load.missing_bytes[0] > 0:
                row[f"predicted_{kind}"] = None
            if earlier is not None:
                names = ("simulated", "peak_bytes", "note")
                taken = (*(f"{name}_{kind}" for name in names), "planning_cpu_s")
                row |= {name: earlier[name] for name in taken if name in earlier}
                continue
            begin = time.process_time()
            try:
                plan = plan_memory(program, machine, budget_bytes=int(budget), recompute=again)
                row[f"simulated_{kind}"] = plan.seconds / step_s - 1.0
                row[f"peak_bytes_{kind}"] = plan.peak_bytes["device"] + program.staging_bytes
            except BudgetImpossible as error:
                row[f"simulated_{kind}"] = None
                row[f"note_{kind}"] = f"{error.code}: {error.allowed}"
            row["planning_cpu_s"] += time.process_time() - begin
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of predicted step times, grouped by the simulated extra time."""
    found: dict[str, Any] = {}
    for kind in ("recompute", "copies"):
        told = [
            (
                (1.0 + r[f"predicted_{kind}"]) / (1.0 + r[f"simulated_{kind}"]) - 1.0,
                r[f"simulated_{kind}"],
            )
            for r in rows
            if r[f"simulated_{kind}"] is not None and r[f"predicted_{kind}"] is not None
        ]
        for low, high in ((-1.0, 0.1), (0.1, 0.5), (0.5, np.inf)):
            off = [x for x, t in told if low < t <= high]
            if off:
                found[f"{kind}, simulated up to {high:+.0%}"] = {
                    "cases": len(off), "within_10_percent": sum(abs(x) <= 0.1 for x in off),
                    "median": float(np.median(off)), "p90_absolute": float(np.quantile(np.abs(off), 0.9)),
                    "lowest": min(off), "highest": max(off),
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
    """Capture the steps, predict and plan, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--links", default="25,50")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--plans", type=Path, help="take simulated seconds from this result")
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    args = parser.parse_args()
    links = [float(x) for x in args.links.split(",")]
    earlier = json.loads(args.plans.read_text(encoding="utf-8")) if args.plans else {"rows": ()}
    known = {(r["model"], r["link_gb_s"], r["budget_bytes"]): r for r in earlier["rows"]}
    cases = [(name, link) for name in args.models.split(",") for link in links]
    with ProcessPoolExecutor(args.jobs) as pool:
        begun = [pool.submit(rows_of, name, link, known) for name, link in cases]
        rows = [row for one in begun for row in one.result()]
    result = {
        "what": "simulated, not run on an accelerator",
        "command": sys.argv[1:],
        "planned_by": earlier.get("planned_by") or {"command": sys.argv[1:], **facts()},
        "summary": {
            "models that the form was worked out on": summary([r for r in rows if r["model"] in DEVELOPED]),
            "held-out models": summary([r for r in rows if r["model"] not in DEVELOPED]),
        },
        "rows": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
