"""The fast makespan against the event simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ScheduleError
from hyper_parallel.mpmd import (
    SCHEDULES,
    StageCost,
    is_legal,
    make_schedule,
    makespan_s,
    schedule_tasks,
)
from hyper_parallel.sim import simulate

pytestmark = pytest.mark.unit


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 14),
    chunks=st.integers(1, 3),
    data=st.data(),
)
def test_makespan_is_the_end_of_the_simulation(name, ranks, microbatches, chunks, data):
    v = 2 if name in ("zbv", "dualpipev") else chunks if name == "interleaved_1f1b" else 1
    if not is_legal(name, ranks, microbatches):
        return
    nanoseconds = st.integers(0, 9).map(lambda n: n * 1e-9)
    costs = [
        StageCost(
            *(data.draw(nanoseconds) + 1e-9 for _ in range(3)),
            send_forward_s=data.draw(nanoseconds),
            send_backward_s=data.draw(nanoseconds),
            exposed_forward_s=data.draw(nanoseconds),
            exposed_backward_s=data.draw(nanoseconds),
        )
        for _ in range(ranks * v)
    ]
    timeline = simulate(schedule_tasks(make_schedule(name, ranks, microbatches, v), costs))
    end = max(s.end_s for s in timeline.spans if not s.lane.startswith("link"))
    assert makespan_s(name, ranks, microbatches, v, costs) == pytest.approx(end, abs=1e-12)


def test_costs_must_match_the_stages():
    with pytest.raises(ScheduleError, match="number of costs differs"):
        makespan_s("1f1b", 2, 2, 1, [StageCost(1, 1, 1)])


def test_exposed_collectives_block_the_rank():
    cost = StageCost(2e-9, 1e-9, 1e-9, exposed_forward_s=3e-9, exposed_backward_s=1e-9)
    timeline = simulate(schedule_tasks(make_schedule("1f1b", 1, 2), [cost]))
    assert round(timeline.end_s * 1e9) == 2 * (2 + 3 + 2 + 1)
    assert {s.lane for s in timeline.spans} == {"rank 0/compute", "rank 0/communication"}
