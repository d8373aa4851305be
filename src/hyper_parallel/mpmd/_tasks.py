"""Order, task graph and makespan of a schedule with costs.

`replay` finds an order of all actions without times, or the deadlock. `schedule_tasks` returns the task graph for
`sim.simulate`. `makespan_s` is a faster evaluation, for a search over many plans, of schedules without gathers. It
computes the longest path through the graph of computations and transfers with numpy, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Cores, Schedule, Span, StageCost, Task, TaskGraph, Timeline
from hyper_parallel.ir.schedule import COMPUTE, PEERS, at, message
from hyper_parallel.mpmd._schedules import make_schedule
from hyper_parallel.sim import simulate
from hyper_parallel.units import plural

_Event: TypeAlias = Action | tuple[Action, int]
"""Completed action, or a pair (action, rank): the rank has reached a gradient reduction or a computation of a sharded
stage. A completed I also counts as a completed B, because other stages wait only for the input gradient."""


def _waits_for(schedule: Schedule, rendezvous: bool) -> Callable[[Action], Iterator[_Event]]:
    """Return a function from an action to the events that must happen before it ends."""
    homes = schedule.homes()
    communicates, rounds = schedule.has_communication, schedule.rounds()
    copies = _ranks_of_stages(homes)

    def result(kind: Literal["F", "B"], stage: int, other: int, i: int) -> _Event:
        if communicates and homes.get((stage, i)) != homes.get((other, i)):
            return message(stage, "RECV_F" if kind == "F" else "RECV_B", i, other)
        return Action(other, kind, i)

    def needs(action: Action) -> Iterator[_Event]:
        yield from own_needs(action)
        for other, rank in rounds.get(action, ()):
            yield other, rank
            yield from own_needs(other)

    def own_needs(action: Action) -> Iterator[_Event]:
        s, kind, i = action.stage, action.kind, action.microbatch
        if kind == "REDUCE_GRAD":
            yield from ((action, rank) for rank in copies[s])
        if i is None:
            return
        if kind in ("F", "B", "I"):
            if kind != "F":
                yield Action(s, "F", i)
            for other in schedule.inputs(action):
                yield result("F" if kind == "F" else "B", s, other, i)
        elif kind == "W":
            yield Action(s, "I", i)
        else:
            if kind.startswith("SEND"):
                yield Action(s, "F" if kind == "SEND_F" else "B", i)
            if rendezvous or kind.startswith("RECV"):
                yield action.peer

    return needs


def _ranks_of_stages(homes: Mapping[tuple[int, int | None], int]) -> dict[int, list[int]]:
    """Return a dict from stage to the ranks that compute it, ascending; `homes` is `Schedule.homes()`."""
    ranks: dict[int, list[int]] = {}
    for stage, rank in sorted({(stage, rank) for (stage, _), rank in homes.items()}):
        ranks.setdefault(stage, []).append(rank)
    return ranks


def _text(event: _Event) -> str:
    return str(event) if isinstance(event, Action) else "{} of rank {}".format(*event)


def replay(schedule: Schedule, *, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Return (rank, position) of all actions in an order that satisfies every dependency.

    A receive waits for its send. In a compute-only schedule, a computation waits for the computations of the stages
    whose results it needs. OVERLAP_F_B starts when both parts can start. A gradient reduction ends when all copies of
    the stage have reached it. All copies of a sharded stage start their n-th computation together, once each copy has
    its inputs.

    Args:
        schedule: Schedule with or without communication, complete in the sense of `verify`.
        rendezvous: Whether a send waits for its receive, as for large messages, instead of being buffered.

    Raises:
        ScheduleError: HP320 for a deadlock, with the blocked ranks and the event that each one waits for.
    """
    needs, rounds = _waits_for(schedule, rendezvous), schedule.rounds()
    happened: set[_Event] = set()
    head = [0] * len(schedule.ranks)
    order: list[tuple[int, int]] = []
    missing: dict[int, _Event] = {}
    before = None
    while before != (before := (len(order), len(happened))):
        for rank, actions in enumerate(schedule.ranks):
            while head[rank] < len(actions):
                action = actions[head[rank]]
                if action.kind in PEERS:
                    # A peer waits until this action is reached: a rendezvous completes on both sides at once.
                    happened.add(action)
                elif action.kind == "REDUCE_GRAD" or action in rounds:
                    happened.add((action, rank))
                lacks = (e for leaf in action.leaves for e in needs(leaf) if e not in happened)
                if event := next(lacks, None):
                    missing[rank] = event
                    break
                for leaf in action.leaves:
                    happened.add(leaf)
                    if leaf.kind == "I":
                        happened.add(Action(leaf.stage, "B", leaf.microbatch))
                order.append((rank, head[rank]))
                head[rank] += 1
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if head[rank] < len(actions)]
    if stuck:
        lines = [
            f"rank {r}, action {head[r]}: {schedule.ranks[r][head[r]]} waits for {_text(missing[r])}" for r in stuck
        ]
        sends = " when sends wait for their receives" if rendezvous else ""
        raise ScheduleError(
            f"the schedule deadlocks{sends}: {lines[0]}",
            where=at(schedule, stuck[0], head[stuck[0]]),
            others=lines[1:],
        )
    return order


StageCosts: TypeAlias = Sequence[StageCost | Sequence[StageCost]]
"""One entry per stage: one cost for all microbatches, or a list with one cost per microbatch."""
Transfers: TypeAlias = Mapping[tuple[int, int], Sequence[float]]
"""Edge (smaller stage, larger stage) to the transfer seconds of each microbatch, equal for output and gradient."""


def check_num_costs(costs: StageCosts, stages: int) -> None:
    """Raise ScheduleError (HP320) unless there is one cost per stage."""
    if len(costs) != stages:
        raise ScheduleError(
            "the number of costs differs from the number of stages",
            got=plural(len(costs), "cost"),
            allowed=plural(stages, "cost"),
        )


def cost_rows(costs: StageCosts, microbatches: int) -> list[list[StageCost]]:
    """Return a list per stage with the cost of each microbatch."""
    return [[c] * microbatches if isinstance(c, StageCost) else [*c] for c in costs]


def schedule_tasks(
    schedule: Schedule,
    costs: StageCosts,
    *,
    overlap: float | None = None,
    transfer_s: Transfers = MappingProxyType({}),
) -> TaskGraph:
    """Return the task graph of a schedule.

    * Computations of a rank run in order on `rank r/compute`.
    * A result for another rank is a transfer on the serial channel `link a->b`, first come first served. Links are
      assumed to slow neither each other nor the computation. Sends and receives of a lowered schedule add no tasks:
      they are these transfers, started as soon as the data exists.
    * Exposed collectives follow their computation on `rank r/communication`; the rank computes nothing until they end.
    * Gathers and reductions also run in order on `rank r/communication`. The copies of a stage start to reduce its
      gradients together, when all copies have finished their backward.
    * The n-th computations of all copies of a sharded stage start together and take the time of the longest.
    * The counter `rank r/device` is the memory of a rank's device.

    Args:
        schedule: Schedule that passes `verify`, with or without communication; only deadlocks are detected here.
        costs: Cost of each stage, or of each stage and microbatch.
        overlap: Time of an OVERLAP_F_B divided by the sum of its parts' times; the parts are then one task. None: the
            parts are two tasks, one after the other, and each sends its result when it ends.
        transfer_s: Transfer times by edge; for a missing edge, the send times in the cost of the sending stage apply.

    Raises:
        ScheduleError: HP320 when the schedule deadlocks, or the number of costs is not the number of stages.
    """
    check_num_costs(costs, schedule.stages)
    builder = _Builder(schedule, costs, transfer_s)
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
            "start slots can be computed only for compute-only schedules",
            hint="schedule.compute_only()",
        )
    return tuple(tuple(start for start, _ in row) for row in action_times(schedule))


def action_times(
    schedule: Schedule,
    costs: StageCosts | None = None,
    transfer_s: Transfers = MappingProxyType({}),
) -> list[list[tuple[int, int]]]:
    """Return (start, end) of every action of a compute-only schedule, per rank, in nanoseconds.

    Every action and transfer takes at least one nanosecond.

    Args:
        schedule: Compute-only schedule.
        costs: As for `schedule_tasks`; None: one nanosecond for F, I and W, two for B.
        transfer_s: As for `schedule_tasks`.

    Raises:
        ScheduleError: HP320 when the schedule deadlocks, or the number of costs is not the number of stages.
    """
    costs = costs or [StageCost(1e-9, 1e-9, 1e-9)] * schedule.stages
    graph = schedule_tasks(schedule, costs, overlap=1.0, transfer_s=transfer_s)
    tasks = tuple(replace(t, duration_ns=max(1, t.duration_ns)) for t in graph.tasks)
    times: list[list[tuple[int, int]]] = [[] for _ in schedule.ranks]
    for rank, span in computations(simulate(replace(graph, tasks=tasks))):
        times[rank].append((round(span.start_s * 1e9), round(span.end_s * 1e9)))
    return times


def computations(timeline: Timeline) -> Iterator[tuple[int, Span]]:
    """Yield (rank, span) for every computation of a simulated schedule."""
    for span in timeline.spans:
        rank, _, lane = span.lane.removeprefix("rank ").partition("/")
        if lane == "compute":
            yield int(rank), span


ActionCost: TypeAlias = tuple[float, float, int, int]
"""(Seconds of an action, seconds of exposed collectives after it, byte change at its start, byte change at its end)."""


def cost_function(schedule: Schedule, costs: StageCosts) -> Callable[[Action], ActionCost]:
    """Return a function from an action of a schedule to its cost."""
    table = [
        [action_costs(c, schedule.is_trained(s)) for c in row]
        for s, row in enumerate([c] if isinstance(c, StageCost) else c for c in costs)
    ]

    def cost_of(action: Action) -> ActionCost:
        row = table[action.stage]
        kinds = row[(action.microbatch or 0) if len(row) > 1 else 0]
        return kinds.get(action.kind, (0.0, 0.0, 0, 0))

    return cost_of


def action_costs(c: StageCost, trained: bool = True) -> dict[str, ActionCost]:
    """Return the cost of each kind of action of a stage; without `trained`, the activations are freed after F."""
    activation, grad_input = c.activation_bytes, c.weight_grad_input_bytes
    return {
        "F": (c.forward_s, c.exposed_forward_s, activation, 0 if trained else -activation),
        "I": (c.input_grad_s, c.exposed_backward_s, 0, grad_input - activation),
        "W": (c.weight_grad_s, 0.0, 0, -grad_input),
        "B": (c.input_grad_s + c.weight_grad_s, c.exposed_backward_s, 0, -activation),
        "SEND_F": (c.send_forward_s, 0.0, 0, 0),
        "SEND_B": (c.send_backward_s, 0.0, 0, 0),
        "UNSHARD": (c.unshard_s, 0.0, c.parameter_bytes, 0),
        "RESHARD": (0.0, 0.0, 0, -c.parameter_bytes),
        "REDUCE_GRAD": (c.reduce_grad_s, 0.0, 0, 0),
    }


_Key: TypeAlias = tuple[int, str, int | None, int | None]


class _Builder:
    """Builder of a task graph, one action at a time; records the task that produces each value."""

    def __init__(self, schedule: Schedule, costs: StageCosts, transfer_s: Transfers) -> None:
        self._schedule, self._transfer_s = schedule, transfer_s
        self.homes = schedule.homes()
        self.copies = _ranks_of_stages(self.homes)
        self.cost_of = cost_function(schedule, costs)
        self.tasks: list[Task] = []
        self.policies: dict[str, Literal["order", "priority"]] = {}
        # (stage, value, microbatch or rank, reader) to the task that produces it. Values: output (F) or gradient (B)
        # for a stage, gathered parameters (UNSHARD) on a rank.
        self.producers: dict[_Key, int] = {}
        self.last_compute: dict[int, int] = {}
        self.last_exposed: dict[int, int] = {}
        self.last_backward: dict[tuple[int, int], int] = {}
        self.rounds = schedule.rounds()
        # Tasks that precede a round of a sharded stage on any of its ranks.
        self.before_round: dict[tuple[tuple[Action, int], ...], list[int]] = {}

    def add(self, rank: int, actions: tuple[Action, ...], factor: float = 1.0) -> None:
        """Add a task for one action, or one task for several actions that overlap; sends and receives add none.

        A computation takes `factor` times the sum of the times of its actions.
        """
        if actions[0].kind in PEERS:
            return
        effects = [*map(self.cost_of, actions)]
        together = self.rounds.get(actions[0], ())
        if together:
            times = [self.cost_of(a)[:2] for a, _ in together]
            effects = [(max(s for s, _ in times), max(s for _, s in times), *effects[0][2:])]
        seconds, exposed, at_start, at_end = map(sum, zip(*effects, strict=True))
        name = str(actions[0] if len(actions) == 1 else Action(-1, "OVERLAP_F_B", None, actions))
        if actions[0].kind not in COMPUTE:
            self._move(rank, actions[0], seconds, at_start, at_end)
            return
        deps = [self.last_exposed[rank]] if rank in self.last_exposed else []
        members = together or [(a, rank) for a in actions]
        keys = (key for a, r in members for key in self._needs(a, r))
        deps += (self.producers[key] for key in keys if key in self.producers)
        if together:
            ends = (self.last_compute, self.last_exposed)
            ready = [end[r] for _, r in together for end in ends if r in end]
            deps = [*dict.fromkeys(deps + self.before_round.setdefault(together, ready))]
        task = self._append(name, rank, "compute", seconds * factor, deps, at_start, at_end)
        if exposed > 0:
            name = f"{name} collectives"
            task = self._append(name, rank, "communication", exposed * factor, [task])
            self.last_exposed[rank] = task
        self.last_compute[rank] = task
        for a in actions:
            if a.kind in ("B", "W"):
                self.last_backward[a.stage, rank] = task
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
        self.tasks.append(Task(name, executor, ns, lane, tuple(deps), starts, ends))
        return len(self.tasks) - 1

    def _needs(self, action: Action, rank: int) -> Iterator[_Key]:
        """Yield the keys under which the tasks that produce inputs of a computation may be recorded."""
        s, i = action.stage, action.microbatch
        yield s, "UNSHARD", rank, None
        yield from ((o, action.kind.replace("I", "B"), i, s) for o in self._schedule.inputs(action))

    def _send(self, rank: int, action: Action, task: int) -> None:
        """Add the transfers of a result, and record after which task each stage that reads the result can start."""
        s, i = action.stage, action.microbatch
        way = "F" if action.kind == "F" else "B"
        self.producers[s, way, i, None] = task
        for send in self._schedule.messages(action):
            to, arrival = send.peer.stage, task
            edge = min(s, to), max(s, to)
            seconds = self.cost_of(send)[0]
            if edge in self._transfer_s:
                seconds = self._transfer_s[edge][i or 0]
            peer = self.homes.get((to, i), rank)
            if peer != rank and seconds > 0:
                link = f"link {rank}->{peer}"
                self.policies[link] = "priority"
                transfer = Task(str(send), link, nanoseconds(seconds), "communication", (task,))
                self.tasks.append(transfer)
                arrival = len(self.tasks) - 1
            self.producers[s, way, i, to] = self.producers[s, way, i, None] = arrival

    def _move(self, rank: int, action: Action, seconds: float, at_start: int, at_end: int) -> None:
        s, kind = action.stage, action.kind
        deps = [self.last_compute[rank]] if rank in self.last_compute else []
        if kind == "REDUCE_GRAD" and len(self.copies[s]) > 1:
            deps = [self.last_backward[s, copy] for copy in self.copies[s]]
        elif kind == "UNSHARD":
            deps = []  # prefetch: waits only for earlier tasks on its lane, among them the frees of its memory
        self.producers[s, kind, rank, None] = self._append(
            str(action), rank, "communication", seconds, deps, at_start, at_end
        )


def on_shared_cores(graph: TaskGraph, pace: Sequence[float]) -> TaskGraph:
    """Return a copy of the graph in which the lanes of all ranks share the cores, caches and memory of one machine.

    Durations in the graph are those while all ranks are busy. While some ranks are idle, the busy ranks run faster.
    Transfer times do not change.

    Args:
        graph: Graph of a schedule, on lanes `rank r/compute`, `rank r/communication`, ...
        pace: Speed of a pipeline rank while 1, 2, ... pipeline ranks are busy, relative to its speed while all are
            busy. One pipeline rank stands for all ranks of its stage, which work in lockstep. Empty or all 1: the
            graph is returned unchanged.
    """
    if all(p == 1.0 for p in pace):
        return graph
    exact = [Fraction(p).limit_denominator(1 << 20) for p in pace]
    lanes = frozenset(t.executor for t in graph.tasks if t.executor.startswith("rank "))
    tasks = tuple(
        replace(t, duration_ns=round(t.duration_ns / exact[0])) if t.executor in lanes else t for t in graph.tasks
    )
    return replace(graph, tasks=tasks, cores=Cores(tuple(p / exact[0] for p in exact), lanes))


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds, the unit of task graphs."""
    return round(seconds * 1e9)


def bubble_fraction(timeline: Timeline) -> float:
    """Return the mean over ranks of the fraction of the step in which the compute lane is idle."""
    busy: dict[str, float] = {}
    for _, span in computations(timeline):
        busy[span.lane] = busy.get(span.lane, 0.0) + span.duration_s
    return 1.0 - sum(busy.values()) / (len(busy) * timeline.end_s)


def makespan_s(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    costs: Sequence[StageCost],
    pace: Sequence[float] = (),
) -> float:
    """Return the seconds from the start of the first forward to the end of the last backward, over all ranks.

    Args:
        name: Schedule, one of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches of a step.
        stages_per_rank: Virtual stages of a rank.
        costs: Cost of each stage. Gathers, reductions and the update are not counted.
        pace: As for `on_shared_cores`; the step is simulated if any value is not 1.

    Raises:
        ScheduleError: HP320 for an illegal schedule, or when the number of costs is not the number of stages.

    Cost: a few numpy operations per level of the dependency graph. The last 64 schedules are cached.
    """
    program = _program(name, ranks, microbatches, stages_per_rank)
    check_num_costs(costs, program.stages)
    if any(p != 1.0 for p in pace):
        schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
        graph = on_shared_cores(schedule_tasks(schedule, costs), pace)
        return max(s.end_s for s in simulate(graph).spans if not s.lane.startswith("link"))
    return program.end(costs) / 1e9


@lru_cache(maxsize=64)
def _program(name: str, p: int, m: int, v: int) -> _Program:
    return _Program.of(make_schedule(name, p, m, v))


@dataclass(frozen=True, slots=True)
class _Program:
    """Schedule as index arrays, with computations sorted by topological level: each depends on earlier levels only.

    Index -1 means "none": it addresses an additional last entry with time 0.

    Attributes:
        stages: Number of stages.
        times: [2, computations]: indices of the computation and of the send of its result in the flat cost table.
        waits: [3, computations]: indices of the producer of the input, the predecessor on the rank, and the
            predecessor on the link of the result.
        rounds: Index of the first computation of every level, then the number of computations.
    """

    stages: int
    times: NDArray[np.intp]
    waits: NDArray[np.intp]
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> _Program:
        """Return the arrays of a schedule, with its computations numbered by level."""
        homes = schedule.homes()
        # Producer of an output (F) or a gradient (B); the stages of a preset form a chain.
        producer: dict[tuple[int, str, int | None], int] = {}
        on_rank: dict[int, int] = {}
        on_link: dict[tuple[int, int], int] = {}
        round_of = {-1: -1}
        rows: list[tuple[int, ...]] = []
        for rank, position in replay(schedule):
            for leaf in schedule.ranks[rank][position].leaves:
                number, s, i = len(rows), leaf.stage, leaf.microbatch
                send, source, link_before = "", -1, -1
                before, on_rank[rank] = on_rank.get(rank, -1), number
                if leaf.kind != "W":
                    direction = "F" if leaf.kind == "F" else "B"
                    for other in schedule.inputs(leaf):
                        source = producer[other, direction, i]
                    producer[s, direction, i] = number
                    for result in schedule.messages(leaf):
                        link = rank, homes[result.peer.stage, i]
                        if link[1] != rank:
                            send = result.kind
                            link_before, on_link[link] = on_link.get(link, -1), number
                times = [len(_TIMES) * s + _TIMES.index(kind) for kind in (leaf.kind, send)]
                rows.append((*times, source, before, link_before))
                round_of[number] = 1 + max(round_of[source], round_of[before])
        rounds = np.array([round_of[n] for n in range(len(rows))])
        order = np.argsort(rounds, kind="stable")
        moved = np.append(np.argsort(order), -1)
        table = np.array(rows, dtype=np.intp)[order].T
        stops = np.cumsum(np.bincount(rounds)).tolist()
        return cls(schedule.stages, table[:2], moved[table[2:]], (0, *stops))

    def end(self, costs: Sequence[StageCost]) -> int:
        duration, send = np.array([_times(c) for c in costs], dtype=np.int64).reshape(-1)[self.times]
        source, before, link_before = self.waits
        # With transfers, a result arrives after its computation ends; without, both times are equal.
        ends = np.zeros(len(duration) + 1, dtype=np.int64)
        arrives = np.zeros(len(duration) + 1, dtype=np.int64) if send.any() else ends
        for first, stop in pairwise(self.rounds):
            now = slice(first, stop)
            ends[now] = done = np.maximum(arrives[source[now]], ends[before[now]]) + duration[now]
            if arrives is not ends:
                free = np.maximum(done, arrives[link_before[now]])
                arrives[now] = np.where(send[now] > 0, free + send[now], done)
        return int(ends.max())


_TIMES: Final = ("F", "I", "W", "B", "SEND_F", "SEND_B", "")
"""Kinds of actions that take time; the last entry, with time 0, is used if no result is sent."""


def _times(cost: StageCost) -> list[int]:
    both = (action_costs(cost)[kind][:2] for kind in _TIMES[:-1])
    return [*(nanoseconds(own) + nanoseconds(exposed) for own, exposed in both), 0]
