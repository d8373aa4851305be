"""Step time and peak memory of `parallelize` against a hand-written script on the same model and layout.

The script is plain PyTorch: `parallelize_module` (colwise, rowwise, sequence parallel), `loss_parallel`, `fully_shard`
on every decoder layer and the root, `clip_grad_norm_`, AdamW. Both models run in turn on the same ranks, step by step,
so that other load affects both; medians are compared. Peak memory is measured in separate launches: the allocator's
peak on an accelerator, and on a CPU the resident peak minus the initial size.

    python benchmarks/overhead.py                 # all three layouts, a table
    python benchmarks/overhead.py --json          # the same as JSON
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _machine import machine
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.ir import ModelRef, Plan, Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import World, clip_grad_norm_, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts

LAYOUTS = {
    "fsdp=4": Strategy(dp_shard=4),
    "tp=2 x fsdp=2": Strategy(dp_shard=2, tp_x=2),
    "tp=4": Strategy(tp_x=4),
}
Step = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model, and of the batch of one rank."""

    hidden: int = 384
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 1056
    vocab: int = 4096
    seq_len: int = 512
    sequences: int = 4  # over all data-parallel ranks


def config_of(size: Size) -> LlamaConfig:
    """Return the config of the model that both sides train."""
    return LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.seq_len, use_cache=False,
    )  # fmt: skip


def plan_of(config: LlamaConfig, size: Size, strategy: Strategy) -> Plan:
    """Return the plan that `parallelize` applies, without a search."""
    spec = spec_from_config(config.to_dict(), name="benchmark")
    planned = plan_layouts(
        [(p.name, p.shape, p.dims) for b in spec.blocks for p in b.params], family_rules(spec.family), strategy,
        num_heads=size.heads, num_kv_heads=size.kv_heads, head_dim=size.hidden // size.heads,
        vocab_size=size.vocab,
    )  # fmt: skip
    workload = Workload(
        size.seq_len, microbatch=size.sequences // strategy.dp, accumulation_steps=1,
        compute_dtype="float32", param_dtype="float32",
    )  # fmt: skip
    reference = ModelRef("benchmark", "llama", spec.num_params, spec.num_params, 0.0, "")
    return Plan(
        reference, "local", 0.0, workload.resolve(strategy.dp), strategy, planned.layouts, 0.0, (), (), 0
    )  # fmt: skip


def ours(model: nn.Module, plan: Plan, world: World, ids: Tensor, labels: Tensor, count: int) -> Step:
    """Return a function that runs one optimizer step of a model prepared by `parallelize`."""
    parallelize(model, plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(
            input_ids=ids,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=count,
            use_cache=False,
        ).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def by_hand(model: nn.Module, strategy: Strategy, world: World, ids: Tensor, labels: Tensor, count: int) -> Step:
    """Return a function that runs one optimizer step of a model prepared by hand with PyTorch."""
    mesh = world.mesh(strategy)
    model.to(world.device)
    tp = strategy.tp > 1
    if tp:
        parallelize_module(model, mesh["tp_x"], _tp_plan(len(model.model.layers)))
    if strategy.dp > 1:
        policy = MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # FSDP averages over its ranks; the sum over the tokens of all ranks is wanted.
    scale = strategy.dp / count

    def step() -> float:
        with loss_parallel() if tp else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") * scale
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss) / strategy.dp

    return step


def _tp_plan(layers: int) -> dict[str, object]:
    plan: dict[str, object] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(layers):
        name = f"model.layers.{i}"
        plan |= {
            f"{name}.input_layernorm": SequenceParallel(),
            f"{name}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            f"{name}.self_attn.q_proj": ColwiseParallel(),
            f"{name}.self_attn.k_proj": ColwiseParallel(),
            f"{name}.self_attn.v_proj": ColwiseParallel(),
            f"{name}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{name}.post_attention_layernorm": SequenceParallel(),
            f"{name}.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"{name}.mlp.gate_proj": ColwiseParallel(),
            f"{name}.mlp.up_proj": ColwiseParallel(),
            f"{name}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


def _build(size: Size, strategy: Strategy, world: World, side: str) -> Step:
    """Return the step function of one side; both sides have the same weights and tokens."""
    config = config_of(size)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, size.vocab, (size.sequences, size.seq_len))
    labels = torch.roll(ids, -1, 1)
    share = size.sequences // strategy.dp
    first = world.rank // strategy.tp * share
    mine = [t[first : first + share].to(world.device) for t in (ids, labels)]
    count = labels.numel()
    if side == "ours":
        return ours(model, plan_of(config, size, strategy), world, *mine, count)
    return by_hand(model, strategy, world, *mine, count)


def time_pair(size: Size, strategy: Strategy, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of every step of both sides, which take turns on the same ranks."""

    def rank(_: int) -> dict[str, list[float]]:
        with World.join() as world:
            steps = {side: _build(size, strategy, world, side) for side in ("ours", "by_hand")}
            losses = {side: [step(), step()] for side, step in steps.items()}  # also warms up
            for a, b in zip(losses["ours"], losses["by_hand"], strict=True):
                total = torch.tensor([a, b], dtype=torch.float64)
                dist.all_reduce(total)
                total /= strategy.tp
                assert abs(total[0] - total[1]) < 1e-4 * total[1], f"the sides differ: {total}"
            seconds: dict[str, list[float]] = {side: [] for side in steps}
            for number in range(pairs):
                order = list(steps) if number % 2 else list(steps)[::-1]
                for side in order:
                    dist.barrier()
                    start = time.perf_counter()
                    steps[side]()
                    dist.barrier()
                    seconds[side].append(time.perf_counter() - start)
            return seconds

    return launch(rank, strategy.world_size)[0]


def peak_bytes(size: Size, strategy: Strategy, side: str) -> int:
    """Return the largest peak of any rank over three steps, with parameters and optimizer state."""

    def rank(_: int) -> int:
        _return_freed_memory()
        with World.join() as world:
            cuda = world.device.type == "cuda"
            start = 0 if cuda else _resident("VmRSS")
            step = _build(size, strategy, world, side)
            step()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            else:
                Path("/proc/self/clear_refs").write_text("5")  # resets the resident peak
            step()
            step()
            return torch.cuda.max_memory_allocated() if cuda else _resident("VmHWM") - start

    return max(launch(rank, strategy.world_size))


def _return_freed_memory() -> None:
    """Make malloc return freed blocks above 64 KiB to the system, so that the resident size follows the tensors."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure(size: Size, names: list[str], pairs: int, memory_runs: int) -> dict[str, object]:
    """Return all results of a run as JSON values."""
    rows = []
    for name in names:
        strategy = LAYOUTS[name]
        seconds = time_pair(size, strategy, pairs)
        ratios = [a / b for a, b in zip(seconds["ours"], seconds["by_hand"], strict=True)]
        peaks: dict[str, list[int]] = {"ours": [], "by_hand": []}
        for _ in range(memory_runs):
            for side, found in peaks.items():
                found.append(peak_bytes(size, strategy, side))
        medians = {side: statistics.median(found) for side, found in seconds.items()}
        memory = {side: statistics.median(found) for side, found in peaks.items()}
        rows.append({
            "layout": name,
            "median_s": medians,
            "time_ratio": medians["ours"] / medians["by_hand"],
            "median_of_pair_ratios": statistics.median(ratios),
            "peak_bytes": memory,
            "memory_ratio": memory["ours"] / memory["by_hand"],
            "seconds": seconds,
            "peaks": peaks,
        })  # fmt: skip
    return {"machine": machine(), "model": dataclasses.asdict(size), "pairs": pairs, "rows": rows}


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="steps of each side")
    parser.add_argument("--memory-runs", type=int, default=2)
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write every sample to a file")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    size = Size(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Size)})
    result = measure(size, args.layout or list(LAYOUTS), args.pairs, args.memory_runs)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    summary = [{k: v for k, v in r.items() if k not in ("seconds", "peaks")} for r in result["rows"]]
    if args.json:
        print(json.dumps({**result, "rows": summary}, indent=1))
        return
    print(f"{'layout':16} {'ours':>10} {'by hand':>10} {'time ratio':>11} {'memory ratio':>13}")
    for row in summary:
        ours, by_hand = row["median_s"]["ours"], row["median_s"]["by_hand"]
        print(f"{row['layout']:16} {ours:9.3f}s {by_hand:9.3f}s {row['time_ratio']:11.3f} {row['memory_ratio']:13.3f}")


if __name__ == "__main__":
    main()
