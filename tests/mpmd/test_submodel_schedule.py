"""Joint schedules of a tower and language stages: all placements run, and work of the tower fills bubbles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule, StageCost
from hyper_parallel.mpmd import (
    TowerLanes,
    check_submodel_schedule,
    forward_part,
    held_bytes,
    rounds_schedule,
    schedule_tasks,
    submodel_bound_s,
    submodel_schedule,
    verify,
)
from hyper_parallel.sim import simulate

StageCosts = list[StageCost] | list[list[StageCost]]

PLACES = (
    TowerLanes(2, (0, 1)),
    TowerLanes(2, (2,)),
    TowerLanes(2, (1,)),
    TowerLanes(3, (3, 4, 0)),
    TowerLanes(2, (0, 0)),
    TowerLanes(2, (0, 1), readers=(0, 1)),
    TowerLanes(2, (0, 1), sharded=True),
    TowerLanes(3, (0, 2, 3), sharded=True, readers=(0, 2)),
    TowerLanes(2, (0, 0, 1, 1), sharded=True),
    TowerLanes(2, (0, 0, 1), sharded=True),
)


@pytest.mark.parametrize("lanes", PLACES, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_microbatch_has_one_owner_and_lanes_keep_their_limits(lanes: TowerLanes, frozen: bool) -> None:
    for count in sorted({lanes.padded(n) for n in (1, 2, 5)}):
        schedule = submodel_schedule(lanes, count, frozen=frozen)
        owners = lanes.owners(schedule)
        assert [lanes.towers[owner] for owner in owners] == [schedule.homes()[0, i] for i in range(count)]
        one = StageCost(1.0, 1.0, 1.0, activation_bytes=1, weight_grad_input_bytes=1)
        held = held_bytes(schedule, [one] * schedule.stages)
        assert all(h <= limit for h, limit in zip(held, lanes.limits(), strict=True))
        check_submodel_schedule(schedule, lanes, frozen)
        forwards = forward_part(schedule, lanes)
        assert {a.kind for row in forwards.compute_only().ranks for a in row} == {"F"}
        if lanes.sharded:
            for one in (schedule, forwards):
                kinds = {tuple(_tower_kinds(one, lane)) for lane in lanes.towers}
                assert len(kinds) == 1
        assert forwards.homes() == schedule.homes()


def _tower_kinds(schedule: Schedule, lane: int) -> list[str]:
    return [a.kind for a in schedule.compute_only().ranks[lane] if not a.stage]


def test_a_sharded_tower_needs_one_order_of_its_passes_on_all_lanes() -> None:
    """Orders that would wait for each other in collectives are refused; copies without collectives may have them."""
    rows = (
        "0F0 0F2 1F0 1F1 1B0 1B1 0B0 1F2 1F3 1B2 1B3 0B2",
        "0F1 0F3 2F0 2B0 2F1 2B1 0B1 2F2 2B2 2F3 2B3 0B3",
    )
    swapped = (rows[0], "0F1 2F0 2B0 2F1 2B1 0B1 0F3 2F2 2B2 2F3 2B3 0B3")
    late = (rows[0], "2F0 2B0 0F1 0F3 2F1 2B1 0B1 2F2 2B2 2F3 2B3 0B3")
    early = ("0F0 0F2 1F0 1F1 1B0 0B0 1B1 1F2 1F3 1B2 1B3 0B2", rows[1])

    def schedule(rows: tuple[str, ...], lanes: TowerLanes) -> Schedule:
        ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
        return Schedule("mine", 3, 4, ranks, lanes.graph())

    copied, sharded = (TowerLanes(2, (0, 1), sharded=s) for s in (False, True))
    check_submodel_schedule(schedule(rows, sharded), sharded, frozen=False)
    for wrong, match in (
        (swapped, "runs together with"),
        (late, "deadlocks"),
        (early, "0B0 waits for 1B1"),
    ):
        check_submodel_schedule(schedule(wrong, copied), copied, frozen=False)
        with pytest.raises(ScheduleError, match=match):
            verify(schedule(wrong, sharded))
    uneven = ("0F0 0F1 1F0 1B0 1F1 1B1 1F2 1B2", "0F2")
    one = TowerLanes(1, (0, 1), sharded=True)
    graph = one.graph(frozen=True)
    with pytest.raises(ScheduleError, match="has no computation for 0F1"):
        verify(replace(schedule(uneven, one), stages=2, microbatches=3, graph=graph))
    alone = schedule(("0F0 1F0 1B0 0F1 1F1 1B1", ""), one)
    with pytest.raises(ScheduleError, match="some ranks with a shard of the encoder compute no microbatch"):
        check_submodel_schedule(replace(alone, stages=2, microbatches=2, graph=graph), one, frozen=True)
    with pytest.raises(ScheduleError, match="is not a multiple of the ranks with a shard of the encoder"):
        submodel_schedule(sharded, 3)
    text = schedule(rows, sharded).to_csv(extended=True)
    assert Schedule.from_csv(text, "mine") == schedule(rows, sharded)


def test_rounds_of_a_sharded_tower_take_the_time_of_the_longest_microbatch() -> None:
    lanes = TowerLanes(1, (0, 1), sharded=True)
    costs = [[StageCost(1.0, 0.0, 0.0), StageCost(3.0, 0.0, 0.0)], [StageCost(1.0, 0.0, 0.0)] * 2]
    assert _end(submodel_schedule(lanes, 2, costs, frozen=True), costs) == pytest.approx(5.0)


def _end(schedule: Schedule, costs: StageCosts) -> float:
    return simulate(schedule_tasks(schedule, costs)).end_s


def test_copies_of_the_tower_balance_unequal_microbatches() -> None:
    """On two lanes, the step is within 12 % of all work on both lanes, whatever the images."""
    lanes = TowerLanes(2, (0, 1))
    for images in ((6, 0, 3, 1, 8, 2), (0, 0, 9, 1, 1, 5)):
        tower = [StageCost(0.4 * n, 0.0, 0.8 * n) for n in images]
        costs = [tower, *[[StageCost(1.0, 1.0, 1.0)] * 6] * 2]
        work = sum(c.forward_s + c.input_grad_s + c.weight_grad_s for row in costs for c in row)
        known = _end(submodel_schedule(lanes, 6, costs), costs)
        assert known <= work / 2 * 1.12
        assert known < _end(submodel_schedule(lanes, 6), costs)


def test_schedules_that_lanes_cannot_run_are_refused() -> None:
    lanes = TowerLanes(2, (0,))
    schedule = submodel_schedule(lanes, 4)
    other = submodel_schedule(TowerLanes(2, (1,)), 4)
    with pytest.raises(ScheduleError, match="stage 0 must not compute on rank 1"):
        check_submodel_schedule(other, lanes, frozen=False)
    with pytest.raises(ScheduleError, match="other ranks or stages than the sub-models"):
        check_submodel_schedule(schedule, lanes, frozen=True)
    rows = tuple(row[::-1] for row in schedule.compute_only().ranks)
    with pytest.raises(ScheduleError):
        check_submodel_schedule(replace(schedule, ranks=rows), lanes, frozen=False)
    with pytest.raises(ScheduleError, match="number of costs differs"):
        submodel_schedule(lanes, 4, [StageCost(1.0, 0.0, 2.0)])


@pytest.mark.parametrize("lanes", PLACES, ids=str)
def test_no_schedule_is_faster_than_the_bound(lanes: TowerLanes) -> None:
    count = lanes.padded(4)
    tower = [StageCost(0.4 * n, 0.0, 0.8 * n) for n in (6, 0, 3, 1, 2, 4)[:count]]
    costs = [tower, *[[StageCost(1.0, 1.0, 1.0)] * count] * lanes.stages]
    bound_s = submodel_bound_s(lanes, count, costs)
    assert bound_s <= _end(submodel_schedule(lanes, count, costs), costs)
    if set(lanes.towers) == {0, 1}:  # work fills both lanes evenly
        assert bound_s == pytest.approx((12.0 * 2 + 12.0) / 2)


def test_rounds_take_the_sum_on_shared_ranks_and_overlap_on_others() -> None:
    costs = [StageCost(1.0, 0.0, 2.0), StageCost(1.0, 1.0, 1.0)]
    shared = rounds_schedule(TowerLanes(1, (0,)), 4, costs)
    assert _end(shared, costs) == pytest.approx(4 * 6.0)
    apart = rounds_schedule(TowerLanes(1, (1,)), 4, costs)
    assert 4 * 3.0 < _end(apart, costs) <= 4 * 3.0 + 3.0 + 1.0
    frozen = rounds_schedule(TowerLanes(1, (1,)), 4, [StageCost(1.0, 0.0, 0.0), costs[1]], frozen=True)
    assert _end(frozen, costs) == pytest.approx(1.0 + 4 * 3.0)
