"""Event-driven simulation of a TaskGraph in integer nanoseconds: the reference for the faster forms in `schedule`."""

from __future__ import annotations

from heapq import heappop, heappush

from hyper_parallel.ir import Counter, Span, Task, TaskGraph, Timeline


def simulate(graph: TaskGraph) -> Timeline:
    """Return the simulated timeline of a task graph.

    A task starts when its dependencies have ended and its executor is free and selects it. If tasks end and start at
    the same time, the ends are processed first: they make other tasks ready and release memory.

    Returns:
        Timeline with one span per task, in the order of their starts, and samples of the memory counters.

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
    clock = _Clock(graph, tuple(lanes))
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
            clock.start(lane, number)
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
    return Span(task.executor, task.name, begin_ns / 1e9, (end_ns - begin_ns) / 1e9, task.kind)


def _initial_queues(
    graph: TaskGraph, lane_of: list[int], num_lanes: int
) -> tuple[list[list[tuple[int, int, int]]], list[int], list[list[int]]]:
    """Return the ready queue of every lane at time 0; by task, the number of dependencies; and the dependent tasks.

    Entries of a ready queue are (priority, time at which the task became ready, index of the task). On an executor that
    runs tasks in list order, each task also depends on the previous task of this executor.
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
    """Running tasks and the current time in nanoseconds.

    Tasks on shared cores all progress at the same rate, so one counter of their work suffices. Such a task ends when
    the counter has grown by its duration since its start. The end of every other task is known at its start. Work is
    rounded down to nanoseconds at every event and times are rounded up, so no task takes less than its duration.
    """

    def __init__(self, graph: TaskGraph, lanes: tuple[str, ...]) -> None:
        self.now = 0
        self._tasks, self._cores = graph.tasks, graph.cores
        self._shared = [graph.cores is not None and name in graph.cores.executors for name in lanes]
        self._shared_work_ns = 0
        self._own: list[tuple[int, int]] = []
        self._sharing: list[tuple[int, int]] = []

    @property
    def idle(self) -> bool:
        return not self._own and not self._sharing

    def start(self, lane: int, number: int) -> None:
        duration_ns = self._tasks[number].duration_ns
        if self._shared[lane]:
            heappush(self._sharing, (self._shared_work_ns + duration_ns, number))
        else:
            heappush(self._own, (self.now + duration_ns, number))

    def advance(self) -> list[int]:
        """Advance to the next time at which tasks end, and return the indices of these tasks in ascending order."""
        instants = [self._own[0][0]] if self._own else []
        up = down = 1
        if self._sharing:
            assert self._cores is not None, "only shared cores have lanes that share"
            up, down = self._cores.rate(len(self._sharing)).as_integer_ratio()
            instants.append(self.now - (self._shared_work_ns - self._sharing[0][0]) * down // up)
        elapsed_ns, self.now = min(instants) - self.now, min(instants)
        if self._sharing:
            self._shared_work_ns += elapsed_ns * up // down
        ended: list[int] = []
        while self._own and self._own[0][0] == self.now:
            ended.append(heappop(self._own)[1])
        while self._sharing and self._sharing[0][0] <= self._shared_work_ns:
            ended.append(heappop(self._sharing)[1])
        return sorted(ended)


def peaks(timeline: Timeline) -> dict[str, float]:
    """Return a dict from lane of a counter to the highest value of the counter."""
    result: dict[str, float] = {}
    for sample in timeline.counters:
        result[sample.lane] = max(result.get(sample.lane, sample.value), sample.value)
    return result


def steady_step_s(graph: TaskGraph, max_staleness: int | None) -> float:
    """Return the steady-state seconds per step of a graph of `ir.role_tasks`: the mean time between ends of updates.

    The mean excludes the first steps, whose sampling does not wait, and the last steps, during which only learners run.

    Args:
        graph: Graph of at least 2 * (s + 3) steps, where s is `max_staleness`, or 0 for None.
        max_staleness: Steps that sampling may run ahead of learning; None: learners sample between steps.
    """
    ends: dict[str, float] = {}
    for span in simulate(graph).spans:
        if span.category == "learn":
            ends[span.name] = max(ends.get(span.name, 0.0), span.end_s)
    first = (max_staleness or 0) + 2
    last = len(ends) - 1 - first
    return (ends[f"learn {last}"] - ends[f"learn {first}"]) / (last - first)
