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
from hyper_parallel.mpmd._replay import replay
from hyper_parallel.mpmd._schedules import make_schedule
from hyper_parallel.mpmd._tasks import action_costs, nanoseconds, on_shared_cores, schedule_tasks


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
        times: Per computation, where its time stands in the table of costs, and that of sending its result to the
            stage that waits for it.
        waits: Per computation, the one whose result it waits for, the one before it on its rank, and the one whose
            result used the same link before its own.
        rounds: First computation of every round, and the end.
    """

    stages: int
    times: NDArray[np.intp]
    waits: NDArray[np.intp]
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> _Program:
        """Number the computations of a schedule round by round."""
        place = schedule.placement()
        made: dict[tuple[int, str, int | None], int] = {}  # who made an output F, a gradient B
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
                    way, step = ("F", 1) if leaf.kind == "F" else ("B", -1)
                    source, made[s, way, i] = made.get((s - step, way, i), -1), number
                    link = rank, place.get(s + step, rank)
                    if link[1] != rank:
                        send = f"SEND_{way}"
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
        """Nanoseconds until the last computation ends."""
        took, send = np.array([_times(c) for c in costs], dtype=np.int64).reshape(-1)[self.times]
        source, before, link_before = self.waits
        # Results may arrive later than they are made; without transfers both are the same.
        ends = np.zeros(len(took) + 1, dtype=np.int64)
        arrives = np.zeros(len(took) + 1, dtype=np.int64) if send.any() else ends
        for first, stop in pairwise(self.rounds):
            now = slice(first, stop)
            ends[now] = done = np.maximum(arrives[source[now]], ends[before[now]]) + took[now]
            if arrives is not ends:
                free = np.maximum(done, arrives[link_before[now]])
                arrives[now] = np.where(send[now] > 0, free + send[now], done)
        return int(ends.max())


_TIMES: Final = ("F", "I", "W", "B", "SEND_F", "SEND_B", "")
"""What has a time on a stage; the last one has none."""


def _times(cost: StageCost) -> list[int]:
    """Nanoseconds of `_TIMES`, exposed collectives included."""
    both = (action_costs(cost)[kind][:2] for kind in _TIMES[:-1])
    return [*(nanoseconds(own) + nanoseconds(exposed) for own, exposed in both), 0]
