"""Step time and peak memory of model types without a dedicated config reader, against a hand-written FSDP2 script.

The script uses `fully_shard` on every decoder layer and the root, `clip_grad_norm_`, and AdamW with the same options.
Both models have the same weights and tokens, and run in turn on the same two ranks, so that other load affects both.
Medians are compared. First, the losses of three steps in float64 must agree to 1e-10. Peak memory is the resident peak
minus the initial size, measured separately for each side. Exit status 1 if a bar is missed.

    python benchmarks/fsdp_pairs.py                     # five types, a table
    python benchmarks/fsdp_pairs.py --only glm4 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _machine import machine
from overhead import _resident, _return_freed_memory
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.runtime import World, clip_grad_norm_, launch

BAR = 1.02
RANKS = 2
SEQUENCES, SEQ_LEN = 2, 512
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1056,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TYPES = ("starcoder2", "cohere", "stablelm", "granite", "nemotron")
Step = Callable[[], float]


def _build(kind: str, dtype: torch.dtype, world: World, side: str) -> Step:
    """Return the step function of one side; both sides have the same weights and tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE), dtype=dtype)
    ids = torch.randint(0, SHAPE["vocab_size"], (RANKS * SEQUENCES, SEQ_LEN))
    labels = torch.roll(ids, -1, 1)
    count = labels.numel()
    mine = [x[world.rank * SEQUENCES : (world.rank + 1) * SEQUENCES] for x in (ids, labels)]
    make = _ours if side == "ours" else _by_hand
    return make(model.train(), world, *mine, count)


def _ours(model: nn.Module, world: World, ids: Tensor, labels: Tensor, count: int) -> Step:
    hp.parallelize(model, hp.plan_of(model, f"dp_shard={RANKS}"), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        out = model(
            input_ids=ids,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=count,
            use_cache=False,
        )
        out.loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(out.loss.detach())

    return step


def _by_hand(model: nn.Module, world: World, ids: Tensor, labels: Tensor, count: int) -> Step:
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    if model.dtype == torch.float64:
        keep_float64(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # FSDP averages over its ranks; the sum over the tokens of all ranks is wanted
    scale = RANKS / count

    def step() -> float:
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") * scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) / RANKS

    return step


def loss_difference(kind: str) -> float:
    """Return the largest relative difference of the losses of three steps in float64.

    Norms of these models cast to float32. In float64, `parallelize` omits the cast, so the other side omits it as well.
    """

    def rank(_: int) -> float:
        with World.join() as world:
            steps = [_build(kind, torch.float64, world, s) for s in ("ours", "by_hand")]
            worst = 0.0
            for _ in range(3):
                totals = torch.tensor([step() for step in steps], dtype=torch.float64)
                dist.all_reduce(totals)
                worst = max(worst, float(abs(totals[0] / totals[1] - 1.0)))
            return worst

    return max(launch(rank, RANKS))


def step_seconds(kind: str, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of every step of both sides, which take turns on the same ranks."""

    def rank(_: int) -> dict[str, list[float]]:
        with World.join() as world:
            steps = {side: _build(kind, torch.float32, world, side) for side in ("ours", "by_hand")}
            seconds: dict[str, list[float]] = {side: [] for side in steps}
            for number in range(pairs + 2):
                for side in sorted(steps, reverse=bool(number % 2)):
                    dist.barrier()
                    start = time.perf_counter()
                    steps[side]()
                    dist.barrier()
                    if number > 1:  # the first make optimizer states
                        seconds[side].append(time.perf_counter() - start)
            return seconds

    return launch(rank, RANKS)[0]


def peak_bytes(kind: str, side: str) -> int:
    """Return the largest resident peak of any rank over three steps, minus the initial size."""

    def rank(_: int) -> int:
        _return_freed_memory()
        with World.join() as world:
            start = _resident("VmRSS")
            step = _build(kind, torch.float32, world, side)
            step()
            Path("/proc/self/clear_refs").write_text("5")  # resets the resident peak
            step()
            step()
            return _resident("VmHWM") - start

    return max(launch(rank, RANKS))


def measure(kind: str, pairs: int, memory_runs: int) -> dict[str, object]:
    """Return all results of one model type."""
    difference = loss_difference(kind)
    seconds = step_seconds(kind, pairs)
    peaks = {s: [peak_bytes(kind, s) for _ in range(memory_runs)] for s in ("ours", "by_hand")}
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    memory = {side: statistics.median(found) for side, found in peaks.items()}
    time_ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["by_hand"], strict=True))
    memory_ratio = memory["ours"] / memory["by_hand"]
    return {
        "type": kind,
        "loss_difference": difference,
        "median_s": medians,
        "time_ratio": medians["ours"] / medians["by_hand"],
        "median_of_pair_ratios": time_ratio,
        "peak_bytes": memory,
        "memory_ratio": memory_ratio,
        "seconds": seconds,
        "peaks": peaks,
        "passed": difference <= 1e-10 and medians["ours"] / medians["by_hand"] <= BAR
        and memory_ratio <= BAR,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=TYPES)
    parser.add_argument("--pairs", type=int, default=20, help="steps of each side")
    parser.add_argument("--memory-runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = []
    for kind in args.only or TYPES:
        row = measure(kind, args.pairs, args.memory_runs)
        rows.append(row)
        if not args.json:
            print(
                f"{kind:12} losses differ by {row['loss_difference']:.1e}, time {row['time_ratio']:.3f} (pairs "
                f"{row['median_of_pair_ratios']:.3f}), memory {row['memory_ratio']:.3f}"
                f"{'' if row['passed'] else '  MISSED'}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"machine": machine(), "bar": BAR, "shape": SHAPE, "rows": rows}, indent=1))
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
