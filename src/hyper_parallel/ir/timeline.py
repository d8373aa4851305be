"""TaskGraph and Timeline: work on executors with dependencies, and the spans on lanes that it becomes.

An executor is anything that does one task at a time: the compute stream of a rank, a copy engine, a link, a worker of
a pool. Pipeline schedules, offload plans and programs of several models all become task graphs. Executors may share
the cores of one device: while more of them work than there are cores, all of them are slower alike. Tasks may also
share named resources, such as compute units, memory bandwidth or a link, with a demand of each task.

The list of tasks is in an order that respects every dependency. So the graph has no cycle by construction, and
executors that keep to the order of the list cannot deadlock. Times are integer nanoseconds: results are exact and do
not depend on the order of additions.

`sim.simulate` turns a task graph into a timeline. A measured run is a timeline too, so a report can overlay both.
`masking` returns the exposed and the masked communication of a measured step from its collectives (`Flight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from hyper_parallel.errors import TaskGraphError
from hyper_parallel.ir.layout import Purpose


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
        demands: Amounts of resources that it occupies at full speed, as (resource, amount): `("cores", Fraction(1))`.
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
    demands: tuple[tuple[str, Fraction], ...] = ()


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
        capacities: Capacity of every resource that tasks demand. While running tasks demand more than that, those that
            demand it run at the rate capacity / demand; a task runs at the least rate of its resources.

    Raises:
        TaskGraphError: HP321 when a task depends on itself or a later one, has a negative duration, demands a resource
            without capacity, or demands resources on shared cores.
    """

    tasks: tuple[Task, ...]
    policies: dict[str, Literal["order", "priority"]] = field(default_factory=dict)
    initial_bytes: dict[str, int] = field(default_factory=dict)
    cores: Cores | None = None
    capacities: dict[str, Fraction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            if task.duration_ns < 0:
                raise TaskGraphError(
                    f"task {number} `{task.name}` has a negative duration", got=task.duration_ns
                )
            for dep in task.deps:
                if not 0 <= dep < number:
                    raise TaskGraphError(
                        f"task {number} `{task.name}` depends on task {dep}, which is not listed before it",
                        got=task.deps,
                        allowed=f"0 to {number - 1}",
                    )
            self._check_demands(number, task)

    def _check_demands(self, number: int, task: Task) -> None:
        """Raise HP321 for a demand that no resource can meet."""
        for resource, amount in task.demands:
            if self.capacities.get(resource, 0) <= 0 or amount < 0:
                raise TaskGraphError(
                    f"task {number} `{task.name}` uses a resource that has no capacity",
                    got=f"{resource}: {amount}",
                    allowed=tuple(self.capacities),
                )
        if task.demands and self.cores is not None and task.executor in self.cores.executors:
            raise TaskGraphError(
                f"task {number} `{task.name}` uses resources, but its executor runs on shared cores",
                got=task.executor,
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Interval of work on a lane.

    Attributes:
        lane: Executor: `rank 0/compute`, `rank 0/communication`.
        name: Name of the work: `forward`, `all_gather dp_shard`.
        start_s: Seconds from the start of the timeline.
        category: Cost term: compute, communication, optimizer, data, wait.
        step: Training step.
    """

    lane: str
    name: str
    start_s: float
    duration_s: float
    category: str
    step: int | None = None

    @property
    def end_s(self) -> float:
        """End in seconds from the start of the timeline."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Counter:
    """Sample of a quantity over time, such as bytes in a memory tier."""

    lane: str
    time_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and counters of one run.

    Attributes:
        kind: predicted, simulated (event by event), or measured.
        spans: Spans in any order.
        counters: Samples in any order.
    """

    kind: Literal["predicted", "simulated", "measured"]
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lane names in order of first appearance."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))

    @property
    def end_s(self) -> float:
        """End of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True)
class Flight:
    """Collective of a measured step.

    Attributes:
        purpose: Purpose of the collective.
        work: Kind and bytes; equal ones have one duration alone.
        start_s: Start, when it was issued.
        wait_s: Start of the wait for it.
        resume_s: End of the wait.
        end_s: Completion.
    """

    purpose: Purpose
    work: tuple[str, int]
    start_s: float
    wait_s: float
    resume_s: float
    end_s: float

    @property
    def blocked_s(self) -> float:
        """Seconds for which the rank waited."""
        return self.resume_s - self.wait_s


def masking(flights: Sequence[Flight], alone_s: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Return exposed seconds by kind of parallelism, and the masked share of communication by two definitions.

    Args:
        flights: Collectives of one step of one rank, which computes while it does not wait.
        alone_s: Seconds of each `Flight.work` without other work at the same time.

    Returns:
        `exposed_s`: seconds of waiting by `Purpose.parallelism`. `masking_timeline`: of the time with a collective in
            flight, the part in which the rank computes. `masking_wait`: 1 - seconds of waiting / seconds of all
            collectives alone. Both without sums over sub-models, in which a part waits for the work of another one.
            None for a step without communication.
    """
    exposed_s: dict[str, float] = {}
    for flight in flights:
        kind = flight.purpose.parallelism
        exposed_s[kind] = exposed_s.get(kind, 0.0) + flight.blocked_s
    flights = [f for f in flights if f.purpose.parallelism != "submodels"]
    in_flight = _union((f.start_s, max(f.end_s, f.start_s)) for f in flights)
    waits = _union((f.wait_s, f.resume_s) for f in flights)
    both_s = in_flight + waits - _union([
        *((f.start_s, max(f.end_s, f.start_s)) for f in flights),
        *((f.wait_s, f.resume_s) for f in flights),
    ])  # fmt: skip
    total_s = sum(alone_s[f.work] for f in flights)
    return {
        "exposed_s": exposed_s,
        "masking_timeline": 1.0 - both_s / in_flight if in_flight else None,
        "masking_wait": 1.0 - sum(f.blocked_s for f in flights) / total_s if total_s else None,
    }


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def joined(timelines: Iterable[Timeline]) -> Timeline:
    """Merge measured timelines with the same start into one."""
    parts = tuple(timelines)
    spans = tuple(span for part in parts for span in part.spans)
    return Timeline("measured", spans, tuple(c for part in parts for c in part.counters))
