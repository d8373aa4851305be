"""Measured bubble of every pipeline schedule against the simulated one.

Four gloo ranks train a Llama through `parallelize` and `forward_backward`. With fewer cores than ranks computing stages
would disturb each other and the measurement would be of the cores. So the work of a stage is a wait: every layer
sleeps a fixed time in forward, another for the gradient of its input and another for the gradient of its weights, and
its real products are tiny. What is measured is the order of the schedule and the cost of the runtime around it:
messages over gloo, graph walks of the split backward, Python.

The bubble is 1 - busy / (ranks * step), busy being the actions' spans and the step the time from the first action of
any rank to the last. It is compared with `ir.simulate` of the same schedule and step, in which every action takes as
long as it was measured to take and transfers take no time.

    python benchmarks/pipeline_bubble.py                 # a table
    python benchmarks/pipeline_bubble.py --json          # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.ir import ModelRef, Plan, Strategy, TaskGraph, Workload, simulate
from hyper_parallel.model import spec_from_config
from hyper_parallel.mpmd import StageCost, bubble_fraction, schedule_tasks, step_schedule
from hyper_parallel.runtime import World, forward_backward, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
SEQ_LEN = 8
Marks = list[tuple[str, float, float]]
"""Action, begin and end in seconds of the machine's clock, which all ranks read."""


class _Trunk(torch.autograd.Function):
    """Waits in forward, and where the gradient of the input is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class _Branch(torch.autograd.Function):
    """Waits where the gradient of a weight is made."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grad, None


def _wait_in(layer: nn.Module, seconds: float) -> None:
    """Let a layer take `seconds` for each of forward, input gradient and weight gradient."""
    linear = layer.mlp.down_proj

    def forward(x: Tensor) -> Tensor:
        return _Trunk.apply(F.linear(x, _Branch.apply(linear.weight, seconds)), seconds, seconds)

    linear.forward = forward


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip


def _plan(config: LlamaConfig, strategy: Strategy, microbatches: int) -> Plan:
    spec = spec_from_config(config.to_dict(), name="waiting")
    params = [(p.name, p.shape, p.dims) for b in spec.blocks for p in b.params]
    layouts = plan_layouts(
        params, family_rules(spec.family), strategy, num_heads=1, num_kv_heads=1, head_dim=8,
        vocab_size=16,
    ).layouts  # fmt: skip
    workload = Workload(
        SEQ_LEN, microbatch=1, accumulation_steps=microbatches, compute_dtype="float32"
    )
    model = ModelRef("waiting", spec.family, spec.num_params, spec.num_params, 0.0, "")
    return Plan(model, "local", 0.0, workload.resolve(1), strategy, layouts, 0.0, (), (), 0)


def _rank(strategy: Strategy, microbatches: int, seconds: float, steps: int) -> list[Marks]:
    """The actions of every step but the first, on this rank."""
    config = _config(strategy.stages)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        _wait_in(layer, seconds / strategy.virtual_stages)
    ids = torch.randint(0, 16, (1, SEQ_LEN))
    parts = [{"input_ids": ids, "shift_labels": ids}] * microbatches
    found = []
    with World.join("cpu") as world:
        parallelize(model, _plan(config, strategy, microbatches), world)
        for _ in range(steps + 1):
            marks: Marks = []

            @contextmanager
            def span(name: str, kind: str, marks: Marks = marks) -> Iterator[None]:
                begin = time.perf_counter()
                yield
                if kind == "compute":
                    marks.append((name, begin, time.perf_counter()))

            torch.distributed.barrier()
            forward_backward(model, parts, microbatches * SEQ_LEN, span)
            found.append(marks)
    return found[1:]


def _measured(ranks: list[Marks]) -> float:
    """Bubble of one step."""
    begin = min(b for marks in ranks for _, b, _ in marks)
    end = max(e for marks in ranks for _, _, e in marks)
    busy = sum(e - b for marks in ranks for _, b, e in marks)
    return 1.0 - busy / (len(ranks) * (end - begin))


def _simulated(strategy: Strategy, microbatches: int, ranks: list[Marks]) -> float:
    """Bubble of the schedule when every action takes as long as it did in this step."""
    seconds = {name: e - b for marks in ranks for name, b, e in marks}
    schedule = step_schedule(strategy, microbatches).compute_only()
    costs = [StageCost(1.0, 1.0, 1.0)] * strategy.stages
    tasks = tuple(
        replace(task, duration_ns=round(seconds[task.name] * 1e9))
        for task in schedule_tasks(schedule, costs).tasks
    )
    return bubble_fraction(simulate(TaskGraph(tasks)))


def measure(
    schedule: str, ranks: int, microbatches: int, seconds: float, steps: int
) -> dict[str, float]:
    """Measured and simulated bubble of one schedule, medians over the steps."""
    strategy = Strategy(pp=ranks, schedule=schedule, virtual_stages=SCHEDULES[schedule])
    found = launch(lambda _: _rank(strategy, microbatches, seconds, steps), ranks, timeout_s=300)
    by_step = [[rank[step] for rank in found] for step in range(steps)]
    bubbles = [_measured(step) for step in by_step]
    measured = statistics.median(bubbles)
    simulated = statistics.median(_simulated(strategy, microbatches, s) for s in by_step)
    return {
        "measured": measured,
        "simulated": simulated,
        "measured_over_simulated": measured / simulated if simulated else 0.0,
        "smallest": min(bubbles),
        "largest": max(bubbles),
    }


def main() -> None:
    """Measure every schedule and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--wait-ms", type=float, default=30.0, help="of each of F, I and W of a rank"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    results = {
        name: measure(name, chosen.ranks, chosen.microbatches, chosen.wait_ms / 1e3, chosen.steps)
        for name in chosen.schedules
    }
    facts = {
        "ranks": chosen.ranks,
        "microbatches": chosen.microbatches,
        "wait_ms": chosen.wait_ms,
        "steps": chosen.steps,
        "stage_work": "waits, not computation: the bubble of the schedule and the runtime, not of shared cores",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    if chosen.json:
        print(json.dumps({**facts, "schedules": results}, indent=1))
        return
    print(f"{facts['stage_work']}; {chosen.ranks} ranks, {chosen.microbatches} microbatches")
    print(f"{'schedule':12} {'measured':>9} {'simulated':>10} {'ratio':>6}")
    for name, r in results.items():
        ratio = r["measured_over_simulated"]
        print(f"{name:12} {r['measured']:>9.1%} {r['simulated']:>10.1%} {ratio:>6.3f}")


if __name__ == "__main__":
    main()
