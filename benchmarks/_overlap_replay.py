"""Replay of measured steps: their own order and computation, with collectives that take as long as the link says.

A step of a rank is a chain of computation, issues of collectives and waits, all from the times of a `Meter`. A
collective begins when all ranks have issued it and the link is free, and lasts for its bytes. Latency and bandwidth of
the link are those of the serial steps. So the replay of another strategy tells whether the order of its tasks explains
its time. Collectives that the meter does not see, those of FSDP, count as computation.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.ir import Task, TaskGraph
from hyper_parallel.sim import simulate

FEW_BYTES = 4096
"""Bytes below which the duration of a collective is latency."""

Times = Mapping[str, Any]
"""Times of one step on one rank: those of `Meter.times`, and of its begin and end, `step`."""


@dataclass(frozen=True)
class Link:
    """Link that all ranks share.

    Attributes:
        latency_s: Seconds of a collective of no bytes.
        bytes_s: Bytes/s of all ranks together.
    """

    latency_s: float
    bytes_s: float

    @classmethod
    def of(cls, steps: Sequence[Sequence[Times]]) -> Link:
        """Return the link of serial steps, as medians; `steps`: for each step the times of all ranks."""
        sizes, seconds = [], []
        for ranks in steps:
            starts = _starts(ranks)
            for n, start in enumerate(starts):
                sizes.append(sum(times["bytes"][n] for times in ranks))
                seconds.append(max(times["in_flight"][n][1] for times in ranks) - start)
        pairs = list(zip(sizes, seconds, strict=True))
        latency = statistics.median([s for size, s in pairs if size < FEW_BYTES] or [0.0])
        rates = [(s - latency) / size for size, s in pairs if size >= FEW_BYTES]
        return cls(latency, 1.0 / max(statistics.median(rates), 1e-12))

    def seconds(self, size: int) -> float:
        """Return the seconds of a collective for which all ranks together send `size` bytes."""
        return self.latency_s + size / self.bytes_s


def replayed_s(ranks: Sequence[Times], link: Link) -> float:
    """Return the seconds of a step in a replay.

    Args:
        ranks: Times of each rank, on one clock; the order of issue is the same on all of them.
        link: The link.
    """
    begin = min(times["step"][0] for times in ranks)
    chains = [_events(times) for times in ranks]
    tasks: list[Task] = []
    last: list[tuple[int, ...]] = [()] * len(ranks)
    clock = [begin] * len(ranks)
    issued: list[dict[int, int]] = [{} for _ in ranks]
    flights: dict[int, int] = {}

    def advance(rank: int, position: int) -> int:
        """Append tasks of a rank until it waits for a collective that another rank has not issued."""
        for at, end, kind, number in chains[rank][position:]:
            if kind == "wait" and number not in flights:
                return position
            waits = (flights[number],) if kind == "wait" else ()
            duration = round(1e9 * max(0.0, at - clock[rank]))
            tasks.append(Task("compute", f"rank {rank}", duration, deps=last[rank]))
            last[rank], clock[rank] = (len(tasks) - 1,), max(clock[rank], end)
            if waits:
                tasks.append(Task("wait", f"rank {rank}", 0, "communication", (*last[rank], *waits)))
                last[rank] = (len(tasks) - 1,)
            elif kind == "issue":
                issued[rank][number] = last[rank][0]
                if all(number in own for own in issued):
                    size = sum(times["bytes"][number] for times in ranks)
                    deps = tuple(sorted(own[number] for own in issued))
                    duration = round(1e9 * link.seconds(size))
                    tasks.append(Task(str(number), "link", duration, "communication", deps))
                    flights[number] = len(tasks) - 1
            position += 1
        return position

    position = [0] * len(ranks)
    while any(p < len(chain) for p, chain in zip(position, chains, strict=True)):
        before = list(position)
        for rank in range(len(ranks)):
            position[rank] = advance(rank, position[rank])
        assert position != before, "a collective that a rank waits for is issued by all ranks"
    return simulate(TaskGraph(tuple(tasks))).end_s


def _events(times: Times) -> list[tuple[float, float, str, int]]:
    """Return begin, end, kind and collective of the events of a rank, in order; computation lies between them.

    The last event is the end of the step.
    """
    events = [(at, at, "issue", n) for n, at in enumerate(times["issued"])]
    events += [(begin, end, "wait", n) for n, (begin, end) in enumerate(times["blocked"])]
    # A blocking collective is issued when its wait begins; the sort is stable, so the issue stays first.
    events.sort(key=lambda event: event[0])
    end = times["step"][1]
    return [*events, (end, end, "end", -1)]


def _starts(ranks: Sequence[Times]) -> list[float]:
    """Return when each collective is issued by all ranks."""
    return [max(at) for at in zip(*(times["issued"] for times in ranks), strict=True)]


def replays(
    steps: Mapping[str, Sequence[Sequence[Times]]],
) -> dict[str, dict[str, list[float]]]:
    """Return the replayed seconds of each strategy and round, and their error relative to the measured step.

    Args:
        steps: Name of a strategy to the times of all ranks in each round; `serial` has no overlap.
    """
    link = Link.of(steps["serial"])
    results = {}
    for name, rounds in steps.items():
        seconds = [replayed_s(ranks, link) for ranks in rounds]
        spans = [[times["step"] for times in ranks] for ranks in rounds]
        walls = [max(end for _, end in span) - min(begin for begin, _ in span) for span in spans]
        errors = [s / wall - 1.0 for s, wall in zip(seconds, walls, strict=True)]
        results[name] = {"replayed_s": seconds, "replay_error": errors}
    return results
