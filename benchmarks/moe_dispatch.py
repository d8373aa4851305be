"""Step time of expert parallelism with token dispatch, against experts gathered by FSDP and a dense loop over experts.

The variants of a Mixtral-shaped model run in turn on the same ranks, weights and tokens, so that other load affects all
of them; medians are compared:

    dispatch     ep = ranks: every rank keeps its experts, and tokens are exchanged (`parallelize`)
    gathered     ep = 1: FSDP gathers all experts of a layer, and the model's own expert code runs on local tokens
    dense loop   like gathered, but every expert computes every token, with weight 0 for tokens not routed to it

    python benchmarks/moe_dispatch.py             # a table
    python benchmarks/moe_dispatch.py --json      # the same as JSON, with every sample
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from types import MethodType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _machine import machine
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import ModelRef, Plan, Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import World, end_step, forward_backward, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts

SIDES = ("dispatch", "gathered", "dense loop")


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model, and of the batch of one rank."""

    ranks: int = 2
    hidden: int = 128
    layers: int = 2
    experts: int = 16
    top_k: int = 2
    expert_width: int = 256
    vocab: int = 512
    seq_len: int = 256
    sequences: int = 2  # on every rank


def config_of(size: Size) -> MixtralConfig:
    """Return the config of the model that all variants train."""
    return MixtralConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.expert_width,
        num_hidden_layers=size.layers, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=size.experts, num_experts_per_tok=size.top_k, max_position_embeddings=size.seq_len,
        use_cache=False,
    )  # fmt: skip


def plan_of(config: MixtralConfig, size: Size, strategy: Strategy) -> Plan:
    """Return the plan of a strategy, with layouts and predicted traffic, without a search."""
    spec = spec_from_config(config.to_dict(), name="benchmark")
    planned = plan_layouts(
        [(p.name, p.shape, p.dims) for b in spec.blocks for p in b.params], family_rules(spec.family), strategy,
        num_heads=4, num_kv_heads=4, head_dim=size.hidden // 4, vocab_size=size.vocab,
    )  # fmt: skip
    workload = Workload(
        size.seq_len, microbatch=size.sequences, accumulation_steps=1, compute_dtype="float32",
        param_dtype="float32",
    ).resolve(strategy.dp)  # fmt: skip
    reference = ModelRef("benchmark", "mixtral", spec.num_params, spec.num_params, 0.0, "")
    return Plan(
        reference, "local", 0.0, workload, strategy, planned.layouts, 0.0, (), (), 0,
        collectives=step_collectives(spec, planned.layouts, strategy, workload),
    )  # fmt: skip


def dense_loop(self: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token, with weight 0 for tokens that are not routed to it."""
    out = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        weight = torch.where(index == expert, weights, 0).sum(-1, keepdim=True)
        gate, up = F.linear(hidden, self.gate_up_proj[expert]).chunk(2, dim=-1)
        out = out + weight * F.linear(self.act_fn(gate) * up, self.down_proj[expert])
    return out


def _build(size: Size, side: str, world: World) -> tuple[Callable[[], float], dict[str, float]]:
    strategy = Strategy(dp_shard=size.ranks, ep=size.ranks if side == "dispatch" else 1)
    config = config_of(size)
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    if side == "dense loop":
        for layer in model.model.layers:
            layer.mlp.experts.forward = MethodType(dense_loop, layer.mlp.experts)
    plan = plan_of(config, size, strategy)
    parallelize(model, plan, world)
    ids = torch.randint(0, size.vocab, (size.ranks * size.sequences, size.seq_len))
    labels = torch.roll(ids, -1, 1)
    mine = slice(world.rank * size.sequences, (world.rank + 1) * size.sequences)
    batch = {"input_ids": ids[mine].to(world.device), "shift_labels": labels[mine].to(world.device)}
    count = labels.numel()

    def step() -> float:
        loss = float(forward_backward(model, [batch], count))
        model.zero_grad(set_to_none=True)
        return loss

    step()
    routing = end_step(model)
    facts = {
        "sent_mib": sum(c.sent_bytes for c in plan.collectives) / 2**20,
        "max_load": routing.max_load if routing else 0.0,
    }
    return step, facts


def measure(size: Size, rounds: int) -> dict[str, object]:
    """Return all results of a run as JSON values."""

    def rank(_: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
        with World.join() as world:
            built = {side: _build(size, side, world) for side in SIDES}
            losses = []
            for step, _facts in built.values():
                total = torch.tensor(step(), dtype=torch.float64)
                dist.all_reduce(total)
                losses.append(float(total))
            assert max(losses) - min(losses) < 1e-4 * losses[0], f"the sides differ: {losses}"
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(rounds):
                for side in SIDES if number % 2 else SIDES[::-1]:
                    dist.barrier()
                    start = time.perf_counter()
                    built[side][0]()
                    dist.barrier()
                    seconds[side].append(time.perf_counter() - start)
            return seconds, {side: facts for side, (_, facts) in built.items()}

    seconds, facts = launch(rank, size.ranks)[0]
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "machine": machine(),
        "model": dataclasses.asdict(size),
        "median_s": medians,
        "dispatch_over_dense_loop": medians["dispatch"] / medians["dense loop"],
        "dispatch_over_gathered": medians["dispatch"] / medians["gathered"],
        "facts": facts,
        "seconds": seconds,
    }


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="steps of each side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    size = Size(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Size)})
    result = measure(size, args.rounds)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'side':12} {'step':>10} {'sent per step':>16}")
    for side in SIDES:
        sent = result["facts"][side]["sent_mib"]
        print(f"{side:12} {result['median_s'][side]:9.3f}s {sent:12.1f} MiB")
    print(f"dispatch / dense loop {result['dispatch_over_dense_loop']:.2f}")
    print(f"dispatch / gathered   {result['dispatch_over_gathered']:.2f}")


if __name__ == "__main__":
    main()
