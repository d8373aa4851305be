"""Makespan of a schedule as a longest path: the times of `simulate(schedule_tasks(...))`, without spans and faster.

The search evaluates many plans. A schedule without gathers and offload is a fixed graph: a computation waits for its
predecessor on the rank and for one result of a neighbouring stage; a transfer waits for its predecessor on the link.
End times are longest paths, evaluated for all ranks at once, one computation per rank and round.
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
from hyper_parallel.ir import Schedule, StageCost
from hyper_parallel.mpmd._replay import replay
from hyper_parallel.mpmd._schedules import make_schedule
from hyper_parallel.mpmd._tasks import action_costs, nanoseconds, on_shared_cores, schedule_tasks
from hyper_parallel.sim import simulate


def makespan_s(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    costs: Sequence[StageCost],
    pace: Sequence[float] = (),
) -> float:
    """Return the seconds from the first forward to the end of the last backward of any rank.

    Args:
        name: Schedule, one of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches of a step.
        stages_per_rank: Virtual stages of a rank.
        costs: One per stage. Gathers, reductions, offload and the update are not counted.
        pace: Relative speed of a rank while 1, 2, ... ranks are busy; events are simulated unless all are 1.

    Raises:
        ScheduleError: HP320 for an illegal schedule, or when the number of costs is not the number of stages.

    Cost: about 2 x microbatches x stages_per_rank rounds of numpy work; schedules are cached.
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
    """Schedule as arrays, computations sorted by round: a computation waits only for earlier rounds.

    An index of -1 means "none": it addresses a last entry that is always 0.

    Attributes:
        stages: Number of stages.
        times: [2, computations]: index into the flat cost table of the computation, and of sending its result.
        waits: [3, computations]: producer of its input, predecessor on its rank, predecessor on the link of its result.
        rounds: First computation of every round, and the number of computations.
    """

    stages: int
    times: NDArray[np.intp]
    waits: NDArray[np.intp]
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> _Program:
        """Build the arrays: number the computations of a schedule round by round."""
        homes = schedule.homes()
        # Producer of an output (F) or a gradient (B); the stages of a preset form a chain.
        producer: dict[tuple[int, str, int | None], int] = {}
        on_rank: dict[int, int] = {}
        on_link: dict[tuple[int, int], int] = {}
        round_of = {-1: -1}
        rows: list[tuple[int, ...]] = []
        for rank, position in replay(schedule):
            for leaf in schedule.ranks[rank][position].leaves:
                number, s, i = len(rows), leaf.stage, leaf.microbatch
                send, source, link_before = "", -1, -1
                before, on_rank[rank] = on_rank.get(rank, -1), number
                if leaf.kind != "W":
                    direction = "F" if leaf.kind == "F" else "B"
                    for other in schedule.inputs(leaf):
                        source = producer[other, direction, i]
                    producer[s, direction, i] = number
                    for result in schedule.messages(leaf):
                        link = rank, homes[result.peer.stage, i]
                        if link[1] != rank:
                            send = result.kind
                            link_before, on_link[link] = on_link.get(link, -1), number
                times = [len(_TIMES) * s + _TIMES.index(kind) for kind in (leaf.kind, send)]
                rows.append((*times, source, before, link_before))
                round_of[number] = 1 + max(round_of[source], round_of[before])
        rounds = np.array([round_of[n] for n in range(len(rows))])
        order = np.argsort(rounds, kind="stable")
        moved = np.append(np.argsort(order), -1)
        table = np.array(rows, dtype=np.intp)[order].T
        stops = np.cumsum(np.bincount(rounds)).tolist()
        return cls(schedule.stages, table[:2], moved[table[2:]], (0, *stops))

    def end(self, costs: Sequence[StageCost]) -> int:
        """Return the nanoseconds until the last computation ends."""
        duration, send = np.array([_times(c) for c in costs], dtype=np.int64).reshape(-1)[
            self.times
        ]
        source, before, link_before = self.waits
        # With transfers, a result arrives after its computation ends; without, both times are equal.
        ends = np.zeros(len(duration) + 1, dtype=np.int64)
        arrives = np.zeros(len(duration) + 1, dtype=np.int64) if send.any() else ends
        for first, stop in pairwise(self.rounds):
            now = slice(first, stop)
            ends[now] = done = np.maximum(arrives[source[now]], ends[before[now]]) + duration[now]
            if arrives is not ends:
                free = np.maximum(done, arrives[link_before[now]])
                arrives[now] = np.where(send[now] > 0, free + send[now], done)
        return int(ends.max())


_TIMES: Final = ("F", "I", "W", "B", "SEND_F", "SEND_B", "")
"""Kinds with a time per stage; the last entry stands for no transfer."""


def _times(cost: StageCost) -> list[int]:
    """Return the nanoseconds of each entry of `_TIMES`, exposed collectives included."""
    both = (action_costs(cost)[kind][:2] for kind in _TIMES[:-1])
    return [*(nanoseconds(own) + nanoseconds(exposed) for own, exposed in both), 0]
