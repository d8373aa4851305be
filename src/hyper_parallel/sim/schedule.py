"""Schedule: tasks appended to FIFO lanes, each with its start at once; and its form for many cost vectors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Schedule:
    """Earliest starts of tasks on lanes that run one task at a time, in the order in which tasks are appended.

    Times are numbers of one unit: whole nanoseconds are exact, seconds are as exact as floating point.

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
            deps: Ends of the tasks that must end first.
        """
        start = self.free[lane]
        for dep in deps:
            if dep > start:  # `max` takes twice as long, and emission appends thousands of tasks
                start = dep
        self.free[lane] = start + duration
        return start

    def hold(self, lane: str, until: Any) -> Any:
        """Keep a lane from starting a task before a time; return the time that it is idle for that."""
        idle = until - self.free[lane]
        if idle <= 0:
            return 0
        self.free[lane] = until
        return idle


@dataclass(frozen=True, slots=True)
class LaneProgram:
    """Tasks of one topology on FIFO lanes, for many vectors of durations at once.

    Attributes:
        lanes: Lane of every task.
        deps: Tasks that must end before each; smaller than its own number.
        rows: Row of the table of durations that each task has.
    """

    lanes: tuple[int, ...]
    deps: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    def span(self, durations: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Return the end of the last task, and the busy time of every lane: the longest path, column by column."""
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

    def contended_span(self, durations: Sequence[Array], demand: Array | float) -> Array:
        """Return the end of the last task of two lanes that share one resource of capacity 1, never both idle.

        Tasks of the first lane demand all of it, tasks of the second the share `demand`. While both run, both have the
        rate 1 / (1 + demand), so the order of events is that without contention, and every interval with both busy
        lasts 1 + demand times as long.
        """
        end, busy = self.span(durations)
        return end + demand * (sum(busy) - end)
