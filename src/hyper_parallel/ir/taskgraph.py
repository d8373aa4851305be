"""TaskGraph: work on executors with dependencies; and the one simulator that turns it into a Timeline.

An executor is anything that does one task at a time: the compute stream of a rank, a copy engine, a link, a worker of
a pool. Pipeline schedules, offload plans and programs of several models all become task graphs. Executors may share
the cores of one device: while more of them work than there are cores, all of them are slower alike.

The list of tasks is in an order that respects every dependency. So the graph has no cycle by construction, and
executors that keep to the order of the list cannot deadlock. Times are integer nanoseconds: results are exact and do
not depend on the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from typing import Literal

from hyper_parallel.errors import TaskGraphError
from hyper_parallel.ir.timeline import Counter, Span, Timeline


@dataclass(frozen=True, slots=True)
class Task:
    """Task on an executor.

    Attributes:
        name: Name for people: `2F0`, `all_gather layer 3`.
        executor: Executor, also the lane in the timeline: `rank 0/compute`, `link 0->1`.
        duration_ns: Nanoseconds from start to end, on a core of its own.
        kind: Category in the timeline: compute, communication, copy, ...
        deps: Indices of the tasks that must end first; each smaller than the task's own.
        bytes: Bytes moved, for reports.
        at_start: Change in bytes of memory lanes when it starts, as (lane, bytes): `("rank 0/device", 4096)`.
        at_end: Change in bytes of memory lanes when it ends.
        priority: Smaller runs first on an executor with priorities.
    """

    name: str
    executor: str
    duration_ns: int
    kind: str = "compute"
    deps: tuple[int, ...] = ()
    bytes: int = 0
    at_start: tuple[tuple[str, int], ...] = ()
    at_end: tuple[tuple[str, int], ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores, caches and memory shared by executors: each slows down as more of them are busy.

    Attributes:
        rates: Rate of each while 1, 2, ... are busy. More executors than rates divide the total of the last rate.
        executors: Executors that share the cores.
    """

    rates: tuple[Fraction, ...]
    executors: frozenset[str]

    def rate(self, busy: int) -> Fraction:
        """Return the rate of each executor while `busy` of them work."""
        most = len(self.rates)
        return self.rates[busy - 1] if busy <= most else self.rates[-1] * most / busy


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in an order that respects their dependencies.

    Attributes:
        tasks: The tasks; a task's position is its number.
        policies: How an executor chooses: `order` (the default) keeps to the order of the list and waits when the
            next task is not ready; `priority` takes, among the tasks that are ready, the one of smallest priority,
            then the one that has been ready longest, then the first in the list.
        initial_bytes: Bytes in memory lanes before the first task.
        cores: Cores that some executors share; None: every executor has its own.

    Raises:
        TaskGraphError: HP321 when a task depends on itself or a later one, or has a negative duration.
    """

    tasks: tuple[Task, ...]
    policies: dict[str, Literal["order", "priority"]] = field(default_factory=dict)
    initial_bytes: dict[str, int] = field(default_factory=dict)
    cores: Cores | None = None

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            if task.duration_ns < 0:
                raise TaskGraphError(
                    f"task {number} `{task.name}` has a negative duration", got=task.duration_ns
                )
            for dep in task.deps:
                if not 0 <= dep < number:
                    raise TaskGraphError(
                        f"task {number} `{task.name}` depends on task {dep}, which is not before it",
                        got=task.deps,
                        allowed=f"0 to {number - 1}",
                    )


def simulate(graph: TaskGraph) -> Timeline:
    """Run a task graph event by event.

    A task starts when all its dependencies have ended and its executor is free and selects it. At one instant, ends are
    processed before starts: a priority queue knows all ready tasks, and memory released at an instant is available to
    tasks that start then.

    Returns:
        A simulated timeline: one span per task in the order they start, and one counter sample per memory change.

    Cost: O((tasks + dependencies) log tasks).
    """
    tasks = graph.tasks
    lanes = {name: i for i, name in enumerate(dict.fromkeys(t.executor for t in tasks))}
    lane_of = [lanes[t.executor] for t in tasks]
    ready, waiting, followers = _initial_queues(graph, lane_of, len(lanes))
    started: list[int] = []
    begin, end = [0] * len(tasks), [0] * len(tasks)
    lane_bytes = dict(graph.initial_bytes)
    samples = [Counter(lane, 0.0, value) for lane, value in lane_bytes.items()]
    busy = [False] * len(lanes)
    clock = _Clock(graph.cores, tuple(lanes))
    touched = set(range(len(lanes)))
    now = 0

    def change_memory(effects: tuple[tuple[str, int], ...]) -> None:
        for lane, delta in effects:
            lane_bytes[lane] = lane_bytes.get(lane, 0) + delta
            samples.append(Counter(lane, now / 1e9, lane_bytes[lane]))

    while True:
        for lane in sorted(touched):
            if busy[lane] or not ready[lane]:
                continue
            number = heappop(ready[lane])[2]
            busy[lane] = True
            clock.start(lane, number, tasks[number].duration_ns)
            started.append(number)
            begin[number] = now
            change_memory(tasks[number].at_start)
        if clock.idle:
            break
        ended = clock.advance()
        now = clock.now
        touched.clear()
        for number in ended:
            end[number] = now
            busy[lane_of[number]] = False
            touched.add(lane_of[number])
            change_memory(tasks[number].at_end)
            for follower in followers[number]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    lane = lane_of[follower]
                    touched.add(lane)
                    heappush(ready[lane], (tasks[follower].priority, now, follower))
    assert len(started) == len(tasks), "a graph in dependency order cannot get stuck"
    spans = tuple(_span(tasks[n], begin[n], end[n]) for n in started)
    return Timeline("simulated", spans, tuple(samples))


def _span(task: Task, begin_ns: int, end_ns: int) -> Span:
    """Return the span of a task that ran."""
    return Span(task.executor, task.name, begin_ns / 1e9, (end_ns - begin_ns) / 1e9, task.kind)


def _initial_queues(
    graph: TaskGraph, lane_of: list[int], num_lanes: int
) -> tuple[list[list[tuple[int, int, int]]], list[int], list[list[int]]]:
    """Return the ready queue of every lane at time 0, and the number of dependencies and the followers of every task.

    Entries of a ready queue are (priority, time at which the task became ready, number of the task). On an executor
    that keeps to the order of the list, each task also depends on the task before.
    """
    tasks = graph.tasks
    ready: list[list[tuple[int, int, int]]] = [[] for _ in range(num_lanes)]
    waiting = [len(t.deps) for t in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[str, int] = {}
    for number, task in enumerate(tasks):
        for dep in task.deps:
            followers[dep].append(number)
        if graph.policies.get(task.executor) != "priority":
            if task.executor in last:
                followers[last[task.executor]].append(number)
                waiting[number] += 1
            last[task.executor] = number
        if not waiting[number]:
            heappush(ready[lane_of[number]], (task.priority, 0, number))
    return ready, waiting, followers


class _Clock:
    """Clock of running tasks: the end of a task is known at its start, except on shared cores.

    All tasks on shared cores progress alike, so the work done by each of them since the beginning is one number. A task
    ends when that number has grown by its duration. The number is in whole nanoseconds, rounded down at every event,
    and times are rounded up, so no task ends before its duration.
    """

    def __init__(self, cores: Cores | None, lanes: tuple[str, ...]) -> None:
        self.now = 0
        self._shared = [cores is not None and name in cores.executors for name in lanes]
        self._cores = cores
        self._shared_work_ns = 0
        self._own: list[tuple[int, int]] = []
        self._sharing: list[tuple[int, int]] = []

    @property
    def idle(self) -> bool:
        """True if no task is running."""
        return not self._own and not self._sharing

    def start(self, lane: int, number: int, duration_ns: int) -> None:
        """Start a task now."""
        if self._shared[lane]:
            heappush(self._sharing, (self._shared_work_ns + duration_ns, number))
        else:
            heappush(self._own, (self.now + duration_ns, number))

    def advance(self) -> list[int]:
        """Advance to the next instant at which tasks end, and return these tasks in the order of the list."""
        instant = self._own[0][0] if self._own else None
        if self._sharing:
            assert self._cores is not None, "only shared cores have lanes that share"
            up, down = self._cores.rate(len(self._sharing)).as_integer_ratio()
            shared = self.now - (self._shared_work_ns - self._sharing[0][0]) * down // up
            instant = shared if instant is None else min(instant, shared)
            self._shared_work_ns += (instant - self.now) * up // down
        assert instant is not None, "something runs"
        self.now = instant
        ended = []
        while self._own and self._own[0][0] == self.now:
            ended.append(heappop(self._own)[1])
        while self._sharing and self._sharing[0][0] <= self._shared_work_ns:
            ended.append(heappop(self._sharing)[1])
        return sorted(ended)


def peaks(timeline: Timeline) -> dict[str, float]:
    """Return the highest value of every counter lane."""
    result: dict[str, float] = {}
    for sample in timeline.counters:
        result[sample.lane] = max(result.get(sample.lane, sample.value), sample.value)
    return result
