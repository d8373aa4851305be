"""Simulated decode steps under memory plans, and the cost of a wrong bandwidth estimate.

    python benchmarks/offload_decode.py --json                 # all parts
    python benchmarks/offload_decode.py --parts llama,mla

* llama: one token, Llama-8B shapes, 8192 tokens of context, bf16, captured.
* mla: a decode step with DeepSeek-V3 shapes, written by hand: attention of all 61 layers with one latent cache per
  sequence (512 + 64 values per token, bf16, absorbed projections), one shared and one routed expert per layer, two
  tokens per sequence (one is speculative). Head, embedding and communication are omitted.
* moe: one token with the shapes of Qwen3-30B-A3B (48 layers, 128 experts of 9.4 MB each, 8 routed per layer), 8192
  tokens of context, one storage per expert. `any`: a static plan, for which all experts of a layer must be resident
  when the router has run. `known`: random routed experts are known before the step, an upper bound on the value of
  predicting them. `on demand`: experts are in DRAM, and routed ones are fetched after the router, without overlap.
* error: Llama-8B training of 8192 tokens, planned for a bandwidth 30 % above or below the true one, with and without
  the planner's bandwidth margin.

`no_plan_saves_more_than` is derived from `reload_bound`: evicted bytes must return before the last operator that needs
any of them begins. The bound also holds for copies that begin in the previous step. `share_of_link` is relative to
1.02 B T, the bytes that a link of bandwidth B can carry in the allowed time, for a step of T seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from typing import Any

from _llama_8b import inference, training
from _reload_bound import reload_bound
from offload_policies import ROOFLINE, SLOWDOWN, machine

from hyper_parallel.ir import MemoryProgram, Operator, Storage, StorageKind
from hyper_parallel.memory import clocked, order_peak, plan_memory, refine_order

MOE_LAYERS, MOE_WIDTH, EXPERTS, CHOSEN = 48, 2048, 128, 8
MOE_EXPERT = 3 * MOE_WIDTH * 768  # numbers of one expert
MOE_ATTENTION = MOE_WIDTH * 128 * (32 + 4 + 4) + 32 * 128 * MOE_WIDTH

LAYERS, HEADS, LATENT, ROPE, WIDTH = 61, 128, 512, 64, 7168
MATRICES = {
    "q_a": WIDTH * 1536,
    "q_b": 1536 * HEADS * 192,
    "kv_a": WIDTH * (LATENT + ROPE),
    "kv_b": LATENT * HEADS * 256,
    "o": HEADS * 128 * WIDTH,
}
EXPERT = 3 * WIDTH * 2048


def mla_decode(batch: int, context: int, ahead: int = 2) -> MemoryProgram:
    """Return the program of a decode step of `batch` sequences, each with `ahead` tokens and a filled cache."""
    storages = [Storage("tokens", 8 * batch * ahead, "input", True, True)]
    operators: list[Operator] = []

    def add(name: str, num_bytes: int, kind: Any) -> int:
        storages.append(Storage(name, num_bytes, kind, True, True))
        return len(storages) - 1

    rows = batch * ahead
    for layer in range(LAYERS):
        for name, numbers in MATRICES.items():
            if name == "o":
                for sequence in range(batch):
                    cache_bytes = context * (LATENT + ROPE) * 2
                    cache = add(f"{layer}.cache.{sequence}", cache_bytes, "kv")
                    flops = 2.0 * HEADS * ahead * context * (2 * LATENT + ROPE)
                    operators.append(Operator("attention", (0, cache), flops=flops, access_bytes=cache_bytes))
            weight = add(f"{layer}.{name}", 2 * numbers, "weight")
            operators.append(Operator("mm", (0, weight), flops=2.0 * rows * numbers, access_bytes=2 * numbers))
        for name in ("shared", "routed"):
            weight = add(f"{layer}.{name}", 2 * EXPERT, "expert")
            operators.append(Operator("expert", (0, weight), flops=2.0 * rows * EXPERT, access_bytes=2 * EXPERT))
    return MemoryProgram("mla decode", tuple(storages), tuple(operators))


def moe_decode(context: int, known: bool) -> MemoryProgram:
    """Return the program of a decode step of one token; `known`: only the routed experts are in the program."""
    storages = [Storage("token", 8, "input", True, True)]
    operators: list[Operator] = []
    draw = random.Random(0)

    def add(name: str, num_bytes: int, kind: StorageKind) -> int:
        storages.append(Storage(name, num_bytes, kind, True, True))
        return len(storages) - 1

    def work(name: str, reads: tuple[int, ...], num_bytes: int) -> None:
        operators.append(Operator(name, (0, *reads), flops=float(num_bytes), access_bytes=num_bytes))

    for layer in range(MOE_LAYERS):
        weights = add(f"{layer}.attention", 2 * MOE_ATTENTION, "weight")
        cache = add(f"{layer}.cache", 2 * context * 4 * 128 * 2, "kv")
        router = add(f"{layer}.router", 2 * EXPERTS * MOE_WIDTH, "weight")
        experts = [add(f"{layer}.{e}", 2 * MOE_EXPERT, "expert") for e in range(EXPERTS)]
        chosen = draw.sample(experts, CHOSEN)
        work("attention", (weights, cache), 2 * MOE_ATTENTION + storages[cache].num_bytes)
        work("router", (router,), 2 * EXPERTS * MOE_WIDTH)
        work("experts", tuple(chosen if known else experts), CHOSEN * 2 * MOE_EXPERT)
    work("head", (add("head", 2 * 151936 * MOE_WIDTH, "weight"),), 2 * 151936 * MOE_WIDTH)
    return MemoryProgram("moe decode", tuple(storages), tuple(operators))


def on_demand_row(program: MemoryProgram, gb_s: float) -> dict[str, Any]:
    """Return the result for experts in DRAM, with the routed ones fetched after the router."""
    program = ROOFLINE.annotate(program)
    copy_s = machine(gb_s).prefetch.seconds(2 * MOE_EXPERT)
    seconds = program.seconds + MOE_LAYERS * CHOSEN * copy_s
    start = order_peak(program, range(len(program.operators)))
    least = start - 2 * MOE_EXPERT * (MOE_LAYERS * EXPERTS - CHOSEN)
    return {
        "what": "qwen3-30b-a3b decode, experts on demand",
        "bandwidth_gb_s": gb_s,
        "step_without_plan_s": program.seconds,
        "simulated_step_s": seconds,
        "slowdown": seconds / program.seconds - 1,
        "start_peak_bytes": start,
        "simulated_peak_bytes": least,
        "against_start": least / start - 1,
    }


def decode_rows(name: str, program: MemoryProgram, links: list[float], slowdown: float) -> list[dict[str, Any]]:
    """Return the least planned peak and the lower bound, for every link bandwidth."""
    program = ROOFLINE.annotate(program)
    start = order_peak(program, range(len(program.operators)))
    rows = []
    for gb_s in links:
        begin = time.process_time()
        plan = plan_memory(program, machine(gb_s), max_slowdown=slowdown, bandwidth_margin=0.0)
        saved = start - plan.peak_bytes["device"]
        limit_s = program.seconds * (1 + slowdown)
        link = min(gb_s * 1e9 * limit_s, start)
        order = refine_order(program)[0]
        bound = start - reload_bound(program, machine(gb_s), order, limit_s).num_bytes
        rows.append(
            {
                "what": name,
                "bandwidth_gb_s": gb_s,
                "step_without_plan_s": program.seconds,
                "simulated_step_s": plan.seconds,
                "slowdown": plan.seconds / program.seconds - 1,
                "start_peak_bytes": start,
                "simulated_peak_bytes": plan.peak_bytes["device"],
                "against_start": -saved / start,
                "no_plan_saves_more_than": bound / start,
                "share_of_bound": saved / bound,
                "share_of_link": saved / link,
                "arena_over_peak": plan.arena_bytes / plan.peak_bytes["device"] - 1,
                "planning_cpu_s": time.process_time() - begin,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def error_rows(gb_s: float) -> list[dict[str, Any]]:
    """Return the results of plans for a wrong bandwidth that run at the true one."""
    program = ROOFLINE.annotate(training(8192, 32, 8, 8))
    limit_s = program.seconds * (1 + SLOWDOWN)
    rows = []
    for margin in (0.3, 0.0):
        for factor in (1.0, 1.3, 0.7):
            begin = time.process_time()
            plan = plan_memory(
                program,
                machine(gb_s * factor),
                max_slowdown=SLOWDOWN,
                bandwidth_margin=margin,
            )
            seconds = clocked(program, machine(gb_s), plan.actions).now_s
            rows.append(
                {
                    "bandwidth_margin": margin,
                    "true_gb_s": gb_s,
                    "planned_gb_s": gb_s * factor,
                    "simulated_step_s": seconds,
                    "over_the_limit": seconds / limit_s - 1,
                    "against_keep_s": seconds / program.seconds - 1,
                    "simulated_peak_bytes": plan.peak_bytes["device"],
                    "arena_over_peak": plan.arena_bytes / plan.peak_bytes["device"] - 1,
                    "planning_cpu_s": time.process_time() - begin,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Plan all cases and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    parser.add_argument("--parts", default="llama,mla,moe,error")
    parser.add_argument("--bandwidths", default="25,50,100,200,400")
    args = parser.parse_args()
    links = [float(b) for b in args.bandwidths.split(",")]
    parts, rows = args.parts.split(","), []
    if "llama" in parts:
        rows += decode_rows("llama-8b decode", inference(1, 8192 + 128), links, SLOWDOWN)
    if "mla" in parts:
        for batch in (4, 8):
            name = f"deepseek-v3 decode, {batch} sequences of 128k"
            rows += decode_rows(name, mla_decode(batch, 131072), [g for g in links if g >= 100], SLOWDOWN)
    if "moe" in parts:
        for known in (False, True):
            name = f"qwen3-30b-a3b decode, {'chosen experts known' if known else 'any expert'}"
            rows += decode_rows(name, moe_decode(8192, known), [g for g in links if g >= 50], SLOWDOWN)
        rows += [on_demand_row(moe_decode(8192, True), g) for g in links if g >= 50]
    result = {
        "what": "simulated, not run on an accelerator",
        "command": sys.argv[1:],
        "roofline": asdict(ROOFLINE),
        "decode": rows,
        "bandwidth_error": error_rows(50.0) if "error" in parts else [],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
