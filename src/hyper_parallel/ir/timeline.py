"""TaskGraph: tasks on executors with dependencies. Timeline: spans of work on lanes, simulated or measured.

An executor runs one task at a time: the compute stream of a rank, a copy engine, a link, a worker of a pool. A lane is
the row of a timeline with the tasks of one executor. Executors may share the cores of one device, see `Cores`.

Tasks are listed in an order that respects every dependency. So the graph has no cycle, and executors that run tasks in
list order cannot deadlock. Durations of tasks are integer nanoseconds.

`sim.simulate` turns a task graph into a timeline. A measured run is a timeline too, so a report can show both together.
`masking` computes exposed and masked communication of a measured step from its collectives (`Flight`).
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
    """Unit of work on an executor, with its duration and dependencies.

    Attributes:
        name: Displayed name: `2F0`, `all_gather layer 3`.
        executor: Executor, also the lane in the timeline: `rank 0/compute`, `link 0->1`.
        duration_ns: Nanoseconds from start to end without contention.
        kind: Category in the timeline: compute, communication, copy, ...
        deps: Indices of the tasks that must end first; each is smaller than the index of this task.
        at_start: Bytes allocated (negative: freed) when the task starts, as (memory lane, bytes) pairs:
            `("rank 0/device", 4096)`.
        at_end: Bytes allocated (negative: freed) when the task ends.
        priority: Priority on an executor with the policy `priority`; the smallest runs first.
    """

    name: str
    executor: str
    duration_ns: int
    kind: str = "compute"
    deps: tuple[int, ...] = ()
    at_start: tuple[tuple[str, int], ...] = ()
    at_end: tuple[tuple[str, int], ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Cores:
    """Rates of executors that share cores, caches and memory, by the number of busy executors.

    Attributes:
        rates: Rate of each executor while 1, 2, ... executors are busy; 1 is the rate without contention. If more are
            busy than the tuple has entries, they share the total rate of the last entry.
        executors: Executors that share the cores.
    """

    rates: tuple[Fraction, ...]
    executors: frozenset[str]

    def rate(self, busy: int) -> Fraction:
        """Return the rate of each executor while `busy` executors are busy."""
        most = len(self.rates)
        return self.rates[busy - 1] if busy <= most else self.rates[-1] * most / busy


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks with dependencies on executors, the input of `sim.simulate`.

    Attributes:
        tasks: Tasks in an order that respects dependencies; `Task.deps` are indices into it.
        policies: Dict from executor to its policy. `order` (the default): run tasks in list order, and wait if the next
            task is not ready. `priority`: run the ready task of smallest priority. Ties prefer the task that became
            ready first, then list order.
        initial_bytes: Dict from memory lane to its bytes before the first task.
        cores: Cores that some executors share; None: every executor has its own cores.

    Raises:
        TaskGraphError: HP321 when a task depends on a task that is not listed before it, or has a negative duration.
    """

    tasks: tuple[Task, ...]
    policies: dict[str, Literal["order", "priority"]] = field(default_factory=dict)
    initial_bytes: dict[str, int] = field(default_factory=dict)
    cores: Cores | None = None

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            if task.duration_ns < 0:
                raise TaskGraphError(f"task {number} `{task.name}` has a negative duration", got=task.duration_ns)
            for dep in task.deps:
                if not 0 <= dep < number:
                    raise TaskGraphError(
                        f"task {number} `{task.name}` depends on task {dep}, which is not listed before it",
                        got=task.deps,
                        allowed=f"0 to {number - 1}" if number else "no dependencies",
                    )


@dataclass(frozen=True, slots=True)
class Span:
    """Interval of work on a lane of a timeline.

    Attributes:
        lane: Executor: `rank 0/compute`, `rank 0/communication`.
        name: Name of the work: `forward`, `all_gather dp_shard`.
        start_s: Seconds from the start of the timeline.
        duration_s: Length of the interval in seconds.
        category: Category of the work, such as compute, communication, copy or wait.
        step: Training step; None: not recorded.
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
    """Value of a quantity at one time, such as the bytes in use in the memory tier `lane`."""

    lane: str
    time_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and counters of one run.

    Attributes:
        kind: predicted, simulated (event by event), or measured.
        spans: Spans in any order.
        counters: Counter samples in any order.
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
        """End of the last span, in seconds from the start of the timeline; 0 without spans."""
        return max((span.end_s for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True)
class Flight:
    """Start, wait and end of one asynchronous collective in a measured step.

    Attributes:
        purpose: Purpose of the collective.
        work: (kind of collective, bytes), the key of its duration without contention; see `masking`.
        start_s: Time at which the collective was issued, in seconds.
        wait_s: Time at which the rank began to wait for the collective.
        resume_s: Time at which the wait ended.
        end_s: Time at which the collective completed.
    """

    purpose: Purpose
    work: tuple[str, int]
    start_s: float
    wait_s: float
    resume_s: float
    end_s: float

    @property
    def blocked_s(self) -> float:
        """Seconds that the rank waited for the collective."""
        return self.resume_s - self.wait_s


def masking(flights: Sequence[Flight], alone_s: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Return exposed seconds of communication, and the fraction that computation masks (hides) by two definitions.

    Args:
        flights: Collectives of one step on one rank; the rank computes whenever it does not wait.
        alone_s: Dict from `Flight.work` to the seconds of that collective without concurrent work, for all `flights`.

    Returns:
        Dict with three entries:

        * `exposed_s`: dict from `Purpose.parallelism` to seconds of waiting;
        * `masking_timeline`: of the time with a collective in flight, the fraction in which the rank computes;
        * `masking_wait`: 1 - seconds of waiting / seconds of all collectives without contention; may be negative.

        The two fractions are None without communication. They exclude collectives between the sub-models of a
        multimodal model, because their waits are waits for another sub-model.
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
    """Return the total length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def merge_timelines(timelines: Iterable[Timeline]) -> Timeline:
    """Return one measured timeline with the spans and counters of several timelines that begin at the same time."""
    parts = tuple(timelines)
    spans = tuple(span for part in parts for span in part.spans)
    return Timeline("measured", spans, tuple(c for part in parts for c in part.counters))
