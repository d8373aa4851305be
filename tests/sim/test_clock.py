"""The forms of the clock against the event-driven reference, and shared resources against hand-made times."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import TaskGraphError
from hyper_parallel.ir import Task, TaskGraph
from hyper_parallel.sim import LaneProgram, Schedule, simulate

pytestmark = pytest.mark.unit

LANES = ("compute", "communication")


@st.composite
def chains(draw):
    """Tasks of two lanes of which each waits for a task of one of some chains, as parts of a batch do."""
    num_chains, tasks, last = draw(st.integers(1, 3)), [], {}
    for number in range(draw(st.integers(1, 16))):
        chain = draw(st.integers(0, num_chains - 1))
        deps = (last[chain],) if chain in last else ()
        tasks.append((draw(st.integers(0, 1)), deps, draw(st.integers(0, 2000))))
        last[chain] = number
    return tasks


@settings(deadline=None)
@given(chains(), st.sampled_from([Fraction(0), Fraction(1, 5), Fraction(1)]))
def test_the_forms_of_the_clock_agree(tasks, demand):
    demands = ((("cores", Fraction(1)),), (("cores", demand),))
    named = (
        Task(str(n), LANES[lane], ns, deps=deps, demands=demands[lane])
        for n, (lane, deps, ns) in enumerate(tasks)
    )
    graph = TaskGraph(tuple(named), capacities={"cores": Fraction(1)})
    program = LaneProgram(
        (*(lane for lane, _, _ in tasks), 0, 1),
        (*(deps for _, deps, _ in tasks), (), ()),
        (*range(len(tasks)), len(tasks), len(tasks)),
    )
    durations = [np.array([float(ns), 0.0]) for _, _, ns in tasks] + [np.zeros(2)]
    contended = program.contended_span(durations, float(demand))
    # The reference rounds up to whole nanoseconds at every event.
    assert simulate(graph).end_s * 1e9 == pytest.approx(contended[0], abs=len(tasks) + 1)
    assert contended[1] == 0.0

    schedule, ends = Schedule(), []
    for lane, deps, ns in tasks:
        ends.append(schedule.append(LANES[lane], ns, [ends[d] for d in deps]) + ns)
    assert max(ends) == program.span(durations)[0][0]


def test_a_task_runs_at_the_least_rate_of_its_resources():
    def task(lane, ns, **demands):
        return Task(lane, lane, ns, demands=tuple((k, Fraction(v)) for k, v in demands.items()))

    capacities = {"cores": Fraction(4), "memory": Fraction(10)}
    graph = TaskGraph(
        (task("a", 100, cores=4), task("b", 100, cores=4, memory=5), task("c", 100, memory=15)),
        capacities=capacities,
    )
    # a and b halve the cores, b and c the memory: all run at 1/2 until 200.
    assert [s.end_s for s in simulate(graph).spans] == pytest.approx([200e-9] * 3)
    alone = TaskGraph((task("c", 100, memory=15),), capacities=capacities)
    assert simulate(alone).end_s == pytest.approx(150e-9)


def test_an_impossible_demand_is_refused():
    task = Task("a", "a", 1, demands=(("link", Fraction(1)),))
    with pytest.raises(TaskGraphError, match="HP321"):
        TaskGraph((task,), capacities={"cores": Fraction(1)})


def test_a_held_lane_starts_later():
    schedule = Schedule()
    schedule.append("compute", 5)
    assert schedule.hold("compute", 8) == 3
    assert schedule.append("compute", 1) == 8
    assert schedule.free["communication"] == 0
