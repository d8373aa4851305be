"""Start times of tasks on FIFO lanes: computed as tasks are appended, or for many vectors of durations at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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

    def contended_span(self, durations: Sequence[Array], demand: Array | float) -> Array:
        """Return the end of the last task if two lanes share one resource; at least one lane must always be busy.

        A task of the first lane uses the whole resource when alone, a task of the second the share `demand`. While both
        lanes are busy, both run at the rate 1 / (1 + demand). So the order of events is the one without contention, and
        every interval in which both are busy lasts 1 + demand times as long.
        """
        end, busy = self.span(durations)
        return end + demand * (sum(busy) - end)
