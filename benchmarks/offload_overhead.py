"""Overhead of the plan executor on a CPU: planned against eager steps of a model, in turn in one process.

    python benchmarks/offload_overhead.py --json

Variants: `eager`; `identity`, a plan without copies; `offload`, the plan with least memory for 5 % more *simulated*
time, with copies on threads. An eager step includes autograd and the model's Python code, a planned step the executor.

Host overhead is the CPU time of the thread that issues a step, on tensors so small that kernel time is negligible.
`torch` calls the same operators one after the other. `synchronous` is the simulated device. `streams` uses an
accelerator's code path on the streams of torch.cpu, without the cost of driver calls. The time between steps is that
before the first and after the last action of a step. The exit status is 1 when the host takes more than 15 us per
operator on streams, with copies, or more than 2 ms between steps for 4,600 timing events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _machine import machine
from _model_steps import capture_training, training_step
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.backends.torch.memory.action_binder import Prepared
from hyper_parallel.backends.torch.memory.streams import DeviceApi
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory

SIZES = {"small": (64, 4, 64), "medium": (384, 6, 256)}
"""Hidden size, layers, tokens."""
LINK = Channel(5e9)
MACHINE = MemoryMachine(LINK, LINK)
TINY = (64, 12, 16)
FAST = Channel(5e13, 1e-9)
AT_ONCE = MemoryMachine(FAST, FAST)
HOST_BAR_US, BETWEEN_BAR_MS, EVENTS = 15.0, 2.0, 4600


def _made(size: tuple[int, int, int]) -> tuple[Any, torch.optim.Optimizer]:
    hidden, layers, tokens = size
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False,
    ))  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _batch(size: tuple[int, int, int], number: int) -> dict[str, Tensor]:
    tokens = size[2]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 1024, (1, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _planned(size: tuple[int, int, int], offload: bool, stack: ExitStack) -> tuple[Any, MemoryPlan]:
    model, optimizer = _made(size)
    training_step(model, optimizer, _batch(size, 0))
    captured = capture_training(model, optimizer, _batch(size, 1))
    program = Roofline(3e10, 1e10).annotate(captured.program)
    goal: dict[str, Any] = {"max_slowdown": 0.05}
    if not offload:
        goal = {"budget_bytes": 1 << 50, "reorder": False, "recompute": False}
    plan = plan_memory(program, MACHINE, **goal)
    device = PlannedDevice(captured, plan, MACHINE, copies="threads" if offload else "at_issue")
    return stack.enter_context(device), plan


def measure(size: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return the medians of all variants for one model size."""
    with ExitStack() as stack:
        model, optimizer = _made(size)
        plain = (_batch(size, 0), _batch(size, 1))
        for batch in plain:
            training_step(model, optimizer, batch)
        identity, _ = _planned(size, False, stack)
        offload, plan = _planned(size, True, stack)
        sides: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
            "eager": lambda batch: training_step(model, optimizer, batch),
            "identity": lambda batch: identity.step(batch)[0],
            "offload": lambda batch: offload.step(batch)[0],
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(2, 2 + rounds):
            batch = _batch(size, number)
            losses = []
            for side, step in sides.items():
                start = time.perf_counter()
                losses.append(step(batch))
                seconds[side].append(time.perf_counter() - start)
            assert torch.equal(losses[0], losses[1])
            assert torch.equal(losses[0], losses[2])
        medians = {side: statistics.median(found[2:]) for side, found in seconds.items()}
        copies = sum(action.kind in ("store", "prefetch") for action in plan.actions)
        return {
            "step_s": medians,
            "identity_over_eager": medians["identity"] / medians["eager"],
            "offload_over_eager": medians["offload"] / medians["eager"],
            "operators": len(plan.program.operators),
            "copies": copies,
            "copied_bytes": sum(plan.replayed.copied_bytes.values()),
            "peak_bytes": plan.peak_bytes["device"],
            "eager_peak_bytes": identity.plan.peak_bytes["device"],
        }


def _streams() -> DeviceApi:
    """Return a device API with the streams of torch.cpu and an allocator that reports 0 bytes."""
    cpu = torch.device("cpu")
    names = {name: getattr(torch.cpu, name) for name in ("Stream", "stream", "current_stream")}
    memory = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
    asked = {name: lambda _: 0 for name in (*memory, "synchronize")}
    return DeviceApi(SimpleNamespace(**names, **asked), cpu, DeviceApi.of(cpu).event)


class _Host:
    """Planned step, whose actions are timed separately from the rest of the step."""

    def __init__(self, offload: bool, streams: bool, stack: ExitStack) -> None:
        model, optimizer = _made(TINY)
        training_step(model, optimizer, _batch(TINY, 0))
        captured = capture_training(model, optimizer, _batch(TINY, 1))
        program = Roofline(3e10, 1e10, 1e-5).annotate(captured.program)
        goal: dict[str, Any] = {"max_slowdown": 0.3} if offload else {"budget_bytes": 1 << 50}
        self.plan = plan_memory(program, AT_ONCE, recompute=False, reorder=offload, **goal)
        device = PlannedDevice(captured, self.plan, AT_ONCE, copies=_streams() if streams else "at_issue")
        self.device = stack.enter_context(device)
        for number in (2, 3):
            device.step(_batch(TINY, number))
        self.runs = sum(action.kind == "run" for action in self.plan.actions)
        self.seconds: dict[str, list[float]] = {"step": [], "actions": []}
        apply_all = device._apply_all

        def timed(*given: Any) -> Any:
            start = time.thread_time()
            found = apply_all(*given)
            self.seconds["actions"].append(time.thread_time() - start)
            return found

        device._apply_all = timed  # type: ignore[method-assign]

    def step(self, number: int) -> None:
        """Run and time one step."""
        batch = _batch(TINY, number)
        start = time.thread_time()
        self.device.step(batch)
        self.seconds["step"].append(time.thread_time() - start)

    def calls(self) -> float:
        """Return the seconds of the step's operators, called without the executor."""
        bound = [act.args[0].run for act in self.device.state.actions if _runs(act)]
        start = time.thread_time()
        with torch.no_grad():
            for run in bound:
                run()
        return time.thread_time() - start

    def found(self, torch_us: float) -> dict[str, Any]:
        """Return the medians of this step; `torch_us` is the time per operator without the executor."""
        step, actions = (statistics.median(self.seconds[key]) for key in ("step", "actions"))
        lanes = self.device.hardware.timed
        events = 0
        if lanes is not None:
            events = sum(len(c.begins) + len(c.ends) + len(c.waits) for c in lanes._copies.values())
        return {
            "operators": self.runs,
            "actions": len(self.plan.actions),
            "copies": sum(action.kind in ("store", "prefetch") for action in self.plan.actions),
            "events": events,
            "host_us": step / self.runs * 1e6,
            "beyond_torch_us": step / self.runs * 1e6 - torch_us,
            "between_ms": (step - actions) * 1e3,
        }


def _runs(act: Any) -> bool:
    return isinstance(act, partial) and bool(act.args) and isinstance(act.args[0], Prepared)


def host(rounds: int) -> dict[str, Any]:
    """Return the host's time per operator, and between two steps, for all variants."""
    with ExitStack() as stack:
        model, optimizer = _made(TINY)
        for number in (0, 1):
            training_step(model, optimizer, _batch(TINY, number))
        ways = {
            f"{name} {'streams' if streams else 'synchronous'}": _Host(offload, streams, stack)
            for name, offload in (("identity", False), ("offload", True))
            for streams in (False, True)
        }
        eager, alone = [], []
        for number in range(4, 4 + rounds):
            batch = _batch(TINY, number)
            start = time.thread_time()
            training_step(model, optimizer, batch)
            eager.append(time.thread_time() - start)
            for way in ways.values():
                way.step(number)
            alone.append(ways["identity streams"].calls())
        runs = ways["identity streams"].runs
        torch_us = statistics.median(alone) / runs * 1e6
        found = {name: way.found(torch_us) for name, way in ways.items()}
        streams = [row for name, row in found.items() if name.endswith("streams")]
        missed = [row["host_us"] > HOST_BAR_US for row in streams]
        missed += [row["between_ms"] > BETWEEN_BAR_MS * max(1, row["events"] / EVENTS) for row in streams]
        return {
            "sizes": dict(zip(("hidden", "layers", "tokens"), TINY, strict=True)),
            "bars": {"host_us": HOST_BAR_US, "between_ms": BETWEEN_BAR_MS, "events": EVENTS},
            "eager_us": statistics.median(eager) / runs * 1e6,
            "torch_us": torch_us,
            "ways": found,
            "missed": any(missed),
        }


def main() -> int:
    """Measure every size, print the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    issued = host(given.rounds)
    found = {name: measure(SIZES[name], given.rounds) for name in given.sizes}
    if given.json:
        result = {"machine": machine(), "rounds": given.rounds, "host": issued, "sizes": found}
        print(json.dumps(result, indent=1))
        return int(issued["missed"])
    print(f"host: eager {issued['eager_us']:.1f} us, torch alone {issued['torch_us']:.1f} us per operator")
    for name, row in issued["ways"].items():
        print(f"{name}: {row['host_us']:.1f} us per operator ({row['copies'] / row['operators']:.1f} copies each), "
              f"{row['beyond_torch_us']:.1f} us beyond torch; between two steps {row['between_ms']:.2f} ms, "
              f"{row['events']} events")  # fmt: skip
    print(f"at most {HOST_BAR_US} us on streams, and {BETWEEN_BAR_MS} ms: {'missed' if issued['missed'] else 'kept'}")
    for name, row in found.items():
        times = ", ".join(f"{side} {s * 1e3:.1f} ms" for side, s in row["step_s"].items())
        print(f"{name}: {times}; identity {row['identity_over_eager']:.2f}, "
              f"offload {row['offload_over_eager']:.2f} of eager")  # fmt: skip
    return int(issued["missed"])


if __name__ == "__main__":
    sys.exit(main())
