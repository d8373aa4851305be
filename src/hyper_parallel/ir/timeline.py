"""Timeline: spans on lanes; the same type for a simulated and a measured run, so a report can overlay them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel.ir.purpose import Purpose


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
