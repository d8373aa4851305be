"""Joint schedules of a tower and language stages: all placements run, and work of the tower fills bubbles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Schedule, StageCost
from hyper_parallel.mpmd import (
    TowerLanes,
    check_submodel_schedule,
    forward_part,
    held_bytes,
    rounds_schedule,
    schedule_tasks,
    submodel_bound_s,
    submodel_schedule,
)
from hyper_parallel.sim import simulate

StageCosts = list[StageCost] | list[list[StageCost]]

PLACES = (
    TowerLanes(2, (0, 1)),
    TowerLanes(2, (2,)),
    TowerLanes(2, (1,)),
    TowerLanes(3, (3, 4, 0)),
    TowerLanes(2, (0, 0)),
)


@pytest.mark.parametrize("lanes", PLACES, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_microbatch_has_one_owner_and_lanes_keep_their_limits(
    lanes: TowerLanes, frozen: bool
) -> None:
    for count in (1, 2, 5):
        schedule = submodel_schedule(lanes, count, frozen=frozen)
        owners = lanes.owners(schedule)
        assert [lanes.towers[owner] for owner in owners] == [
            schedule.homes()[0, i] for i in range(count)
        ]
        one = StageCost(1.0, 1.0, 1.0, activation_bytes=1, weight_grad_input_bytes=1)
        held = held_bytes(schedule, [one] * schedule.stages)
        assert all(h <= limit for h, limit in zip(held, lanes.limits(), strict=True))
        check_submodel_schedule(schedule, lanes, frozen)
        forwards = forward_part(schedule, lanes)
        assert {a.kind for row in forwards.compute_only().ranks for a in row} == {"F"}
        assert forwards.homes() == schedule.homes()


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
    with pytest.raises(ScheduleError, match="stage 0 must not compute on lane 1"):
        check_submodel_schedule(other, lanes, frozen=False)
    with pytest.raises(ScheduleError, match="does not match"):
        check_submodel_schedule(schedule, lanes, frozen=True)
    rows = tuple(row[::-1] for row in schedule.compute_only().ranks)
    with pytest.raises(ScheduleError):
        check_submodel_schedule(replace(schedule, ranks=rows), lanes, frozen=False)
    with pytest.raises(ScheduleError, match="number of costs differs"):
        submodel_schedule(lanes, 4, [StageCost(1.0, 0.0, 2.0)])


@pytest.mark.parametrize("lanes", PLACES, ids=str)
def test_no_schedule_is_faster_than_the_bound(lanes: TowerLanes) -> None:
    tower = [StageCost(0.4 * n, 0.0, 0.8 * n) for n in (6, 0, 3, 1)]
    costs = [tower, *[[StageCost(1.0, 1.0, 1.0)] * 4] * lanes.stages]
    bound_s = submodel_bound_s(lanes, 4, costs)
    assert bound_s <= _end(submodel_schedule(lanes, 4, costs), costs)
    if set(lanes.towers) == {0, 1}:  # work fills both lanes evenly
        assert bound_s == pytest.approx((12.0 * 2 + 12.0) / 2)


def test_rounds_take_the_sum_on_shared_ranks_and_overlap_on_others() -> None:
    costs = [StageCost(1.0, 0.0, 2.0), StageCost(1.0, 1.0, 1.0)]
    shared = rounds_schedule(TowerLanes(1, (0,)), 4, costs)
    assert _end(shared, costs) == pytest.approx(4 * 6.0)
    apart = rounds_schedule(TowerLanes(1, (1,)), 4, costs)
    assert 4 * 3.0 < _end(apart, costs) <= 4 * 3.0 + 3.0 + 1.0
    frozen = rounds_schedule(
        TowerLanes(1, (1,)), 4, [StageCost(1.0, 0.0, 0.0), costs[1]], frozen=True
    )
    assert _end(frozen, costs) == pytest.approx(1.0 + 4 * 3.0)
