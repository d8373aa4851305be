"""A schedule with costs as a task graph, ready for `ir.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import (
    Action,
    Cores,
    Schedule,
    StageCost,
    Task,
    TaskGraph,
    Timeline,
    simulate,
)
from hyper_parallel.mpmd._replay import replay


def schedule_tasks(
    schedule: Schedule, costs: Sequence[StageCost], *, overlap: float | None = None
) -> TaskGraph:
    """The task graph of a schedule.

    Each rank computes in its order on `rank r/compute`. A result that another rank needs is a task on the serial
    channel `link a->b`, first come first served; links are assumed not to disturb one another or the computation.
    Sends and receives of a lowered schedule add nothing: they are these transfers, started as soon as the data is
    there. Exposed collectives follow their computation on `rank r/communication`, and the rank computes nothing until
    they end. Gathers and reductions run in order on the same lane, offload and reload on `rank r/copy`; the memory of
    a rank's device is the counter `rank r/device`.

    Args:
        schedule: Schedule with or without communication that passes `verify`; here only deadlocks are noticed.
        costs: One per stage.
        overlap: Time of an OVERLAP_F_B over the sum of its parts' times, when they run together as one task; None:
            they run one after the other, and the first announces its result when it ends.

    Raises:
        ScheduleError: HP320 when the schedule deadlocks, or the number of costs is not the number of stages.
    """
    if len(costs) != schedule.stages:
        raise ScheduleError(
            "every stage needs its cost", got=f"{len(costs)} costs", allowed=schedule.stages
        )
    builder = _Builder(schedule, costs)
    for rank, position in replay(schedule):
        leaves = schedule.ranks[rank][position].leaves
        if overlap is not None and len(leaves) > 1:
            builder.add(rank, leaves, overlap)
            continue
        for leaf in leaves:
            builder.add(rank, (leaf,))
    return TaskGraph(tuple(builder.tasks), builder.policies)


def unit_starts(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Slot in which every action of a compute-only schedule starts when F, I and W take one slot and B two.

    Feeds `ir.grid(schedule, starts=...)`, which then shows the bubbles.

    Raises:
        ScheduleError: HP320 when the schedule deadlocks or has communication.
    """
    if schedule.has_communication:
        raise ScheduleError(
            "slots are counted for compute-only schedules", hint="schedule.compute_only()"
        )
    costs = [StageCost(1e-9, 1e-9, 1e-9)] * schedule.stages  # a slot is a nanosecond
    starts: list[list[int]] = [[] for _ in schedule.ranks]
    for span in simulate(schedule_tasks(schedule, costs, overlap=1.0)).spans:
        starts[int(span.lane.removeprefix("rank ").removesuffix("/compute"))].append(
            round(span.start_s * 1e9)
        )
    return tuple(map(tuple, starts))


class _Builder:
    """Adds the tasks of one action after another, remembering which task made what."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost]) -> None:
        self.stages = schedule.stages
        self.place = schedule.placement()
        self.costs = costs
        self.tasks: list[Task] = []
        self.policies: dict[str, Literal["order", "priority"]] = {}
        # Task that made an output, a gradient, the gathered parameters, the copy of an activation.
        self.output: dict[tuple[int, int], int] = {}
        self.gradient: dict[tuple[int, int], int] = {}
        self.gathered: dict[int, int] = {}
        self.copied: dict[tuple[int, int], int] = {}
        self.last_compute: dict[int, int] = {}
        self.last_exposed: dict[int, int] = {}

    def add(self, rank: int, actions: tuple[Action, ...], factor: float = 1.0) -> None:
        """Add one action, or the parts of an overlap as one task that takes `factor` of their times' sum."""
        if actions[0].kind in ("F", "B", "I", "W"):
            self._compute(rank, actions, factor)
        elif not actions[0].kind.startswith(("SEND", "RECV")):
            self._move(rank, actions[0])

    def _append(self, *fields: Any) -> int:
        self.tasks.append(Task(*fields))
        return len(self.tasks) - 1

    def _compute(self, rank: int, actions: tuple[Action, ...], factor: float) -> None:
        seconds, exposed, deps, at_start, at_end = 0.0, 0.0, [], 0, 0
        if rank in self.last_exposed:
            deps.append(self.last_exposed[rank])
        for action in actions:
            took, needed, starts, ends = self._effect(action)
            exposed += self._exposed(action)
            seconds += took
            deps += needed
            at_start += starts
            at_end += ends
        device = f"rank {rank}/device"
        task = self._append(
            str(actions[0]) if len(actions) == 1 else f"({';'.join(map(str, actions))})OVERLAP_F_B",
            f"rank {rank}/compute",
            _nanoseconds(seconds * factor),
            "compute",
            tuple(deps),
            0,
            ((device, at_start),) if at_start else (),
            ((device, at_end),) if at_end else (),
        )
        if exposed > 0:
            name, ns = f"{self.tasks[task].name} collectives", _nanoseconds(exposed * factor)
            task = self._append(name, f"rank {rank}/communication", ns, "communication", (task,))
            self.last_exposed[rank] = task
        self.last_compute[rank] = task
        for a in actions:
            s, i, cost = a.stage, a.microbatch, self.costs[a.stage]
            assert i is not None
            if a.kind == "F":
                self.output[s, i] = self._sent(rank, s, s + 1, i, task, cost.send_forward_s)
            elif a.kind != "W":
                self.gradient[s, i] = self._sent(rank, s, s - 1, i, task, cost.send_backward_s)

    def _effect(self, action: Action) -> tuple[float, list[int], int, int]:
        """Seconds, dependencies, and bytes taken at the start and given back at the end."""
        s, i, cost = action.stage, action.microbatch, self.costs[action.stage]
        assert i is not None
        deps = [self.gathered[s]] if s in self.gathered else []
        if action.kind == "F":
            if s:
                deps.append(self.output[s - 1, i])
            return cost.forward_s, deps, cost.activation_bytes, 0
        if action.kind == "W":
            return cost.weight_grad_s, deps, 0, -cost.weight_grad_input_bytes
        if s < self.stages - 1:
            deps.append(self.gradient[s + 1, i])
        if (s, i) in self.copied:
            deps.append(self.copied[s, i])
        if action.kind == "I":
            kept = cost.weight_grad_input_bytes
            return cost.input_grad_s, deps, 0, kept - cost.activation_bytes
        return cost.input_grad_s + cost.weight_grad_s, deps, 0, -cost.activation_bytes

    def _exposed(self, action: Action) -> float:
        """Seconds of the collectives of an action that nothing hides."""
        cost = self.costs[action.stage]
        if action.kind == "W":
            return 0.0
        return cost.exposed_forward_s if action.kind == "F" else cost.exposed_backward_s

    def _sent(self, rank: int, s: int, to: int, i: int, task: int, seconds: float) -> int:
        """The task after which the neighbouring stage has the result: the transfer, or the computation itself."""
        peer = self.place.get(to, rank)
        if peer == rank or seconds <= 0:
            return task
        link = f"link {rank}->{peer}"
        self.policies[link] = "priority"
        name = f"{s}SEND_{'F' if to > s else 'B'}{i}"
        return self._append(name, link, _nanoseconds(seconds), "communication", (task,))

    def _move(self, rank: int, action: Action) -> None:
        """Gather, free, reduce on the communication lane; offload and reload on the copy lane."""
        s, i, cost = action.stage, action.microbatch, self.costs[action.stage]
        device = f"rank {rank}/device"
        after = (self.last_compute[rank],) if rank in self.last_compute else ()
        lane, kind = f"rank {rank}/communication", "communication"
        seconds, deps, starts, ends = 0.0, after, 0, 0
        if action.kind == "UNSHARD":
            # Prefetched: it waits only for its turn on the lane, behind the frees that make room.
            seconds, deps, starts = cost.unshard_s, (), cost.parameter_bytes
        elif action.kind == "RESHARD":
            ends = -cost.parameter_bytes
        elif action.kind == "REDUCE_GRAD":
            seconds = cost.reduce_grad_s
        else:
            assert i is not None
            lane, kind, seconds = f"rank {rank}/copy", "copy", cost.offload_s
            if action.kind == "OFFLOAD":
                deps, ends = (self.output[s, i],), -cost.activation_bytes
            else:
                deps, starts = (*after, self.copied[s, i]), cost.activation_bytes
        task = self._append(
            str(action),
            lane,
            _nanoseconds(seconds),
            kind,
            deps,
            0,
            ((device, starts),) if starts else (),
            ((device, ends),) if ends else (),
        )
        if action.kind == "UNSHARD":
            self.gathered[s] = task
        elif action.kind in ("OFFLOAD", "RELOAD"):
            assert i is not None
            self.copied[s, i] = task


def on_shared_cores(graph: TaskGraph, pace: Sequence[float]) -> TaskGraph:
    """The same graph on a device whose ranks share its cores, caches and memory.

    Costs are those of a rank while all ranks work. Where some wait the others are faster, so what they leave is used.
    Links keep their time.

    Args:
        graph: Graph of a schedule, on lanes `rank r/compute`, `rank r/communication`, ...
        pace: Speed of a pipeline rank while 1, 2, ... of them work, against all of them at work; each stands for all
            ranks of its stage, which do the same at the same time. Empty or all 1: nothing is shared.
    """
    if all(p == 1.0 for p in pace):
        return graph
    exact = [Fraction(p).limit_denominator(1 << 20) for p in pace]
    lanes = frozenset(t.executor for t in graph.tasks if t.executor.startswith("rank "))
    tasks = tuple(
        replace(t, duration_ns=round(t.duration_ns / exact[0])) if t.executor in lanes else t
        for t in graph.tasks
    )
    return replace(graph, tasks=tasks, cores=Cores(tuple(p / exact[0] for p in exact), lanes))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def bubble_fraction(timeline: Timeline) -> float:
    """Share of the step in which the compute lanes of the ranks stand idle, averaged over the ranks."""
    busy: dict[str, float] = {}
    for span in timeline.spans:
        if span.lane.endswith("/compute"):
            busy[span.lane] = busy.get(span.lane, 0.0) + span.duration_s
    return 1.0 - sum(busy.values()) / (len(busy) * timeline.end_s)
