"""Peak tensor bytes of a step on real gloo ranks, from the allocator's own events: nothing of the dry run is used.

Every allocation and free of torch's CPU allocator is an event of the profiler, kernels' own workspaces included. A
free is only seen in a thread that the profiler watches; gloo's threads are not, and when such a thread happens to drop
the last reference to a buffer its bytes stay in the count. A step in which every byte that was taken came back counted
everything; of several steps those are kept, and the least of them, because a reference dropped late adds to the count.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch import local, materialize
from hyper_parallel.backends.torch.memory import CommCounter
from hyper_parallel.config import Training
from hyper_parallel.ir import Plan
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.trainer import build_optimizer
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs
from tests.parity.planned import by_group

Change = tuple[int, int, int]
"""When the allocated bytes changed, by how much, at which address."""
Span = tuple[int, int, str]
"""Begin, end and name of what ran."""
_OPERATOR = "operator "
_OF_LIBRARIES = ("mm", "attention")
"""Parts of the names of operators whose kernels pack operands as the instruction set wants them."""
_ROUNDS = 16
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
    """Peak of a rank (0 if no step counted all bytes), and its collectives: kind and axes to calls and bytes."""

    peak_bytes: int
    collectives: dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def measure(
    build: Callable[[], nn.Module],
    plan: Plan,
    training: Training,
    batch: Callable[[], dict[str, Tensor]],
    steps: int = 3,
    ranks: tuple[int, ...] = (0,),
) -> Measured:
    """Train some steps and count on `ranks`; call it in every rank. A profile takes longer than the steps."""
    with World.join("cpu") as world:
        step, state_bytes = _prepare(build, plan, training, batch, world)
        counter = CommCounter(plan.mesh, world.rank)
        with counter:
            step()
        # The thread that waits gives way to gloo's threads, so they let go of buffers first.
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        peaks: list[int] = []
        counts = world.rank in ranks
        for _ in range(_ROUNDS):
            for _ in range(steps):
                if not counts:
                    step()
                    continue
                with (
                    _Marked(),
                    profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
                ):
                    step()
                live = most = 0
                for _, change, _ in of_tensors(*_events(profiled)):
                    live += change
                    most = max(most, live)
                if live == 0:
                    peaks.append(state_bytes() + most)
            if _on_every_rank(bool(peaks) or not counts, world):
                break
        return Measured(min(peaks, default=0), by_group(counter.collectives))


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
    changes = of_tensors(changes, spans)
    for begin, end, name in spans:
        if not name.startswith(_OPERATOR):
            continue
        live = most = 0
        for when, change, _ in changes:
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
    """Run a first step; return a function that runs a step, and one that returns the bytes that outlive a step."""
    model = parallelize(build(), plan, world)
    materialize(model, seed=0, device=world.device)
    optimizer = build_optimizer(model, training)
    norm = training.max_grad_norm
    loop = Loop(model, optimizer, plan, world, _Nothing(), _Nothing(), norm)

    def step() -> None:
        inputs = [batch() for _ in range(plan.workload.accumulation_steps)]
        loss, _ = loop.gradients(StepInputs(inputs, plan.workload.tokens_per_step))
        loop.reduce_step_log(loss, 0)
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


def of_tensors(changes: list[Change], spans: list[Span]) -> list[Change]:
    """The changes without blocks that a library's operator takes and gives back inside itself."""
    inside = [
        (begin, end)
        for begin, end, name in spans
        if name.startswith(_OPERATOR) and any(part in name for part in _OF_LIBRARIES)
    ]
    begins = [begin for begin, _ in sorted(inside)]
    ends = [end for _, end in sorted(inside)]
    kept: dict[int, Change] = dict(enumerate(changes))
    taken: dict[tuple[int, int], int] = {}  # (span, address) -> number of the change
    for number, (when, change, address) in enumerate(changes):
        at = bisect_right(begins, when) - 1
        if at < 0 or when > ends[at]:
            continue
        if change > 0:
            taken[at, address] = number
        elif (at, address) in taken:
            del kept[taken.pop((at, address))], kept[number]
    return list(kept.values())


def _events(profiled: profile) -> tuple[list[Change], list[Span]]:
    """Changes of the allocated bytes in order of time, and spans."""
    changes, spans = [], []
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0].name == "Allocation":
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr))
        else:
            spans.append((event.start_time_ns, event.end_time_ns, event.name))
    return sorted(changes), spans
