"""TaskGraph: work on executors with dependencies, which `sim.simulate` turns into a Timeline.

An executor is anything that does one task at a time: the compute stream of a rank, a copy engine, a link, a worker of
a pool. Pipeline schedules, offload plans and programs of several models all become task graphs. Executors may share
the cores of one device: while more of them work than there are cores, all of them are slower alike. Tasks may also
share named resources, such as compute units, memory bandwidth or a link, with a demand of each task.

The list of tasks is in an order that respects every dependency. So the graph has no cycle by construction, and
executors that keep to the order of the list cannot deadlock. Times are integer nanoseconds: results are exact and do
not depend on the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from hyper_parallel.errors import TaskGraphError


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
                        f"task {number} `{task.name}` depends on task {dep}, which is not before it",
                        got=task.deps,
                        allowed=f"0 to {number - 1}",
                    )
            self._check_demands(number, task)

    def _check_demands(self, number: int, task: Task) -> None:
        """Raise HP321 for a demand that no resource can meet."""
        for resource, amount in task.demands:
            if self.capacities.get(resource, 0) <= 0 or amount < 0:
                raise TaskGraphError(
                    f"task {number} `{task.name}` demands a resource without capacity",
                    got=f"{resource}: {amount}",
                    allowed=tuple(self.capacities),
                )
        if task.demands and self.cores is not None and task.executor in self.cores.executors:
            raise TaskGraphError(
                f"task {number} `{task.name}` demands resources on shared cores", got=task.executor
            )
