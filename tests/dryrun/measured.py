"""Peak tensor bytes of a step on real gloo ranks, from the allocator's own events: nothing of the dry run is used.

Every allocation and free of torch's CPU allocator is an event of the profiler, kernels' own workspaces included. A
free is only seen in a thread that the profiler watches; gloo's threads are not, and when such a thread happens to drop
the last reference to a buffer its bytes stay in the count. A step in which every byte that was taken came back counted
everything; of several steps those are kept, and the least of them, because a reference dropped late adds to the count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch import CommCounter, local, materialize
from hyper_parallel.config import Training
from hyper_parallel.ir import Plan
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.trainer import build_optimizer
from hyper_parallel.trainer._loop import Loop

_OPERATOR = "operator "
_ROUNDS = 8
"""Times the steps are repeated when on some rank none of them counted everything, as on a busy machine."""


class _Nothing:
    """Stands for the loop's recorder and gauge."""

    @contextmanager
    def span(self, *_: str) -> Iterator[None]:
        yield

    def peak_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Measured:
    """One rank: its peak (0 when no step counted everything), and collectives as kind, axes -> calls, bytes."""

    peak_bytes: int
    collectives: dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def measure(
    build: Callable[[], nn.Module],
    plan: Plan,
    training: Training,
    batch: Callable[[], dict[str, Tensor]],
    steps: int = 6,
) -> Measured:
    """Train some steps on this rank and count; call it in every rank."""
    with World.join("cpu") as world:
        step, state_bytes = _prepare(build, plan, training, batch, world)
        counter = CommCounter(plan.mesh, world.rank)
        with counter:
            step()
        # The thread that waits gives way to gloo's threads, so they let go of buffers first.
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        peaks: list[int] = []
        for _ in range(_ROUNDS):
            for _ in range(steps):
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                    step()
                live = most = 0
                for _, change in _events(profiled)[0]:
                    live += change
                    most = max(most, live)
                if live == 0:
                    peaks.append(state_bytes() + most)
            if _on_every_rank(bool(peaks), world):
                break
        calls = {k: (n, counter.sent_bytes[k]) for k, n in counter.calls.items()}
        return Measured(min(peaks, default=0), calls)


def _on_every_rank(done: bool, world: World) -> bool:
    ranks = torch.tensor(int(done))
    if world.world_size > 1:
        dist.all_reduce(ranks)
    return int(ranks) == world.world_size


class _Marked(TorchDispatchMode):
    """Gives every operator a span of its own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        with torch._C._profiler._RecordFunctionFast(f"{_OPERATOR}{func}"):
            return func(*args, **(kwargs or {}))


def inside_operators(
    build: Callable[[], nn.Module],
    plan: Plan,
    training: Training,
    batch: Callable[[], dict[str, Tensor]],
) -> dict[str, int]:
    """Most bytes that each operator of a step took beyond what it was given and what it returned, on one rank."""
    with World.join("cpu") as world:
        step, _ = _prepare(build, plan, training, batch, world)
        with _Marked(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    changes, spans = _events(profiled)
    found: dict[str, int] = {}
    for begin, end, name in spans:
        if not name.startswith(_OPERATOR):
            continue
        live = most = 0
        for when, change in changes:
            if begin <= when <= end:
                live += change
                most = max(most, live)
        inside = most - max(live, 0)
        name = name.removeprefix(_OPERATOR)
        found[name] = max(found.get(name, 0), inside)
    return found


def _prepare(
    build: Callable[[], nn.Module],
    plan: Plan,
    training: Training,
    batch: Callable[[], dict[str, Tensor]],
    world: World,
) -> tuple[Callable[[], None], Callable[[], int]]:
    """One step as a call, after a first one; and the bytes of what outlives a step."""
    model = parallelize(build(), plan, world)
    materialize(model, seed=0, device=world.device)
    optimizer = build_optimizer(model, training)
    loop = Loop(model, optimizer, plan, world, _Nothing(), _Nothing())

    def step() -> None:
        inputs = [batch() for _ in range(plan.workload.accumulation_steps)]
        loss, _ = loop.gradients(inputs, plan.workload.tokens_per_step, training.max_grad_norm)
        loop.share(loss, 0)
        loop.update(training.lr)

    def state_bytes() -> int:
        states = [v for s in optimizer.state.values() for v in s.values()]
        storages = {}
        for tensor in (*model.parameters(), *model.buffers(), *states):
            storage = local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    step()
    return step, state_bytes


def _events(profiled: profile) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    """Changes of the allocated bytes (time, bytes) in order of time, and spans (begin, end, name)."""
    changes, spans = [], []
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0].name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        else:
            spans.append((event.start_time_ns, event.end_time_ns, event.name))
    return sorted(changes), spans
