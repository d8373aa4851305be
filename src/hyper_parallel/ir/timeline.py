"""Timeline: spans on lanes; the same type for a simulated and a measured run, so a report can overlay them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


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


def joined(timelines: Iterable[Timeline]) -> Timeline:
    """Merge measured timelines with the same start into one."""
    parts = tuple(timelines)
    spans = tuple(span for part in parts for span in part.spans)
    return Timeline("measured", spans, tuple(c for part in parts for c in part.counters))
