"""Schedule of one step of a multimodal model: stage 0 is a tower (encoder), the others are language stages.

Ranks of the schedule are called lanes. With p language stages, lane k < p runs stage k + 1. Copies of the tower run on
lanes of the language part, where they fill bubbles, or on lanes of their own. Each microbatch passes through one copy.

A tower whose parameters are sharded over several lanes computes in rounds: each of these lanes computes one microbatch,
at the same place of the order of all actions. So the collectives have one order on all lanes. If a lane has several
ranks of a sharded tower, one of them computes the microbatch, and the others run only the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, ActionKind, Schedule, StageCost, StageGraph
from hyper_parallel.mpmd._assignment import search_by_bound
from hyper_parallel.mpmd._list_schedule import ListScheduler, list_schedule
from hyper_parallel.mpmd._lower import lower
from hyper_parallel.mpmd._tasks import StageCosts, action_times, check_num_costs, cost_rows, nanoseconds, schedule_tasks
from hyper_parallel.mpmd._verify import held_bytes, verify
from hyper_parallel.sim import simulate

AHEAD = 2
"""Microbatches in flight in addition to those of 1F1B, on a lane with the tower, so that encoder work fills bubbles.

In simulation of two lanes, 1 gains nothing over 1F1B. More than 2 need more memory and save at most 5 %.
"""


@dataclass(frozen=True, slots=True)
class TowerLanes:
    """Lanes (ranks of a joint schedule) on which the language stages and the tower (encoder) of a step run.

    Attributes:
        stages: Number p of language stages, which are on lanes 0 to p - 1.
        towers: Lane of each rank of the tower.
        sharded: Whether the parameters of the tower are sharded over several lanes.
        readers: Language stages that read features of the tower, counted from 0; stage 0 is one of them.
    """

    stages: int
    towers: tuple[int, ...]
    sharded: bool = False
    readers: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """Number of lanes."""
        return max(self.stages - 1, *self.towers) + 1

    def graph(self, frozen: bool = False) -> StageGraph:
        """Return the graph of stages: the tower, then the chain of language stages, and edges to later readers."""
        chain = [(s, s + 1) for s in range(self.stages)]
        edges = (*chain, *((0, s + 1) for s in self.readers if s))
        sharded = frozenset({0} if self.sharded else ())
        return StageGraph(edges, frozenset({0} if frozen else ()), frozenset({0}), sharded)

    def limits(self, ahead: int = AHEAD) -> list[int]:
        """Return the maximum number of (stage, microbatch) activations in flight per lane.

        Lanes of the language part have the maximum of 1F1B, other lanes p. Lanes with the tower have `ahead` more, for
        a sharded tower at least ceil((p - 1) / width) + 2: the rounds in flight under 1F1B, and one more.
        """
        p = self.stages
        if self.sharded:
            ahead = max(ahead, -(-(p - 1) // self.width) + 2)
        return [(p - lane if lane < p else p) + ahead * (lane in self.towers) for lane in range(self.count)]

    @property
    def width(self) -> int:
        """Number of microbatches of a round: 1, or the number of lanes of a sharded tower."""
        return len({*self.towers}) if self.sharded else 1

    def padded(self, microbatches: int) -> int:
        """Return the number of microbatches rounded up to whole rounds."""
        return -(-microbatches // self.width) * self.width

    def owners(self, schedule: Schedule) -> list[int]:
        """Return, per microbatch, the index in `towers` of the rank that encodes it; ranks on one lane alternate."""
        homes = schedule.homes()
        turns = dict.fromkeys(self.towers, 0)
        owners = []
        for i in range(schedule.microbatches):
            lane = homes[0, i]
            here = [rank for rank, home in enumerate(self.towers) if home == lane]
            owners.append(here[turns[lane] % len(here)])
            turns[lane] += 1
        return owners


@dataclass(frozen=True, slots=True)
class JointLayout:
    """Assignment of tower (encoder) ranks to lanes (ranks of the schedule) in a joint schedule with the language part.

    A share is one data-parallel rank of the language part, with its own set of lanes. All shares run the same schedule,
    so collectives between ranks of different shares match.

    Attributes:
        lanes: Lanes of one share.
        towers: Tower ranks of each share, in the order of `TowerLanes.towers`; counted from 0 within the tower.
    """

    lanes: TowerLanes
    towers: tuple[tuple[int, ...], ...]

    def place(self, tower_rank: int) -> tuple[int, int]:
        """Return (share, lane) of a tower rank; a share is a data-parallel rank of the language part."""
        share = next(k for k, ranks in enumerate(self.towers) if tower_rank in ranks)
        return share, self.lanes.towers[self.towers[share].index(tower_rank)]

    def owners(self, schedule: Schedule, share: int) -> list[int]:
        """Return, per microbatch of a share, the tower rank that encodes it."""
        return [self.towers[share][k] for k in self.lanes.owners(schedule)]

    def sources(self, schedule: Schedule, tower_rank: int) -> list[tuple[int, int] | None]:
        """Return, per microbatch of a tower rank's share: (share, index) if the rank encodes it, else None."""
        share, _ = self.place(tower_rank)
        owners = self.owners(schedule, share)
        return [(share, i) if rank == tower_rank else None for i, rank in enumerate(owners)]


def submodel_schedule(
    lanes: TowerLanes,
    microbatches: int,
    costs: StageCosts = (),
    *,
    frozen: bool = False,
    ahead: int = AHEAD,
) -> Schedule:
    """Return the fastest of several schedules of tower and language part, verified and with sends and receives.

    The candidates differ in the order of microbatches and in the lanes of the tower's microbatches. List scheduling
    orders the actions within the activations in flight of `TowerLanes.limits`, with each backward split into I (input
    gradient) and W (weight gradient). For a sharded tower, 1F1B with whole backwards is a candidate as well.

    Args:
        lanes: Lanes of tower and language part.
        microbatches: Microbatches of the step.
        costs: Cost of the tower and of each language stage as for `schedule_tasks`; (): equal costs. The tower has no
            input gradient: its whole backward is W.
        frozen: Whether the tower is frozen.
        ahead: Extra activations in flight on lanes with the tower, beyond 1F1B; at least 1.

    Raises:
        ScheduleError: HP320 for a wrong number of costs, or if `microbatches` is not a multiple of `lanes.width`.
    """
    if lanes.padded(microbatches) != microbatches:
        raise ScheduleError(
            "the number of microbatches is not a multiple of the ranks with a shard of the encoder",
            got=f"{microbatches} microbatches",
            allowed=f"a multiple of {lanes.width}",
            hint=f"microbatches={lanes.padded(microbatches)}",
        )
    costs = costs or [StageCost(1.0, 0.0, 2.0), *[StageCost(1.0, 1.0, 1.0)] * lanes.stages]
    check_num_costs(costs, lanes.stages + 1)
    rows = cost_rows(costs, microbatches)
    # One byte per microbatch in flight.
    counted = [[replace(c, activation_bytes=1, weight_grad_input_bytes=1) for c in r] for r in rows]
    limits = lanes.limits(ahead)
    schedule = _fastest_order(lanes, counted, limits, frozen)
    if lanes.sharded:
        bases = (schedule, inline_schedule(lanes, microbatches, frozen=frozen))
        schedule = _fastest_rounds(lanes, bases, counted, limits)
    idle = ((),) * (lanes.count - len(schedule.ranks))  # ranks of the tower without a microbatch
    schedule = replace(schedule, ranks=(*schedule.ranks, *idle))
    lowered = lower(schedule, reduce_grad=False, costs=rows)
    verify(lowered, costs=counted, max_bytes=limits)
    return lowered


def _fastest_order(
    lanes: TowerLanes,
    rows: Sequence[Sequence[StageCost]],
    limits: Sequence[int],
    frozen: bool,
) -> Schedule:
    """Return the fastest compute-only schedule over all tried placements and orders of microbatches.

    In `rows`, an activation has one byte, so `limits` are the maximum numbers of microbatches in flight per lane.
    """
    count, graph = len(rows[0]), lanes.graph(frozen)
    in_turn = list(range(count))
    light = sorted(in_turn, key=lambda i: rows[0][i].forward_s)
    variants = [*product(_homes(lanes, rows), (in_turn, light, light[::-1]))]
    stages = [[lane] * count for lane in range(lanes.stages)]
    schedules: dict[int, Schedule] = {}

    def end(k: int, stop: int | None) -> int | None:
        homes, order = variants[k]
        result = ListScheduler(graph, [homes, *stages], rows).run(order, limits, stop=stop)
        if result is None:
            return None
        schedules[k], end_ns = result
        return end_ns

    done = [replace(c, input_grad_s=0.0, weight_grad_s=0.0) for c in rows[0]] if frozen else rows[0]
    bound = nanoseconds(submodel_bound_s(lanes, count, [done, *rows[1:]]) * (1 - 1e-6))
    best = search_by_bound([bound] * len(variants), end)
    assert best is not None, "without a limit of time, every schedule is finished"
    return schedules[best.position]


def _fastest_rounds(
    lanes: TowerLanes,
    bases: Sequence[Schedule],
    rows: Sequence[Sequence[StageCost]],
    limits: Sequence[int],
) -> Schedule:
    """Return the fastest tried schedule, without sends and receives, of a sharded tower that computes in rounds.

    All `bases` are tried as orders of the language stages, with `lead` and `lag` of 0 and 1 (see `_in_rounds`). 1F1B,
    which is in `bases`, is always within `limits` with both of 0. `rows` are the costs by stage and microbatch,
    `limits` the maximum numbers of microbatches in flight per lane.
    """
    best: tuple[float, Schedule] | None = None
    for base, lead, lag in product(bases, (1, 0), (1, 0)):
        schedule = _in_rounds(lanes, base, rows, lead, lag)
        held = held_bytes(schedule, rows)
        if any(n > limit for n, limit in zip(held, limits, strict=True)):
            continue
        end_s = simulate(schedule_tasks(schedule, rows)).end_s
        if best is None or end_s < best[0]:
            best = end_s, schedule
    assert best is not None, "1F1B stays within the limits"
    return best[1]


def _in_rounds(
    lanes: TowerLanes,
    base: Schedule,
    rows: Sequence[Sequence[StageCost]],
    lead: int,
    lag: int,
) -> Schedule:
    """Return `base` with the tower's actions replaced by rounds, in which each lane of the tower runs one microbatch.

    Rounds are inserted into a total order of all actions, and each lane runs its actions in this order. So the lanes
    cannot deadlock. A forward precedes the first use of its features by `lead` rounds. A backward follows its last
    gradient by `lag` rounds.
    """
    base = replace(base, graph=replace(lanes.graph(not base.is_trained(0)), sharded=frozenset()))
    order: list[tuple[tuple[int, int, int, int], int, Action]] = []
    begins, ends = dict[int, int](), dict[int, int]()
    for lane, times in enumerate(action_times(base, rows)):
        for action, (start, end) in zip(base.ranks[lane], times, strict=True):
            if action.stage:
                order.append(((start, 1, 0, 0), lane, action))
            if action.stage == 1 and action.microbatch is not None and action.kind != "W":
                (begins if action.kind == "F" else ends)[action.microbatch] = start if action.kind == "F" else end
    first_use = sorted(begins, key=begins.__getitem__)
    rounds = [first_use[k : k + lanes.width] for k in range(0, len(first_use), lanes.width)]
    split = any(action.kind == "I" for row in base.ranks for action in row)
    trained: tuple[ActionKind, ...] = ("I", "W") if split else ("B",)
    for n, members in enumerate(rounds):
        starts: dict[ActionKind, int] = {"F": begins[rounds[max(0, n - lead)][0]]}
        if base.is_trained(0):
            last = max(ends[i] for later in rounds[n : n + lag + 1] for i in later)
            starts |= dict.fromkeys(trained, last)
        for position, (kind, time) in enumerate(starts.items()):
            for lane, i in zip(sorted({*lanes.towers}), members, strict=True):
                order.append(((time, 0, position, n), lane, Action(0, kind, i)))
    order.sort(key=lambda entry: entry[0])
    ranks = tuple(tuple(action for _, home, action in order if home == lane) for lane in range(lanes.count))
    return replace(base, ranks=ranks, graph=lanes.graph(not base.is_trained(0)))


def _homes(lanes: TowerLanes, rows: Sequence[Sequence[StageCost]]) -> list[list[int]]:
    """Return the lane of each tower microbatch for each placement to try: round-robin, and least loaded lane."""
    count = len(rows[0])
    in_turn = [lanes.towers[i % len(lanes.towers)] for i in range(count)]
    loads = dict.fromkeys((*range(lanes.stages), *lanes.towers), 0.0)
    for lane, row in enumerate(rows[1:]):
        loads[lane] = sum(map(_seconds, row))
    by_load = [0] * count
    for i in sorted(range(count), key=lambda i: -_seconds(rows[0][i])):
        by_load[i] = lane = min(lanes.towers, key=loads.__getitem__)
        loads[lane] += _seconds(rows[0][i])
    return [in_turn, by_load] if by_load != in_turn else [in_turn]


def _seconds(cost: StageCost) -> float:
    return cost.forward_s + cost.input_grad_s + cost.weight_grad_s


def check_submodel_schedule(schedule: Schedule, lanes: TowerLanes, frozen: bool) -> Schedule:
    """Verify a joint schedule of tower and language part, and return it; add sends and receives if it has none.

    Raises:
        ScheduleError: HP320 for a schedule with other lanes or stages, or that `verify` refuses.
    """
    graph = lanes.graph(frozen)
    if schedule.graph != graph or len(schedule.ranks) != lanes.count:
        raise ScheduleError(
            "the schedule has other ranks or stages than the sub-models",
            got=f"{len(schedule.ranks)} ranks, stages {schedule.graph}",
            allowed=f"{lanes.count} ranks, stages {graph}",
            hint="plan the sub-models again, without this schedule",
        )
    if not schedule.has_communication:
        schedule = lower(schedule.compute_only(), reduce_grad=False)
    verify(schedule)
    homes = schedule.homes()
    used = {lane for (stage, _), lane in homes.items() if not stage}
    if lanes.sharded and used != {*lanes.towers}:
        raise ScheduleError(
            "some ranks with a shard of the encoder compute no microbatch of it",
            got=f"ranks {sorted(used)}",
            allowed=f"ranks {sorted({*lanes.towers})}",
        )
    for (stage, _), lane in homes.items():
        if lane != stage - 1 if stage else lane not in lanes.towers:
            raise ScheduleError(
                f"stage {stage} must not compute on rank {lane}",
                allowed=f"rank {stage - 1}" if stage else [f"rank {tower}" for tower in sorted({*lanes.towers})],
            )
    return schedule


def forward_part(schedule: Schedule, lanes: TowerLanes) -> Schedule:
    """Return the forwards of a joint schedule, with sends and receives; microbatches keep their lanes."""
    # Order by microbatch, because 1F1B may start later microbatches before earlier ones arrive.
    forwards = [sorted((a for a in row if a.kind == "F"), key=lambda a: a.microbatch or 0) for row in schedule.ranks]
    begins = {a: a.stage + (a.microbatch or 0) for row in forwards for a in row}
    together = replace(schedule, ranks=tuple(map(tuple, forwards))).rounds()
    begins |= {a: min(begins[b] for b, _ in others) for a, others in together.items()}
    rows = tuple(tuple(sorted(row, key=lambda a: (begins[a], a.stage, a.microbatch))) for row in forwards)
    graph = replace(lanes.graph(), frozen=frozenset(range(lanes.stages + 1)))
    lowered = lower(replace(schedule, ranks=rows, graph=graph), reduce_grad=False)
    verify(lowered)
    return lowered


def rounds_schedule(lanes: TowerLanes, microbatches: int, costs: StageCosts, *, frozen: bool = False) -> Schedule:
    """Return a compute-only schedule, for simulation only, of a tower that encodes in rounds.

    In a round, every rank of the tower encodes one microbatch. Backwards are whole. A lane has at most max(2, n)
    activations in flight, where n is its limit in `lanes.limits(1)`.

    Args:
        lanes: Lanes with one entry in `towers`, which stands for all tower ranks.
        microbatches: Microbatches of each language rank.
        costs: As for `submodel_schedule`; the cost of the tower is per microbatch of the language part.
        frozen: Whether the tower is frozen.
    """
    homes = [[lane] * microbatches for lane in (*lanes.towers, *range(lanes.stages))]
    rows = cost_rows(costs, microbatches)
    counted = [[replace(c, activation_bytes=1, weight_grad_input_bytes=0) for c in r] for r in rows]
    limits = lanes.limits(1)
    return list_schedule(lanes.graph(frozen), homes, counted, max_bytes=[max(2, n) for n in limits], split=False)


def inline_schedule(lanes: TowerLanes, microbatches: int, *, frozen: bool = False) -> Schedule:
    """Return compute-only 1F1B of the language part, with the tower's forward before each forward of lane 0.

    The backward of a tower that is not frozen follows each backward of lane 0.
    """

    def passes(lane: int, kind: Literal["F", "B"], i: int) -> list[Action]:
        tower = [Action(0, kind, i)] if lane == 0 and (kind == "F" or not frozen) else []
        own = [Action(lane + 1, kind, i)]
        return tower + own if kind == "F" else own + tower

    rows = []
    for lane in range(lanes.stages):
        ahead = min(microbatches, lanes.stages - lane)
        row = [a for i in range(ahead) for a in passes(lane, "F", i)]
        for i in range(microbatches):
            row += passes(lane, "B", i)
            row += passes(lane, "F", i + ahead) if i + ahead < microbatches else []
        rows.append(tuple(row))
    return Schedule("1f1b", lanes.stages + 1, microbatches, tuple(rows), lanes.graph(frozen))


def submodel_bound_s(lanes: TowerLanes, microbatches: int, costs: StageCosts) -> float:
    """Return a lower bound of the seconds of a step, for any placement and order of the tower's microbatches.

    Args:
        lanes: Lanes of the parts.
        microbatches: Microbatches of the step.
        costs: As for `submodel_schedule`; for a frozen tower, with 0 seconds of both gradients.
    """
    rows = cost_rows(costs, microbatches)
    loads = dict.fromkeys(range(lanes.count), 0.0)
    for lane, row in enumerate(rows[1:]):
        loads[lane] = sum(map(_seconds, row))
    # The tower's work raises the least loaded lanes to one level.
    free = sorted(loads[lane] for lane in {*lanes.towers})
    work = sum(map(_seconds, rows[0]))
    levels = [(sum(free[:k]) + work) / k for k in range(1, len(free) + 1)]
    level = next(level for level, above in zip(levels, [*free[1:], float("inf")], strict=True) if level <= above)
    chains = (sum(row[i].forward_s + row[i].input_grad_s for row in rows) for i in range(microbatches))
    return max(level, *loads.values(), *chains)
