"""The page on pipelines shows what the code prints."""

from pathlib import Path

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Schedule, grid
from hyper_parallel.mpmd import (
    SCHEDULES,
    StageCost,
    bubble_fraction,
    in_flight,
    make_schedule,
    schedule_tasks,
    unit_starts,
    verify,
)
from hyper_parallel.sim import simulate

pytestmark = pytest.mark.unit
PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "pipelines.md").read_text()


def test_the_grid_of_the_page():
    schedule = make_schedule("zb_h1", ranks=3, microbatches=5)
    assert grid(schedule, rows="ranks", starts=unit_starts(schedule)) in PAGE


def test_the_error_of_the_page():
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "mine.csv"))
    assert "\n".join(caught.value.render().splitlines()[:5]) in PAGE


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_the_simulated_table_of_the_page(p, m):
    cells = []
    for name in SCHEDULES:
        schedule = make_schedule(name, p, m)
        v = schedule.stages // p
        costs = [StageCost(1 / v, 1 / v, 1 / v)] * schedule.stages
        idle = bubble_fraction(simulate(schedule_tasks(schedule, costs)))
        cells.append(f"{100 * idle:.1f} %, {max(in_flight(schedule)) / v:g}")
    # The page lists interleaved before zb_h1, as SCHEDULES does.
    assert f"| p={p}, m={m} | {' | '.join(cells)} |" in PAGE
