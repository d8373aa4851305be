"""The forms of the clock agree with each other, and with an exact reference for a shared resource."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import Task, TaskGraph
from hyper_parallel.sim import LaneProgram, Schedule, simulate
from tests.sim.contended_lanes import contended_end

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
    graph = TaskGraph(tuple(Task(str(n), LANES[lane], ns, deps=deps) for n, (lane, deps, ns) in enumerate(tasks)))
    program = LaneProgram(
        (*(lane for lane, _, _ in tasks), 0, 1),
        (*(deps for _, deps, _ in tasks), (), ()),
        (*range(len(tasks)), len(tasks), len(tasks)),
    )
    durations = [np.array([float(ns), 0.0]) for _, _, ns in tasks] + [np.zeros(2)]
    contended = program.contended_span(durations, float(demand))
    assert contended[0] == pytest.approx(float(contended_end(tasks, demand)))
    assert contended[1] == 0.0

    schedule, ends = Schedule(), []
    for lane, deps, ns in tasks:
        ends.append(schedule.append(LANES[lane], ns, [ends[d] for d in deps]) + ns)
    assert max(ends) == program.span(durations)[0][0] == round(simulate(graph).end_s * 1e9)


def test_a_held_lane_starts_later():
    schedule = Schedule()
    schedule.append("compute", 5)
    assert schedule.hold("compute", 8) == 3
    assert schedule.append("compute", 1) == 8
    assert schedule.free["communication"] == 0
