"""A schedule with costs as a task graph, ready for `ir.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

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
from hyper_parallel.ir.schedule import COMPUTE, PEERS
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


def action_costs(c: StageCost) -> dict[str, tuple[float, float, int, int]]:
    """By kind: seconds, those of exposed collectives after it, change of bytes at its start and at its end."""
    held, kept = c.activation_bytes, c.weight_grad_input_bytes
    return {
        "F": (c.forward_s, c.exposed_forward_s, held, 0),
        "I": (c.input_grad_s, c.exposed_backward_s, 0, kept - held),
        "W": (c.weight_grad_s, 0.0, 0, -kept),
        "B": (c.input_grad_s + c.weight_grad_s, c.exposed_backward_s, 0, -held),
        "SEND_F": (c.send_forward_s, 0.0, 0, 0),
        "SEND_B": (c.send_backward_s, 0.0, 0, 0),
        "UNSHARD": (c.unshard_s, 0.0, c.parameter_bytes, 0),
        "RESHARD": (0.0, 0.0, 0, -c.parameter_bytes),
        "REDUCE_GRAD": (c.reduce_grad_s, 0.0, 0, 0),
        "OFFLOAD": (c.offload_s, 0.0, 0, -held),
        "RELOAD": (c.offload_s, 0.0, held, 0),
    }


class _Builder:
    """Adds the tasks of one action after another, remembering which task made what."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost]) -> None:
        self.place = schedule.placement()
        self.costs = [action_costs(c) for c in costs]
        self.tasks: list[Task] = []
        self.policies: dict[str, Literal["order", "priority"]] = {}
        # By stage, what it is, and microbatch: the task after which there is an output (F), a gradient (B), the
        # gathered parameters (UNSHARD), a copied activation (OFFLOAD, RELOAD).
        self.made: dict[tuple[int, str, int | None], int] = {}
        self.last_compute: dict[int, int] = {}
        self.last_exposed: dict[int, int] = {}

    def add(self, rank: int, actions: tuple[Action, ...], factor: float = 1.0) -> None:
        """Add one action, or the parts of an overlap as one task that takes `factor` of their times' sum."""
        if actions[0].kind in PEERS:
            return
        effects = (self.costs[a.stage][a.kind] for a in actions)
        seconds, exposed, at_start, at_end = map(sum, zip(*effects, strict=True))
        name = str(actions[0] if len(actions) == 1 else Action(-1, "OVERLAP_F_B", None, actions))
        if actions[0].kind not in COMPUTE:
            self._move(rank, actions[0], seconds, at_start, at_end)
            return
        deps = [self.last_exposed[rank]] if rank in self.last_exposed else []
        deps += (self.made[key] for a in actions for key in _needs(a) if key in self.made)
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
        """Note after which task the neighbouring stage has a result: the transfer, or the computation itself."""
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
        self.made[s, way, i] = task

    def _move(self, rank: int, action: Action, seconds: float, at_start: int, at_end: int) -> None:
        """Gather, free, reduce on the communication lane; offload and reload on the copy lane."""
        s, i, kind = action.stage, action.microbatch, action.kind
        key: tuple[int, str, int | None] = (s, kind, i)
        lane = "communication"
        deps = [self.last_compute[rank]] if rank in self.last_compute else []
        if kind == "UNSHARD":
            deps = []  # prefetched: it waits only for its turn on the lane, behind the frees that make room
        elif kind == "OFFLOAD":
            lane, key, deps = "copy", (s, "copy", i), [self.made[s, "F", i]]
        elif kind == "RELOAD":
            lane, key = "copy", (s, "copy", i)
            deps.append(self.made[key])
        self.made[key] = self._append(str(action), rank, lane, seconds, deps, at_start, at_end)


def _needs(action: Action) -> tuple[tuple[int, str, int | None], ...]:
    """What a computation may have to wait for, as keys of `_Builder.made`."""
    s, i = action.stage, action.microbatch
    if action.kind == "F":
        return (s, "UNSHARD", None), (s - 1, "F", i)
    if action.kind == "W":
        return ((s, "UNSHARD", None),)
    return (s, "UNSHARD", None), (s + 1, "B", i), (s, "copy", i)


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


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, the time of task graphs."""
    return round(seconds * 1e9)


def bubble_fraction(timeline: Timeline) -> float:
    """Share of the step in which the compute lanes of the ranks stand idle, averaged over the ranks."""
    busy: dict[str, float] = {}
    for span in timeline.spans:
        if span.lane.endswith("/compute"):
            busy[span.lane] = busy.get(span.lane, 0.0) + span.duration_s
    return 1.0 - sum(busy.values()) / (len(busy) * timeline.end_s)
