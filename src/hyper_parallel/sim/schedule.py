"""Start times of tasks on lanes in list order: computed as tasks are appended, or for many durations at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DRAWS = 64
"""Number of random draws over which the simulated time of ranks of varying speed is averaged."""


class Schedule:
    """Clock that gives each appended task its earliest start; a lane runs one task at a time, in append order.

    All times must have the same unit. Integer nanoseconds give exact results.

    Attributes:
        free: Time from which a lane is free, by lane: the end of its last task or hold.
    """

    def __init__(self) -> None:
        self.free: defaultdict[str, Any] = defaultdict(int)

    def append(self, lane: str, duration: Any, deps: Iterable[Any] = ()) -> Any:
        """Append a task and return its start time.

        Args:
            lane: Lane that runs the task.
            duration: Time from start to end.
            deps: End times of the tasks that must end first.
        """
        start = self.free[lane]
        for dep in deps:
            if dep > start:  # `max` takes twice as long, and emission appends thousands of tasks
                start = dep
        self.free[lane] = start + duration
        return start

    def hold(self, lane: str, until: Any) -> Any:
        """Keep a lane idle until the time `until`, and return the idle time: 0 if its last task ends then or later."""
        idle = until - self.free[lane]
        if idle <= 0:
            return 0
        self.free[lane] = until
        return idle


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that run the same program at varying speed and wait for each other in collectives.

    Attributes:
        count: Number of ranks.
        jitter: Standard deviation of the duration of one task on one rank, relative to its mean.
        spread: Time from the first to the last rank's completion of a collective, divided by its duration.
        counts_late: True: the end of a program is that of the slowest rank, and ranks wait for ranks that reach a
            collective late. False: it is the mean over ranks, without these waits.
    """

    count: int
    jitter: float
    spread: float = 0.0
    counts_late: bool = True

    @property
    def vary(self) -> bool:
        """True if ranks reach collectives or receive results at different times."""
        return self.count > 1 and (self.jitter > 0.0 or self.spread > 0.0)

    def factors(self, normal: Array) -> Array:
        """Return log-normal factors of mean 1 for the durations of tasks, from standard normal draws."""
        variance = math.log1p(self.jitter**2)
        factors: Array = np.exp(math.sqrt(variance) * normal - variance / 2.0)
        return factors


@dataclass(frozen=True, slots=True)
class LaneProgram:
    """Task graph on lanes that run tasks in list order, evaluated for many vectors of durations at once.

    Attributes:
        lanes: Lane of every task, a number from 0.
        deps: For every task, the indices of earlier tasks that must end first.
        rows: For every task, the index of its duration in the argument `durations` of the methods.
    """

    lanes: tuple[int, ...]
    deps: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    def span(self, durations: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Return the end of the last task, and the busy time of every lane.

        Args:
            durations: Arrays of durations, indexed by `rows`; an array has one entry per candidate, or one for all.
        """
        ends: list[Array] = []
        zero: Array = np.zeros(1)
        num_lanes = max(self.lanes, default=0) + 1
        free, busy = [zero] * num_lanes, [zero] * num_lanes
        for lane, deps, row in zip(self.lanes, self.deps, self.rows, strict=True):
            start = free[lane]
            for dep in deps:
                start = np.maximum(start, ends[dep])
            free[lane] = start + durations[row]
            busy[lane] = busy[lane] + durations[row]
            ends.append(free[lane])
        end = free[0]
        for lane_end in free[1:]:
            end = np.maximum(end, lane_end)
        return end, tuple(busy)

    def contended_span(self, durations: Sequence[Array], demand: Array | float, ranks: Ranks | None = None) -> Array:
        """Return the end of the last task if the two lanes share one resource; at least one lane must always be busy.

        A task on lane 0 uses the whole resource when it runs alone, a task on lane 1 the fraction `demand`. While both
        lanes are busy, both run at the rate 1 / (1 + demand). Contention therefore changes no order of events: every
        interval in which both lanes are busy lasts 1 + demand times as long.

        Args:
            durations: As for `span`.
            demand: Fraction of the resource that a task on lane 1 uses.
            ranks: Ranks that run the program and share lane 1; None: all ranks run in lockstep.
        """
        end, busy = self.span(durations)
        contention = demand * (sum(busy) - end)
        if ranks is None or not ranks.vary:
            return end + contention
        return self._span_of_ranks(durations, ranks) + contention

    def _span_of_ranks(self, durations: Sequence[Array], ranks: Ranks) -> Array:
        """Return the mean end of the last task over random speeds of ranks; lane 1 is a link that ranks share.

        A collective starts when every rank has reached it and the link is free. The mean excess of the drawn
        computation over `durations` is subtracted, so that it does not shift the result. The random seed is fixed, so
        results of different programs can be compared. Arrays are [candidates, ranks, draws].
        """
        columns = np.broadcast_arrays(*durations)[0].shape[0]
        work = [np.broadcast_to(row, (columns,))[:, None, None] for row in durations]
        normal = np.random.default_rng(0).standard_normal((len(self.lanes), ranks.count, DRAWS))
        free, excess, late = (np.zeros((columns, ranks.count, DRAWS)) for _ in range(3))
        link = np.zeros((columns, 1, DRAWS))
        ends: list[Array] = []
        starts: dict[int, Array] = {}  # collective -> time at which all ranks have reached it

        def wait(tasks: Iterable[int]) -> None:
            nonlocal free, late
            for task in tasks:
                if task in starts:
                    late = late + np.maximum(starts[task] - free, 0.0)
                    free = np.maximum(free, starts[task])
                free = np.maximum(free, ends[task])

        for task, (lane, deps, row) in enumerate(zip(self.lanes, self.deps, self.rows, strict=True)):
            if lane:
                ready = np.zeros_like(free)
                for dep in deps:
                    ready = np.maximum(ready, ends[dep])
                starts[task] = ready.max(axis=1, keepdims=True)
                link = np.maximum(link, starts[task]) + work[row]
                ends.append(link - ranks.spread * work[row] * _completion_order(normal[task]))
            else:
                wait(deps)
                seconds = work[row] * ranks.factors(normal[task])
                excess = excess + seconds - work[row]
                free = free + seconds
                ends.append(free)
        wait(sorted(starts.keys() - {dep for deps in self.deps for dep in deps}))
        end = free.max(axis=1, keepdims=True) if ranks.counts_late else free - late
        mean: Array = (end - excess.mean(axis=1, keepdims=True)).mean(axis=(1, 2))
        return mean


def _completion_order(normal: Array) -> Array:
    """Return a random order of the ranks per draw, from 0 for the last rank to 1 for the first; [ranks, draws]."""
    order: Array = np.argsort(np.argsort(normal, axis=0), axis=0) / (len(normal) - 1.0)
    return order
