"""Task graph of a schedule with costs, for `sim.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Cores, Schedule, StageCost, Task, TaskGraph, Timeline
from hyper_parallel.ir.schedule import COMPUTE, PEERS
from hyper_parallel.mpmd._replay import replay
from hyper_parallel.sim import simulate


def schedule_tasks(
    schedule: Schedule, costs: Sequence[StageCost], *, overlap: float | None = None
) -> TaskGraph:
    """Return the task graph of a schedule.

    * Computations of a rank run in order on `rank r/compute`.
    * A result for another rank is a transfer on the serial channel `link a->b`, first come first served. Links are
      assumed to slow neither each other nor the computation. Sends and receives of a lowered schedule add no tasks:
      they are these transfers, started as soon as the data exists.
    * Exposed collectives follow their computation on `rank r/communication`; the rank computes nothing until they end.
    * Gathers and reductions run in order on the same lane; offload and reload run on `rank r/copy`.
    * The counter `rank r/device` is the memory of a rank's device.

    Args:
        schedule: Schedule that passes `verify`, with or without communication; only deadlocks are detected here.
        costs: One per stage.
        overlap: Time of an OVERLAP_F_B, run as one task, over the sum of its parts' times. None: the parts run one
            after the other, and each sends its result when it ends.

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
    """Return the start slot of every action of a compute-only schedule: F, I and W take one slot, B two.

    `ir.grid(schedule, starts=...)` takes the result to show bubbles.

    Raises:
        ScheduleError: HP320 when the schedule deadlocks or has communication.
    """
    if schedule.has_communication:
        raise ScheduleError(
            "start slots exist only for compute-only schedules", hint="schedule.compute_only()"
        )
    costs = [StageCost(1e-9, 1e-9, 1e-9)] * schedule.stages  # one slot is one nanosecond
    starts: list[list[int]] = [[] for _ in schedule.ranks]
    for span in simulate(schedule_tasks(schedule, costs, overlap=1.0)).spans:
        starts[int(span.lane.removeprefix("rank ").removesuffix("/compute"))].append(
            round(span.start_s * 1e9)
        )
    return tuple(map(tuple, starts))


def action_costs(c: StageCost) -> dict[str, tuple[float, float, int, int]]:
    """Return per kind: seconds, seconds of exposed collectives after it, and byte changes at its start and end."""
    activation, grad_input = c.activation_bytes, c.weight_grad_input_bytes
    return {
        "F": (c.forward_s, c.exposed_forward_s, activation, 0),
        "I": (c.input_grad_s, c.exposed_backward_s, 0, grad_input - activation),
        "W": (c.weight_grad_s, 0.0, 0, -grad_input),
        "B": (c.input_grad_s + c.weight_grad_s, c.exposed_backward_s, 0, -activation),
        "SEND_F": (c.send_forward_s, 0.0, 0, 0),
        "SEND_B": (c.send_backward_s, 0.0, 0, 0),
        "UNSHARD": (c.unshard_s, 0.0, c.parameter_bytes, 0),
        "RESHARD": (0.0, 0.0, 0, -c.parameter_bytes),
        "REDUCE_GRAD": (c.reduce_grad_s, 0.0, 0, 0),
        "OFFLOAD": (c.offload_s, 0.0, 0, -activation),
        "RELOAD": (c.offload_s, 0.0, activation, 0),
    }


class _Builder:
    """Builder of a task graph, one action at a time; records the task that produces each value."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost]) -> None:
        self.place = schedule.placement()
        self.costs = [action_costs(c) for c in costs]
        self.tasks: list[Task] = []
        self.policies: dict[str, Literal["order", "priority"]] = {}
        # (stage, value, microbatch) to the task that produces it. Values: output (F), gradient (B), gathered
        # parameters (UNSHARD), copied activation (OFFLOAD, RELOAD).
        self.producers: dict[tuple[int, str, int | None], int] = {}
        self.last_compute: dict[int, int] = {}
        self.last_exposed: dict[int, int] = {}

    def add(self, rank: int, actions: tuple[Action, ...], factor: float = 1.0) -> None:
        """Add one action, or the parts of an overlap as one task of `factor` times the sum of their times."""
        if actions[0].kind in PEERS:
            return
        effects = (self.costs[a.stage][a.kind] for a in actions)
        seconds, exposed, at_start, at_end = map(sum, zip(*effects, strict=True))
        name = str(actions[0] if len(actions) == 1 else Action(-1, "OVERLAP_F_B", None, actions))
        if actions[0].kind not in COMPUTE:
            self._move(rank, actions[0], seconds, at_start, at_end)
            return
        deps = [self.last_exposed[rank]] if rank in self.last_exposed else []
        deps += (self.producers[key] for a in actions for key in _needs(a) if key in self.producers)
        task = self._append(name, rank, "compute", seconds * factor, deps, at_start, at_end)
        if exposed > 0:
            name = f"{name} collectives"
            task = self._append(name, rank, "communication", exposed * factor, [task])
            self.last_exposed[rank] = task
        self.last_compute[rank] = task
        for a in actions:
            if a.kind != "W":
                self._send(rank, a, task)

    def _append(
        self,
        name: str,
        rank: int,
        lane: str,
        seconds: float,
        deps: Sequence[int] = (),
        at_start: int = 0,
        at_end: int = 0,
    ) -> int:
        device = f"rank {rank}/device"
        starts, ends = (((device, n),) if n else () for n in (at_start, at_end))
        ns, executor = nanoseconds(seconds), f"rank {rank}/{lane}"
        self.tasks.append(Task(name, executor, ns, lane, tuple(deps), 0, starts, ends))
        return len(self.tasks) - 1

    def _send(self, rank: int, action: Action, task: int) -> None:
        """Record the task after which the neighbouring stage has a result: the transfer or the computation itself."""
        s, i = action.stage, action.microbatch
        way, to = ("F", s + 1) if action.kind == "F" else ("B", s - 1)
        seconds = self.costs[s][f"SEND_{way}"][0]
        peer = self.place.get(to, rank)
        if peer != rank and seconds > 0:
            link = f"link {rank}->{peer}"
            self.policies[link] = "priority"
            name, ns = f"{s}SEND_{way}{i}", nanoseconds(seconds)
            self.tasks.append(Task(name, link, ns, "communication", (task,)))
            task = len(self.tasks) - 1
        self.producers[s, way, i] = task

    def _move(self, rank: int, action: Action, seconds: float, at_start: int, at_end: int) -> None:
        """Add a gather, free or reduction on the communication lane, or an offload or reload on the copy lane."""
        s, i, kind = action.stage, action.microbatch, action.kind
        key: tuple[int, str, int | None] = (s, kind, i)
        lane = "communication"
        deps = [self.last_compute[rank]] if rank in self.last_compute else []
        if kind == "UNSHARD":
            deps = []  # prefetch: waits only for earlier tasks on its lane, among them the frees of its memory
        elif kind == "OFFLOAD":
            lane, key, deps = "copy", (s, "copy", i), [self.producers[s, "F", i]]
        elif kind == "RELOAD":
            lane, key = "copy", (s, "copy", i)
            deps.append(self.producers[key])
        self.producers[key] = self._append(str(action), rank, lane, seconds, deps, at_start, at_end)


def _needs(action: Action) -> tuple[tuple[int, str, int | None], ...]:
    """Return the possible inputs of a computation, as keys of `_Builder.producers`."""
    s, i = action.stage, action.microbatch
    if action.kind == "F":
        return (s, "UNSHARD", None), (s - 1, "F", i)
    if action.kind == "W":
        return ((s, "UNSHARD", None),)
    return (s, "UNSHARD", None), (s + 1, "B", i), (s, "copy", i)


def on_shared_cores(graph: TaskGraph, pace: Sequence[float]) -> TaskGraph:
    """Return the graph for ranks that share the cores, caches and memory of one device.

    Costs hold while all ranks are busy. While some are idle, the others run faster. Links keep their times.

    Args:
        graph: Graph of a schedule, on lanes `rank r/compute`, `rank r/communication`, ...
        pace: Speed of a pipeline rank while 1, 2, ... of them are busy, relative to all busy. One pipeline rank stands
            for all ranks of its stage, which work in lockstep. Empty or all 1: the graph is returned unchanged.
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


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, the unit of task graphs."""
    return round(seconds * 1e9)


def bubble_fraction(timeline: Timeline) -> float:
    """Return the fraction of the step in which compute lanes are idle, averaged over ranks."""
    busy: dict[str, float] = {}
    for span in timeline.spans:
        if span.lane.endswith("/compute"):
            busy[span.lane] = busy.get(span.lane, 0.0) + span.duration_s
    return 1.0 - sum(busy.values()) / (len(busy) * timeline.end_s)
