"""Step time of tensor parallelism on two axes against one axis, with the same model, tokens and ranks.

Both models run in turn on the same ranks, step by step (forward, backward, clip, AdamW), so that other load affects
both; medians are compared. The first losses of both must agree.

    python benchmarks/tensor_parallel_time.py                   # tp 4 and 8, a table
    python benchmarks/tensor_parallel_time.py --json --tp 4
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from _machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.ir import ModelRef, Plan, Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import (
    CommCounter,
    World,
    clip_grad_norm_,
    forward_backward,
    launch,
    parallelize,
)
from hyper_parallel.shard import family_rules, plan_layouts

SIDES: dict[int, dict[str, Strategy]] = {
    4: {
        "1-D (4)": Strategy(tp_x=4),
        "2-D (2,2) 2d/2d": Strategy(tp_x=2, tp_y=2),
        "2-D (2,2) 2d/weight": Strategy(tp_x=2, tp_y=2, mlp_shape="weight"),
        "2-D (2,2) weight/weight": Strategy(tp_x=2, tp_y=2, attention_shape="weight", mlp_shape="weight"),
    },
    8: {
        "1-D (8)": Strategy(tp_x=8),
        "2-D (4,2) 2d/2d": Strategy(tp_x=4, tp_y=2),
        "2-D (4,2) weight/weight": Strategy(tp_x=4, tp_y=2, attention_shape="weight", mlp_shape="weight"),
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model, and of the batch."""

    hidden: int = 512
    layers: int = 2
    heads: int = 16
    kv_heads: int = 8
    mlp: int = 1792
    vocab: int = 4096
    seq_len: int = 512
    sequences: int = 2


def build(size: Size, strategy: Strategy, world: World) -> Callable[[], tuple[float, int]]:
    """Return a function that runs a step of one side, and returns its loss and sent bytes."""
    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.seq_len, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    spec = spec_from_config(config.to_dict(), name="timed")
    params = {p.name: p for block in spec.blocks for p in block.params}
    layouts = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params.values()], family_rules("llama"), strategy,
        num_heads=size.heads, num_kv_heads=size.kv_heads, head_dim=size.hidden // size.heads,
        vocab_size=size.vocab,
    ).layouts  # fmt: skip
    workload = Workload(size.seq_len, microbatch=size.sequences, accumulation_steps=1, compute_dtype="float32")
    reference = ModelRef("timed", "llama", spec.num_params, spec.num_params, 0.0, "")
    plan = Plan(
        reference, "local", 0.0, workload.resolve(1), strategy, layouts, 0.0, (), (), 0,
        collectives=(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = parallelize(LlamaForCausalLM(config), plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    ids = torch.randint(0, size.vocab, (size.sequences, size.seq_len)).to(world.device)
    batch = {"input_ids": ids, "shift_labels": torch.roll(ids, -1, 1)}
    counter = CommCounter(strategy.mesh(), world.rank)

    def once() -> float:
        loss = forward_backward(model, [batch], ids.numel())
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def step(count: bool = False) -> tuple[float, int]:
        if not count:
            return once(), 0
        with counter:
            loss = once()
        return loss, sum(counter.sent_bytes.values())

    return step


def measure(size: Size, tp: int, pairs: int) -> list[dict[str, object]]:
    """Return the median seconds of every side, and its ratio to one axis."""

    def rank(_: int) -> dict[str, object]:
        with World.join() as world:
            steps = {name: build(size, strategy, world) for name, strategy in SIDES[tp].items()}
            first = {name: step(count=True) for name, step in steps.items()}  # type: ignore[call-arg]
            seconds: dict[str, list[float]] = {name: [] for name in steps}
            for number in range(pairs + 1):
                for name in list(steps)[:: 1 if number % 2 else -1]:
                    dist.barrier()
                    start = time.perf_counter()
                    steps[name]()
                    dist.barrier()
                    if number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - start)
            return {"seconds": seconds, "first": first}

    found = launch(rank, tp)[0]
    line = next(iter(SIDES[tp]))
    loss, _ = found["first"][line]
    rows = []
    for name, samples in found["seconds"].items():
        other, sent = found["first"][name]
        assert abs(other - loss) < 1e-4 * loss, f"the sides differ: {name} {other}, {line} {loss}"
        ratios = [a / b for a, b in zip(samples, found["seconds"][line], strict=True)]
        rows.append({
            "tp": tp,
            "side": name,
            "median_s": statistics.median(samples),
            "time_ratio": statistics.median(ratios),
            "bytes_ratio": sent / found["first"][line][1],
            "seconds": samples,
        })  # fmt: skip
    return rows


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, action="append", choices=list(SIDES))
    parser.add_argument("--pairs", type=int, default=10, help="steps of each side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    size = Size(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Size)})
    rows = [row for tp in args.tp or SIDES for row in measure(size, tp, args.pairs)]
    if args.json:
        print(json.dumps({"machine": machine(), "model": dataclasses.asdict(size), "rows": rows}, indent=1))
        return
    print(f"{'tp':>3} {'side':26} {'median':>10} {'time ratio':>11} {'bytes ratio':>12}")
    for row in rows:
        print(
            f"{row['tp']:3} {row['side']:26} {row['median_s']:9.3f}s "
            f"{row['time_ratio']:11.3f} {row['bytes_ratio']:12.3f}"
        )


if __name__ == "__main__":
    main()
