"""Measured against simulated bubble of every pipeline schedule, in two runs.

`compute`: two gloo ranks, one per core, train a small Llama through `parallelize` and `forward_backward`. Operators
take
tens of milliseconds, so that message latency is negligible.

`waits`: four ranks, more than the cores of a small machine, so computing stages would disturb each other. A layer
therefore sleeps for the measured times of F, I and W in the first run (the last layer with head and loss). Executor,
schedule, messages and split backward are real.

The bubble of a step is 1 - busy / (ranks * step), where `busy` are the spans of the actions and the step lasts from the
first action of any rank to the last. FSDP, optimizer and gradient reduction are excluded. Steps with load of other
processes are discarded if enough steps remain. The bubble is compared with `sim.simulate` of the same schedule. The
simulated message time is half the median round trip between neighbours, measured in the same processes. The simulated
time of an action is, in three variants:

    simulated    its median over steps, which tests schedule and executor without assuming equal times per kind
    by kind      the median over steps and microbatches of its stage and kind (F, B, I, W), which a prediction could
    know
    replayed     its time in the same step; the median bubble then differs from `measured` by the executor's own time

    python benchmarks/pipeline_bubble.py                 # tables
    python benchmarks/pipeline_bubble.py --json          # the same as JSON, with durations
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _machine import busy_s, machine
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.ir import Action, ModelRef, Plan, Strategy, TaskGraph, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.mpmd import StageCost, bubble_fraction, schedule_tasks, step_schedule
from hyper_parallel.runtime import World, forward_backward, handle, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts
from hyper_parallel.sim import simulate

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
WARM_UP = 2
"""Number of warm-up steps."""
DISTURBED = 0.03
"""Fraction of core time used by other processes above which a step is discarded."""
TRIES = 2
"""Maximum number of steps to run per step to evaluate."""
Marks = list[tuple[str, float, float]]
"""Action, begin and end in seconds of the machine's clock, which all ranks read."""
Layer = tuple[float, float, float]
"""Seconds of F, I and W."""


@dataclass(frozen=True)
class Case:
    """Settings of one of the two runs.

    Attributes:
        ranks: Pipeline ranks.
        microbatches: Microbatches per step.
        config: Model config, with the same layers for every schedule.
        seq_len: Tokens of a microbatch.
        steps: Number of steps to evaluate, those with the least load of other processes.
        waits: Seconds of F, I and W for every layer; empty: layers compute.
    """

    ranks: int
    microbatches: int
    config: LlamaConfig
    seq_len: int
    steps: int
    waits: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Found:
    """Measurements of one rank.

    Attributes:
        steps: Name, begin and end of every action, per evaluated step.
        message_s: Seconds of a message.
        others: Fraction of the cores that other processes used, per evaluated step; 0 if unknown.
        left_out: Number of discarded steps.
    """

    steps: list[Marks]
    message_s: float
    others: list[float]
    left_out: int


class _Trunk(torch.autograd.Function):
    """Identity that sleeps in forward, and when the gradient of its input is computed."""

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
    """Identity that sleeps when the gradient of a weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grad, None


def _wait_in(layer: nn.Module, seconds: Layer) -> None:
    """Make a layer sleep in forward, in its input gradient and in its weight gradients for the given seconds."""
    linear = layer.mlp.down_proj
    f, i, w = seconds

    def forward(x: Tensor) -> Tensor:
        return _Trunk.apply(F.linear(x, _Branch.apply(linear.weight, w)), f, i)

    linear.forward = forward


def _llama(layers: int, hidden: int, vocab: int, seq_len: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=seq_len,
    )  # fmt: skip


def _plan(case: Case, strategy: Strategy) -> Plan:
    config = case.config
    spec = spec_from_config(config.to_dict(), name="bubble")
    params = [(p.name, p.shape, p.dims) for b in spec.blocks for p in b.params]
    heads = config.num_attention_heads
    layouts = plan_layouts(
        params, family_rules(spec.family), strategy, num_heads=heads, num_kv_heads=heads,
        head_dim=config.hidden_size // heads, vocab_size=config.vocab_size,
    ).layouts  # fmt: skip
    workload = Workload(case.seq_len, microbatch=1, accumulation_steps=case.microbatches, compute_dtype="float32")
    model = ModelRef("bubble", spec.family, spec.num_params, spec.num_params, 0.0, "")
    return Plan(model, "local", 0.0, workload.resolve(1), strategy, layouts, 0.0, (), (), 0)


def _strategy(case: Case, schedule: str) -> Strategy:
    """Return the strategy of a schedule, with equally many layers per stage."""
    stages = case.ranks * SCHEDULES[schedule]
    per_stage = case.config.num_hidden_layers // stages
    return Strategy(
        pp=case.ranks, schedule=schedule, virtual_stages=SCHEDULES[schedule], stage_layers=(per_stage,) * stages
    )  # fmt: skip


def _rank(case: Case, strategy: Strategy) -> Found:
    """Run the steps on this rank, and return its measurements."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(case.config)
    for layer, seconds in zip(model.model.layers, case.waits, strict=False):
        _wait_in(layer, seconds)
    ids = torch.randint(0, case.config.vocab_size, (1, case.seq_len))
    parts = [{"input_ids": ids, "shift_labels": ids}] * case.microbatches
    found: list[tuple[float, int, Marks]] = []
    with World.join("cpu") as world:
        parallelize(model, _plan(case, strategy), world)
        for number in range(WARM_UP + TRIES * case.steps):
            marks: Marks = []

            @contextmanager
            def span(name: str, kind: str, marks: Marks = marks) -> Iterator[None]:
                begin = time.perf_counter()
                yield
                if kind == "compute":
                    marks.append((name, begin, time.perf_counter()))

            dist.barrier()
            begun = time.perf_counter(), time.process_time(), busy_s()
            forward_backward(model, parts, case.microbatches * case.seq_len, span)
            others = _others(*begun)
            if number >= WARM_UP:
                found.append((others, number, marks))
            if sum(share <= DISTURBED for share, _, _ in found) == case.steps:
                break
        message_s = _message_s(handle(model).pipeline, parts[0])
    kept = sorted(found)[: case.steps]
    return Found([m for _, _, m in kept], message_s, [o for o, _, _ in kept], len(found) - len(kept))


def _others(wall_s: float, own_s: float, begin_busy_s: float) -> float:
    """Share of the cores that other processes used since these times, equal on every rank."""
    dist.barrier()
    own = torch.tensor(time.process_time() - own_s, dtype=torch.float64)
    busy, wall = busy_s() - begin_busy_s, time.perf_counter() - wall_s
    dist.all_reduce(own)
    share = torch.tensor(max(0.0, busy - float(own)) / (wall * (os.cpu_count() or 1)))
    dist.broadcast(share, 0)
    return float(share)


def _message_s(pipeline: Any, batch: dict[str, Tensor], rounds: int = 40) -> float:
    """Return half the median round trip of one microbatch's activations between this rank and a neighbour."""
    group, rank = pipeline.group, pipeline.rank
    peer = rank ^ 1
    mine, other = pipeline.message(batch).zero_(), pipeline.message(batch)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for turn in (0, 1):
            if rank % 2 == turn:
                dist.isend(mine, group=group, group_dst=peer).wait()
            else:
                dist.irecv(other, group=group, group_src=peer).wait()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times)


def _measured(ranks: list[Marks]) -> float:
    """Return the bubble of one measured step, from the actions of all ranks."""
    begin = min(b for marks in ranks for _, b, _ in marks)
    end = max(e for marks in ranks for _, _, e in marks)
    busy = sum(e - b for marks in ranks for _, b, e in marks)
    return 1.0 - busy / (len(ranks) * (end - begin))


def _simulated(strategy: Strategy, microbatches: int, seconds: Callable[[str], float], message_s: float) -> float:
    """Return the simulated bubble of the schedule; `seconds` returns the seconds of an action by its name."""
    schedule = step_schedule(strategy, microbatches).compute_only()
    costs = [StageCost(1.0, 1.0, 1.0, message_s, message_s)] * strategy.stages
    graph = schedule_tasks(schedule, costs)
    tasks = tuple(
        replace(task, duration_ns=round(seconds(task.name) * 1e9)) if task.kind == "compute" else task
        for task in graph.tasks
    )  # fmt: skip
    return bubble_fraction(simulate(TaskGraph(tasks, graph.policies)))


def _medians(found: list[Found], key: Callable[[str], Any]) -> dict[Any, float]:
    """Return the median seconds of all actions with the same key; `key` maps an action's name to its key."""
    seconds: dict[Any, list[float]] = defaultdict(list)
    for rank in found:
        for marks in rank.steps:
            for name, begin, end in marks:
                seconds[key(name)].append(end - begin)
    return {name: statistics.median(values) for name, values in sorted(seconds.items())}


def _kind(name: str) -> tuple[int, str]:
    action = Action.parse(name)
    return action.stage, action.kind


def measure(case: Case, schedule: str) -> dict[str, Any]:
    """Return measured and simulated bubbles of one schedule, as medians over the steps."""
    strategy = _strategy(case, schedule)
    found = launch(lambda _: _rank(case, strategy), case.ranks, timeout_s=300)
    by_step = [[rank.steps[step] for rank in found] for step in range(case.steps)]
    bubbles = [_measured(step) for step in by_step]
    usual, medians = _medians(found, str), _medians(found, _kind)
    message_s = statistics.median(rank.message_s for rank in found)
    simulated = _simulated(strategy, case.microbatches, usual.__getitem__, message_s)
    by_kind = _simulated(strategy, case.microbatches, lambda name: medians[_kind(name)], message_s)
    replayed = []
    for step in by_step:
        own = {name: end - begin for marks in step for name, begin, end in marks}
        replayed.append(_simulated(strategy, case.microbatches, own.__getitem__, message_s))
    measured = statistics.median(bubbles)
    result = {
        "measured": measured,
        "simulated": simulated,
        "measured_over_simulated": measured / simulated,
        "by_kind": by_kind,
        "smallest": min(bubbles),
        "largest": max(bubbles),
        "replayed": statistics.median(replayed),
        "message_ms": message_s * 1e3,
        "other_processes": max(found[0].others),
        "steps_left_out": found[0].left_out,
        "action_ms": {f"{stage}{kind}": s * 1e3 for (stage, kind), s in medians.items()},
    }
    sys.stderr.write(
        f"{case.ranks} ranks, {schedule}: {measured:.2%} / {simulated:.2%}, others {max(found[0].others):.0%}\n"
    )
    return result


def _waits(action_ms: dict[str, float], layers: int) -> tuple[Layer, ...]:
    """Return the seconds of all layers of the second run, from the one-layer stages of zbv in the first run.

    A layer takes the mean of the middle stages, because stage 0 has no input gradient and the last stage has the head.
    """
    last = max(int(name[:-1]) for name in action_ms)
    middle = range(1, last)
    layer = tuple(statistics.mean(action_ms[f"{s}{kind}"] for s in middle) / 1e3 for kind in "FIW")
    end = tuple(action_ms[f"{last}{kind}"] / 1e3 for kind in "FIW")
    return (*(layer,) * (layers - 1), end)  # type: ignore[return-value]


def _table(title: str, results: dict[str, dict[str, Any]]) -> str:
    head = ("measured", "simulated", "ratio", "by kind", "replayed", "others")
    lines = [title, f"{'schedule':12}" + "".join(f"{name:>11}" for name in head)]
    for name, r in results.items():
        lines.append(
            f"{name:12}{r['measured']:>11.2%}{r['simulated']:>11.2%}{r['measured_over_simulated']:>11.3f}"
            f"{r['by_kind']:>11.2%}{r['replayed']:>11.2%}{r['other_processes']:>11.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every schedule in both runs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="width of the computing model")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of its microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="on two ranks; twice on four")
    parser.add_argument("--steps", type=int, default=3, help=f"measured, after {WARM_UP} that are not")  # fmt: skip
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--runs", nargs="+", choices=("compute", "waits"), default=["compute", "waits"])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    config = _llama(4, chosen.hidden, 1024, chosen.seq_len)
    compute = Case(2, chosen.microbatches, config, chosen.seq_len, chosen.steps)
    cores, runs, waits = f"{os.cpu_count()} cores", {}, ()
    # Layers of the second run sleep for the times of zbv's one-layer stages in the first run.
    wanted = dict.fromkeys(chosen.schedules if "compute" in chosen.runs else ())
    computed = {
        name: measure(compute, name) for name in {**wanted, **({"zbv": None} if "waits" in chosen.runs else {})}
    }
    if wanted:
        title = f"compute: 2 ranks compute on {cores}, {compute.microbatches} microbatches"
        runs[title] = {name: computed[name] for name in wanted}
    if "waits" in chosen.runs:
        waits = _waits(computed["zbv"]["action_ms"], 8)
        waiting = Case(4, 2 * chosen.microbatches, _llama(8, 8, 16, 8), 8, chosen.steps, waits)
        title = f"waits: 4 ranks wait as long as layers took, {waiting.microbatches} microbatches"
        runs[title] = {name: measure(waiting, name) for name in chosen.schedules}
    if chosen.json:
        facts = {
            "hidden": chosen.hidden,
            "seq_len": chosen.seq_len,
            "steps": chosen.steps,
            "warm_up": WARM_UP,
            "layer_waits_ms": [[s * 1e3 for s in layer] for layer in (waits[:1] + waits[-1:])],
            "machine": machine(),
        }
        print(json.dumps({**facts, "runs": runs}, indent=1))
        return
    print("\n\n".join(_table(title, results) for title, results in runs.items()))


if __name__ == "__main__":
    main()
