"""Forward and backward of context-parallel attention: ring, Ulysses, hybrid of both, and gathered keys and values.

All kinds run in turn on the same ranks, queries, keys and values, so that other load affects all of them. Medians are
reported as ratios to the ring. Every kind must give the same sum of outputs and gradients. Sent bytes are counted per
attention layer.

    python benchmarks/context_parallel.py                     # a table
    python benchmarks/context_parallel.py --json
    python benchmarks/context_parallel.py --window 256        # a sliding window, with which the ring has fewer rounds
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
from torch import Tensor, nn

from hyper_parallel.backends.torch.context.attention import ATTRIBUTE, context_attention
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.pass_context import RunningPass, SequenceView
from hyper_parallel.ir import SequenceCut, Strategy
from hyper_parallel.runtime import CommCounter, World, launch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the attention, and number of ranks."""

    cp: int = 4
    seq_len: int = 4096
    sequences: int = 1
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    window: int = 0  # 0: none
    dtype: str = "float32"


def kinds(size: Size) -> dict[str, Strategy]:
    """Return the compared strategies by name; the hybrid has a Ulysses degree of 2."""
    found = {k: Strategy(cp=size.cp, cp_kind=k) for k in ("ring", "ulysses", "all_gather")}
    if size.cp % 2 == 0 and size.cp > 2:
        found["hybrid"] = Strategy(cp=size.cp, cp_kind="hybrid", cp_ulysses=2)
    return found


def build(size: Size, strategy: Strategy, world: World) -> Callable[[], float]:
    """Return a function that runs attention forward and backward, and returns this rank's part of a checksum."""
    group = world.mesh(strategy)["cp"].get_group()
    gather_keys = strategy.cp_kind == "all_gather"
    context = ContextState(group, gather_keys, strategy.ulysses, RunningPass())
    cut = SequenceCut.of(size.seq_len, strategy.cp, strategy.cp_kind, strategy.cp_ulysses)
    mine = torch.tensor(cut.positions(context.group.rank()))
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (size.sequences, heads, cut.padded, size.head_dim)
        whole = torch.randn(shape, generator=generator)
        return whole.index_select(2, mine).to(world.device, DTYPES[size.dtype]).requires_grad_()

    q, k, v = draw(size.heads), draw(size.kv_heads), draw(size.kv_heads)
    module = nn.Module()
    object.__setattr__(module, ATTRIBUTE, context)

    def step() -> float:
        context.running.update(view=SequenceView(cut, torch.tensor(size.seq_len - 1)))
        out, _ = context_attention(module, q, k, v, None, sliding_window=size.window or None)
        out.backward(torch.ones_like(out))
        total = out.detach().double().sum() + sum(x.grad.double().abs().sum() for x in (q, k, v))
        q.grad = k.grad = v.grad = None
        return float(total)

    return step


def compare(size: Size, rounds: int) -> dict[str, dict[str, object]]:
    """Return, by kind, the seconds of every round and the sent bytes of one round on rank 0."""

    def rank(_: int) -> dict[str, dict[str, object]]:
        with World.join() as world:
            steps = {kind: build(size, s, world) for kind, s in kinds(size).items()}
            found: dict[str, dict[str, object]] = {}
            for kind, step in steps.items():
                step()
                counter = CommCounter(kinds(size)[kind].mesh(), world.rank)
                with counter:
                    share = step()
                total = torch.tensor(share, dtype=torch.float64)
                dist.all_reduce(total)
                sent = sum(counter.sent_bytes.values())
                found[kind] = {"sent_bytes": sent, "checksum": float(total), "seconds": []}
            wanted = found["ring"]["checksum"]
            for kind, row in found.items():
                error = abs(row["checksum"] / wanted - 1)
                assert error < (1e-2 if size.dtype == "bfloat16" else 1e-4), f"{kind}: {error}"
            for number in range(rounds):
                order = list(steps) if number % 2 else list(steps)[::-1]
                for kind in order:
                    dist.barrier()
                    start = time.perf_counter()
                    steps[kind]()
                    dist.barrier()
                    found[kind]["seconds"].append(time.perf_counter() - start)
            return found

    return launch(rank, size.cp)[0]


def measure(size: Size, rounds: int) -> dict[str, object]:
    """Return all results of a run as JSON values."""
    found = compare(size, rounds)
    ring = statistics.median(found["ring"]["seconds"])
    rows = [
        {
            "kind": kind,
            "median_s": statistics.median(row["seconds"]),
            "time_to_ring": statistics.median(row["seconds"]) / ring,
            "bytes_to_ring": row["sent_bytes"] / found["ring"]["sent_bytes"],
            "sent_bytes": row["sent_bytes"],
        }
        for kind, row in found.items()
    ]
    return {"machine": machine(), "size": dataclasses.asdict(size), "rounds": rounds, "rows": rows}


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for field in dataclasses.fields(Size):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default)
    args = parser.parse_args()
    size = Size(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Size)})
    result = measure(size, args.rounds)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'kind':12} {'median':>10} {'time / ring':>12} {'bytes / ring':>13} {'sent':>14}")
    for row in result["rows"]:
        print(
            f"{row['kind']:12} {row['median_s']:9.3f}s {row['time_to_ring']:12.2f} "
            f"{row['bytes_to_ring']:13.2f} {row['sent_bytes']:14,}"
        )


if __name__ == "__main__":
    main()
