"""Offload on an accelerator: step time and peak memory of some layers of Llama-8B, against torch's own methods.

    python benchmarks/offload_gpu.py                        # on the accelerator of this machine
    python benchmarks/offload_gpu.py --device cpu --tiny    # test of the script; its numbers are meaningless

Policies:

    eager        runs before and after every other policy, which is compared with the mean of both (clocks drift)
    checkpoint   every layer is recomputed (transformers)
    save_on_cpu  all saved tensors are in pinned memory (`torch.autograd.graph.save_on_cpu`)
    core         all saved tensors that `torch._functorch` can offload, with prefetch on a separate stream
    plan         the memory plan with least memory for 2 % more time
    plan-70      the fastest memory plan within 70 % of eager's peak

A plan uses operator times measured while recording, and the link's bandwidth while both directions are busy. After two
steps, it is replaced by a plan with the bandwidth measured in the second one. Bar: `plan` or `plan-70` takes at most 2
%
more time than eager with at least 30 % less memory; otherwise the exit status is 1 on an accelerator. `--clip` clips
gradients at norm 1. `--loss-chunks 8` computes head and loss in blocks of tokens under every policy, because otherwise
the logits, which no policy can offload, dominate.

`--profile` adds the time of every kernel and copy in a further step. Peaks are the allocator's peak in the timed steps
(for plans, in the last step) minus the bytes before the policy started. `plan_peak_bytes` excludes the workspaces that
libraries keep. On a CPU, only plans have a peak, which is counted. Every policy starts from the same weights; the
losses
of the timed steps are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
from _llama_8b import SHAPES
from _machine import device_of, machine
from _model_steps import capture_training, training_step
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.backends.torch.memory.streams import DeviceApi
from hyper_parallel.errors import DeviceUnavailable
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory, with_seconds

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
Batch = dict[str, Tensor]


class Case:
    """Model size and settings of a comparison on one device.

    Args:
        device: Device of the model.
        tiny: Use a model that a CPU trains in milliseconds.
        layers: Decoder layers.
        tokens: Tokens of the single sequence.
        steps: Number of timed steps.
        clip: Maximum norm of the gradients; None: no clipping.
        chunks: Blocks of tokens for head and loss; None: the model's own loss.
        profile: Also report the time of each kernel.
    """

    def __init__(
        self,
        device: torch.device,
        tiny: bool,
        layers: int,
        tokens: int,
        steps: int,
        clip: float | None,
        chunks: int | None,
        profile: bool,
    ) -> None:
        self.device, self.steps, self.profile = device, steps, profile
        self.step: dict[str, Any] = {"clip_norm": clip, "loss_chunks": chunks}
        self.config = LlamaConfig(**(TINY if tiny else SHAPES), num_hidden_layers=layers, use_cache=False)
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.tokens = tokens
        self.module: Any = torch.get_device_module(device)
        self.before = 0
        self.counts = hasattr(self.module, "max_memory_allocated")

    def made(self) -> tuple[Any, torch.optim.Optimizer]:
        """Return a model with the initial weights of all policies, and its optimizer."""
        torch.manual_seed(0)
        with self.device:
            model = LlamaForCausalLM(self.config).to(self.dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def batch(self, number: int) -> Batch:
        """Return the tokens of a step."""
        generator = torch.Generator().manual_seed(number)
        shape = (1, self.tokens)
        ids = torch.randint(0, self.config.vocab_size, shape, generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids}

    def begin(self) -> None:
        """Record the bytes on the device before a policy starts, which its peak excludes."""
        gc.collect()
        if self.counts:
            self.module.empty_cache()
            self.before = int(self.module.memory_allocated(self.device))

    def settle(self) -> None:
        """Wait until the device has finished."""
        self.module.synchronize(self.device)

    def peak_bytes(self) -> int | None:
        """Return the allocator's peak, with libraries' workspaces, minus the bytes before the policy; None on a CPU."""
        if not self.counts:
            return None
        return int(self.module.max_memory_allocated(self.device)) - self.before

    def kernels(self, step: Callable[[Batch], Any]) -> dict[str, Any]:
        """Return milliseconds and calls of the longest kernels and copies of a step; empty without `profile`."""
        if not self.profile:
            return {}
        batch = self.batch(2 + self.steps)
        with torch.profiler.profile(acc_events=True) as found:
            step(batch)
            self.settle()
        on_device = [
            (event.self_device_time_total / 1e3, event.count, event.key[:120])
            for event in found.key_averages()
            if event.device_type != torch.autograd.DeviceType.CPU
        ]
        total = sum(ms for ms, _, _ in on_device)
        return {"kernels_ms": total, "kernels": sorted(on_device, reverse=True)[:40]}

    def timed(self, step: Callable[[Batch], Tensor]) -> dict[str, Any]:
        """Run two warm-up steps and the timed steps; return their seconds, peak and losses."""
        losses, seconds = {n: step(self.batch(n)) for n in range(2)}, []
        self.settle()
        if self.counts:
            self.module.reset_peak_memory_stats(self.device)
        for number in range(2, 2 + self.steps):
            batch = self.batch(number)
            self.module.synchronize(self.device)
            start = time.perf_counter()
            losses[number] = step(batch)
            self.module.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return {
            "step_s": statistics.median(seconds),
            "peak_bytes": self.peak_bytes(),
            "steps_s": seconds,
            "losses": {number: float(loss) for number, loss in losses.items()},
            **self.kernels(step),
        }


def plain(case: Case, context: Callable[[], Any] = contextlib.nullcontext, checkpoint: bool = False) -> dict[str, Any]:
    """Return the results of eager steps inside `context`, with activation checkpointing if requested."""
    model, optimizer = case.made()
    if checkpoint:
        model.gradient_checkpointing_enable()

    def step(batch: Batch) -> Tensor:
        with context():
            return training_step(model, optimizer, batch, **case.step)

    return case.timed(step)


def save_on_cpu(case: Case) -> dict[str, Any]:
    """Return the results of steps with all saved tensors in host memory."""
    pin = case.device.type != "cpu"
    return plain(case, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin))


def core(case: Case) -> dict[str, Any]:
    """Return the results of torch's own activation offloading, with AOT autograd and without code generation."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta["should_offload"] = True
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def as_it_is(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    model, optimizer = case.made()
    # Applied to the model itself, which computes the loss unless `chunks` is set.
    whole = case.step["loss_chunks"] is None
    inner: Any = model if whole else model.get_decoder()
    inner.forward = torch.compile(inner.forward, backend=backend, fullgraph=False)
    streams = case.device.type != "cpu"

    def step(batch: Batch) -> Tensor:
        return training_step(model, optimizer, batch, **case.step)

    with config.patch(
        enable_activation_offloading=True,
        activation_offload_separate_stream=streams,
        activation_offload_sink_wait=streams,
        activation_reload_prefetch=streams,
    ):
        return case.timed(step)


def planned(case: Case, link: Channel, share: float | None) -> dict[str, Any]:
    """Return the results of steps under a memory plan, based on operator times measured while recording.

    Args:
        case: Model size and settings.
        link: Copy channel, for either direction.
        share: Budget as a fraction of the captured peak; None: least memory for 2 % more time.
    """
    model, optimizer = case.made()
    losses = {0: training_step(model, optimizer, case.batch(0), **case.step)}
    start = time.perf_counter()
    captured = capture_training(model, optimizer, case.batch(1), **case.step)
    captured_s = time.perf_counter() - start
    rough = Roofline(400e12, 2.5e12).annotate(captured.program)
    program = with_seconds(rough, captured.seconds)
    memory, queues = MemoryMachine(link, link), DeviceApi.of(case.device)
    goal: dict[str, Any] = {"max_slowdown": 0.02}
    if share is not None:
        goal = {"budget_bytes": int(share * captured.eager_peak_bytes)}
    plan = plan_memory(program, memory, **goal)
    planned_s = time.perf_counter() - start - captured_s
    with PlannedDevice(captured, plan, memory, copies=queues, check=False) as device:
        for number in (2, 3):
            losses[number], trial = device.step(case.batch(number))
    rates = [trial.copied[kind].bytes_s(link.latency_s) for kind in ("store", "prefetch")]
    memory = MemoryMachine(*(replace(link, bytes_s=rate or link.bytes_s) for rate in rates))
    plan = plan_memory(program, memory, **goal)
    seconds = []
    with PlannedDevice(captured, plan, memory, copies=queues) as device:
        for number in range(4, 5 + case.steps):
            batch = case.batch(number)
            case.module.synchronize(case.device)
            begin = time.perf_counter()
            loss, measured = device.step(batch)
            case.module.synchronize(case.device)
            seconds.append(time.perf_counter() - begin)
            losses[number] = loss
        taken = case.peak_bytes()
        kernels = case.kernels(device.step)
    peak, predicted = measured.device_bytes, plan.device_bytes
    return {
        "step_s": statistics.median(seconds[1:]),
        "peak_bytes": peak if taken is None else taken,
        "losses": {number: float(loss) for number, loss in losses.items()},
        "plan_peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "peak_off": peak / predicted - 1,
        "recorded_peak_bytes": captured.eager_peak_bytes,
        "dram_bytes": measured.peak_bytes["dram"],
        "pool_bytes": measured.dram_bytes,
        "copied": {kind: copied.num_bytes for kind, copied in measured.copied.items()},
        "wait_s": measured.wait_s,
        "capture_s": captured_s,
        "plan_s": planned_s,
        "first_step_s": seconds[0],
        "steps_s": seconds[1:],
        "store_bytes_s": memory.store.bytes_s,
        "prefetch_bytes_s": memory.prefetch.bytes_s,
        "operators_s": program.seconds,
        "predicted_step_s": plan.seconds,
        "device_step_s": measured.seconds,
        "statement": plan.statement,
        **kernels,
    }


def link_of(device: torch.device, module: Any) -> Channel:
    """Measure copies between device and pinned memory in both directions at once; return the slower direction."""
    size = 1 << (28 if device.type != "cpu" else 22)
    pin = device.type != "cpu"
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [module.Stream(device) for _ in range(2)]
    best = float("inf")
    for _ in range(3):
        module.synchronize(device)
        start = time.perf_counter()
        with module.stream(streams[0]):
            host[0].copy_(there[0], non_blocking=True)
        with module.stream(streams[1]):
            there[1].copy_(host[1], non_blocking=True)
        module.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return Channel(size / best)


def run(case: Case, only: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and results of every policy; for a policy that cannot run here, the reason."""
    # Allocate workspaces of libraries and load kernels here, so that they do not count for the first policy.
    training_step(*case.made(), case.batch(0), **case.step)
    case.begin()
    eager = plain(case)
    link = link_of(case.device, case.module)
    yield "eager", {**eager, "link_bytes_s": link.bytes_s}
    policies: dict[str, Callable[[], dict[str, Any]]] = {
        "checkpoint": lambda: plain(case, checkpoint=True),
        "save_on_cpu": lambda: save_on_cpu(case),
        "plan-70": lambda: planned(case, link, 0.7),
        "plan": lambda: planned(case, link, None),
        "core": lambda: core(case),
    }
    for name, policy in policies.items():
        if only and name not in only:
            continue
        case.begin()
        before = eager
        try:
            found = policy()
        except Exception as error:  # exception of another library; continue with the other policies
            if name.startswith("plan"):
                raise
            said = " ".join(str(error).split())[:300]
            yield name, {"failed": f"{type(error).__name__}: {said}"}
            continue
        finally:
            torch._dynamo.reset()  # what is compiled keeps its model
        case.begin()
        eager = plain(case)
        found["eager_s"] = before["step_s"], eager["step_s"]
        found["more_time"] = found["step_s"] / statistics.mean(found["eager_s"]) - 1
        if found["peak_bytes"] and eager["peak_bytes"]:
            found["less_memory"] = 1 - found["peak_bytes"] / eager["peak_bytes"]
        known = eager["losses"]
        apart = [abs(known[n] - loss) for n, loss in found["losses"].items() if n in known]
        # A GPU's backward kernels of attention may sum in any order, so two eager runs may also differ.
        found["same_losses"], found["losses_apart"] = not any(apart), max(apart)
        yield name, found


def main() -> int:
    """Run the policies, print JSON, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cuda, npu, ..., cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--profile", action="store_true", help="say which kernels take how long")
    parser.add_argument("--clip", action="store_true", help="clip gradients at a norm of 1")
    parser.add_argument("--loss-chunks", type=int, help="head and loss in so many blocks of tokens")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="policies besides eager")
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    given = parser.parse_args()
    device = device_of(given.device)
    if device is None:
        print(json.dumps({"skipped": "no accelerator; --device cpu --tiny runs the script"}))
        return 0
    if device.type != "cpu" and not torch.accelerator.is_available():
        error = DeviceUnavailable(
            "this benchmark measures an accelerator, and there is none",
            got=given.device,
            hint="python benchmarks/offload_gpu.py --device cpu --tiny",
        )
        print(error, file=sys.stderr)
        return 2
    tokens = given.tokens or (64 if given.tiny else 8192)
    clip_norm = 1.0 if given.clip else None
    case = Case(
        device, given.tiny, given.layers, tokens, given.steps, clip_norm, given.loss_chunks, given.profile,
    )  # fmt: skip
    rows = {}
    for name, row in run(case, given.only):
        row.pop("losses", None)
        rows[name] = row
        print(name, json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({
        "machine": machine(), "device": str(device), "layers": given.layers, "tokens": tokens,
        "dtype": str(case.dtype), **case.step, "policies": rows,
    }, indent=1))  # fmt: skip
    plans = [row for name, row in rows.items() if name.startswith("plan") and "less_memory" in row]
    good = any(row["more_time"] <= 0.02 and row["less_memory"] >= 0.3 for row in plans)
    return 0 if good or not case.counts else 1


if __name__ == "__main__":
    sys.exit(main())
