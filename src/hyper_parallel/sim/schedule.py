"""Start times of tasks on FIFO lanes: computed as tasks are appended, or for many vectors of durations at once."""

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
"""Number of random draws over which a program of several ranks is averaged.

A trade-off: the error of the mean is an eighth of the deviation of one draw, and time grows with the number."""


class Schedule:
    """Clock that gives each appended task its earliest start; a lane runs one task at a time, in append order.

    All times must have the same unit. Integer nanoseconds are exact, seconds as exact as floating point.

    Attributes:
        free: End of the last task, by lane.
    """

    def __init__(self) -> None:
        self.free: defaultdict[str, Any] = defaultdict(int)

    def append(self, lane: str, duration: Any, deps: Iterable[Any] = ()) -> Any:
        """Append a task and return its start.

        Args:
            lane: Lane that runs it.
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
        """Keep a lane idle until a time, and return the idle time; 0 if the lane is busy until then."""
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
        spread: Share of a collective's duration by which the first rank has its result before the last one.
        counts_late: Count the waits for ranks that have not reached a collective. Without them, the end of a program is
            the mean over ranks of computation and waits for transfers.
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
        """Return log-normal factors of mean 1 from standard normal draws."""
        variance = math.log1p(self.jitter**2)
        factors: Array = np.exp(math.sqrt(variance) * normal - variance / 2.0)
        return factors


@dataclass(frozen=True, slots=True)
class LaneProgram:
    """Tasks of one topology on FIFO lanes, for many vectors of durations at once.

    Attributes:
        lanes: Lane of every task.
        deps: For every task, the indices of tasks that must end first; they are smaller than its own index.
        rows: For every task, the index of its duration in `durations`.
    """

    lanes: tuple[int, ...]
    deps: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    def span(self, durations: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Return the end of the last task and the busy time of every lane, for each column of `durations`."""
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

    def contended_span(
        self, durations: Sequence[Array], demand: Array | float, ranks: Ranks | None = None
    ) -> Array:
        """Return the end of the last task if two lanes share one resource; at least one lane must always be busy.

        A task of the first lane uses the whole resource when alone, a task of the second the share `demand`. While both
        lanes are busy, both run at the rate 1 / (1 + demand). So the order of events is the one without contention, and
        every interval in which both are busy lasts 1 + demand times as long.

        Args:
            durations: Durations by row; an entry per candidate.
            demand: Share of the resource.
            ranks: Ranks that run the program and share lane 1; None: ranks in lockstep.
        """
        end, busy = self.span(durations)
        contention = demand * (sum(busy) - end)
        if ranks is None or not ranks.vary:
            return end + contention
        return self._span_of_ranks(durations, ranks) + contention

    def _span_of_ranks(self, durations: Sequence[Array], ranks: Ranks) -> Array:
        """Return the mean end of the last task over random speeds of ranks; lane 1 is a link that ranks share.

        A collective starts when every rank has reached it and the link is free. Every rank computes `durations` on
        average, exactly: the mean deviation of the draws is subtracted. Equal seeds draw equal numbers, so programs can
        be compared. Arrays are [candidates, ranks, draws].
        """
        columns = np.broadcast_arrays(*durations)[0].shape[0]
        work = [np.broadcast_to(row, (columns,))[:, None, None] for row in durations]
        normal = np.random.default_rng(0).standard_normal((len(self.lanes), ranks.count, DRAWS))
        free, excess, late = (np.zeros((columns, ranks.count, DRAWS)) for _ in range(3))
        link = np.zeros((columns, 1, DRAWS))
        ends: list[Array] = []
        starts: dict[int, Array] = {}  # of collectives: all ranks have reached them

        def wait(tasks: Iterable[int]) -> None:
            nonlocal free, late
            for task in tasks:
                if task in starts:
                    late = late + np.maximum(starts[task] - free, 0.0)
                    free = np.maximum(free, starts[task])
                free = np.maximum(free, ends[task])

        for task, (lane, deps, row) in enumerate(
            zip(self.lanes, self.deps, self.rows, strict=True)
        ):
            if lane:
                ready = np.zeros_like(free)
                for dep in deps:
                    ready = np.maximum(ready, ends[dep])
                starts[task] = ready.max(axis=1, keepdims=True)
                link = np.maximum(link, starts[task]) + work[row]
                ends.append(link - ranks.spread * work[row] * _places(normal[task]))
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


def _places(normal: Array) -> Array:
    """Return a place in random order for each rank of draws [ranks, draws], from 0 for the last to 1 for the first."""
    places: Array = np.argsort(np.argsort(normal, axis=0), axis=0) / (len(normal) - 1.0)
    return places
