"""How long a schedule takes, without spans: the same times as `simulate(schedule_tasks(...))`, much faster.

The search asks this of many plans. A schedule without gathers and offload is a fixed graph: every computation waits for
the one before it on its rank and for one result of a neighbouring stage, and every transfer for the one before it on
its link. So the end times are longest paths, found for all ranks at once, one computation per rank and round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Schedule, StageCost, simulate
from hyper_parallel.mpmd._schedules import make_schedule
from hyper_parallel.mpmd._tasks import on_shared_cores, schedule_tasks


def makespan_s(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    costs: Sequence[StageCost],
    pace: Sequence[float] = (),
) -> float:
    """Seconds from the first forward to the end of the last backward of any rank.

    Args:
        name: Schedule, one of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches of a step.
        stages_per_rank: Virtual stages of a rank.
        costs: One per stage. Gathers, reductions, offload and the update are not counted.
        pace: Speed of a rank while 1, 2, ... of them work; where not all are 1 the events are simulated.

    Raises:
        ScheduleError: HP320 for a schedule that cannot be made, or another number of costs than stages.

    Cost: about 2 x microbatches x stages_per_rank rounds of numpy work; making the schedule is remembered.
    """
    program = _program(name, ranks, microbatches, stages_per_rank)
    if len(costs) != program.stages:
        raise ScheduleError(
            "every stage needs its cost", got=f"{len(costs)} costs", allowed=program.stages
        )
    if any(p != 1.0 for p in pace):
        schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
        graph = on_shared_cores(schedule_tasks(schedule, costs), pace)
        return max(s.end_s for s in simulate(graph).spans if not s.lane.startswith("link"))
    return program.end(costs) / 1e9


@lru_cache(maxsize=64)
def _program(name: str, p: int, m: int, v: int) -> _Program:
    return _Program.of(make_schedule(name, p, m, v))


@dataclass(frozen=True, slots=True)
class _Program:
    """A schedule as arrays, computations in rounds: those of a round wait only for earlier rounds.

    Positions mean "none" where they point to the last entry, which is always 0.

    Attributes:
        stages: Number of stages.
        took: Per computation, where its time stands in the table of costs.
        send: The same for the time its result needs to the stage that waits for it.
        source: Computation whose result it waits for.
        before: Computation before it on its rank.
        link_before: Computation whose result used the same link before its own.
        rounds: First computation of every round, and the end.
    """

    stages: int
    took: NDArray[np.intp]
    send: NDArray[np.intp]
    source: NDArray[np.intp]
    before: NDArray[np.intp]
    link_before: NDArray[np.intp]
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> _Program:
        """Number the computations in an order that respects their dependencies, round by round."""
        m, stages = schedule.microbatches, schedule.stages
        place = schedule.placement()
        places = [place[s] for s in range(stages)]
        rows = [
            [(a.stage, _KINDS[a.kind], a.microbatch or 0) for action in rank for a in action.leaves]
            for rank in schedule.ranks
        ]
        forward, backward = [-1] * (stages * m), [-1] * (stages * m)
        head, last = [0] * len(rows), [-1] * len(rows)
        links: dict[tuple[int, int], int] = {}
        took: list[int] = []
        send: list[int] = []
        source: list[int] = []
        before: list[int] = []
        link_before: list[int] = []
        rounds = [0]
        while True:
            made: list[tuple[int, int]] = []
            for rank, row in enumerate(rows):
                if head[rank] == len(row):
                    continue
                stage, kind, i = row[head[rank]]
                waits, to, result = -1, -1, -1
                if kind == 0:
                    if stage:
                        waits = forward[(stage - 1) * m + i]
                        if waits < 0:
                            continue
                    to, result = stage + 1, stage * m + i
                elif kind != 2:
                    if stage < stages - 1:
                        waits = backward[(stage + 1) * m + i]
                        if waits < 0:
                            continue
                    to, result = stage - 1, stage * m + i
                head[rank] += 1
                number = len(took)
                took.append(_ENTRIES * stage + kind)
                source.append(waits)
                before.append(last[rank])
                last[rank] = number
                if 0 <= to < stages and places[to] != rank:
                    link = (rank, places[to])
                    send.append(_ENTRIES * stage + (4 if kind == 0 else 5))
                    link_before.append(links.get(link, -1))
                    links[link] = number
                else:
                    send.append(_ENTRIES * stage + 6)
                    link_before.append(-1)
                if result >= 0:
                    made.append((number, result if kind == 0 else ~result))
            if len(took) == rounds[-1]:
                break
            for number, result in made:
                if result >= 0:
                    forward[result] = number
                else:
                    backward[~result] = number
            rounds.append(len(took))
        if any(h < len(row) for h, row in zip(head, rows, strict=True)):
            raise ScheduleError(f"the schedule {schedule.name} deadlocks")
        columns = (took, send, source, before, link_before)
        one, two, three, four, five = (np.array(c, dtype=np.intp) for c in columns)
        return cls(stages, one, two, three, four, five, tuple(rounds))

    def end(self, costs: Sequence[StageCost]) -> int:
        """Nanoseconds until the last computation ends."""
        table = np.array([_entries(c) for c in costs], dtype=np.int64).reshape(-1)
        took, send = table[self.took], table[self.send]
        # Results may arrive later than they are made; without transfers both are the same.
        ends = np.zeros(len(took) + 1, dtype=np.int64)
        arrives = np.zeros(len(took) + 1, dtype=np.int64) if send.any() else ends
        for first, stop in pairwise(self.rounds):
            ready = np.maximum(arrives[self.source[first:stop]], ends[self.before[first:stop]])
            done = ready + took[first:stop]
            ends[first:stop] = done
            if arrives is not ends:
                free = np.maximum(done, arrives[self.link_before[first:stop]])
                sent = send[first:stop]
                arrives[first:stop] = np.where(sent > 0, free + sent, done)
        return int(ends.max())


_KINDS: Final = {"F": 0, "I": 1, "W": 2, "B": 3}
_ENTRIES: Final = 7


def _entries(c: StageCost) -> tuple[int, ...]:
    """Nanoseconds of F, I, W, B, a send forward, a send backward, nothing."""

    def ns(seconds: float) -> int:
        return round(seconds * 1e9)

    return (
        ns(c.forward_s) + ns(c.exposed_forward_s),
        ns(c.input_grad_s) + ns(c.exposed_backward_s),
        ns(c.weight_grad_s),
        ns(c.input_grad_s + c.weight_grad_s) + ns(c.exposed_backward_s),
        ns(c.send_forward_s),
        ns(c.send_backward_s),
        0,
    )
