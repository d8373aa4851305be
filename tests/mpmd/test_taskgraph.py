"""The simulator against a fixed-point computation, its memory counters, and its speed."""

import gc
import itertools
import json
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ScheduleError, TaskGraphError
from hyper_parallel.ir import Cores, Counter, Schedule, Task, TaskGraph
from hyper_parallel.mpmd import (
    StageCost,
    bubble_fraction,
    lower,
    make_schedule,
    makespan_s,
    on_shared_cores,
    schedule_tasks,
)
from hyper_parallel.serde import decode, encode
from hyper_parallel.sim import peaks, simulate

pytestmark = pytest.mark.unit


@st.composite
def _graphs(draw, policies=("order",)):
    tasks = []
    for number in range(draw(st.integers(1, 25))):
        deps = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        tasks.append(
            Task(
                str(number),
                f"lane {draw(st.integers(0, 3))}",
                draw(st.integers(0, 9)),
                deps=tuple(sorted(deps)),
                priority=draw(st.integers(0, 2)),
            )
        )
    chosen = {f"lane {i}": draw(st.sampled_from(policies)) for i in range(4)}
    return TaskGraph(tuple(tasks), chosen)


def _even(count, lanes):
    """So many cores without anything else to share: while k work, each works at the rate min(1, count / k)."""
    return Cores(tuple(min(Fraction(1), count / k) for k in range(1, len(lanes) + 1)), lanes)


def _starts(timeline):
    return {int(s.name): round(s.start_s * 1e9) for s in timeline.spans}


@settings(deadline=None)
@given(_graphs())
def test_executors_in_order_give_the_longest_path(graph):
    """Start = latest end of the dependencies and of the task before it on the executor, iterated with numpy."""
    n = len(graph.tasks)
    before = np.zeros((n, n), dtype=bool)
    last = {}
    for number, task in enumerate(graph.tasks):
        before[number, list(task.deps)] = True
        if task.executor in last:
            before[number, last[task.executor]] = True
        last[task.executor] = number
    durations = np.array([t.duration_ns for t in graph.tasks])
    starts = np.zeros(n, dtype=int)
    for _ in range(n):
        starts = np.where(before, starts + durations, 0).max(axis=1)
    assert _starts(simulate(graph)) == dict(enumerate(starts.tolist()))


@settings(deadline=None)
@given(_graphs(("order", "priority")))
def test_any_policy_respects_the_graph_and_never_idles_without_reason(graph):
    starts = _starts(simulate(graph))
    ends = {k: starts[k] + t.duration_ns for k, t in enumerate(graph.tasks)}
    for number, task in enumerate(graph.tasks):
        ready = max((ends[d] for d in task.deps), default=0)
        assert starts[number] >= ready
        same = [k for k, t in enumerate(graph.tasks) if t.executor == task.executor and k != number]
        for k in same:
            assert ends[k] <= starts[number] or ends[number] <= starts[k]
        if graph.policies[task.executor] == "priority":
            # Ready tasks wait only while their executor is busy.
            waited = (max(0, min(ends[k], starts[number]) - max(starts[k], ready)) for k in same)
            assert sum(waited) == starts[number] - ready


def test_priority_takes_the_most_urgent_ready_task():
    tasks = (
        Task("first", "gpu", 5, priority=9),
        Task("signal", "cpu", 3),
        Task("low", "gpu", 1, priority=2),
        Task("high", "gpu", 1, deps=(1,), priority=1),
    )
    timeline = simulate(TaskGraph(tasks, {"gpu": "priority"}))
    assert {s.name: round(s.start_s * 1e9) for s in timeline.spans} == {
        "low": 0,
        "signal": 0,
        "first": 1,
        "high": 6,
    }


def test_memory_released_at_an_instant_is_free_for_what_starts_then():
    tasks = (
        Task("a", "gpu", 2, at_start=(("hbm", 100),), at_end=(("hbm", -100), ("host", 100))),
        Task("b", "gpu", 2, at_start=(("hbm", 60),)),
    )
    timeline = simulate(TaskGraph(tasks, initial_bytes={"hbm": 7}))
    assert timeline.kind == "simulated"
    assert timeline.counters == (
        Counter("hbm", 0.0, 7),
        Counter("hbm", 0.0, 107),
        Counter("hbm", 2e-9, 7),
        Counter("host", 2e-9, 100),
        Counter("hbm", 2e-9, 67),
    )
    assert peaks(timeline) == {"hbm": 107, "host": 100}


def test_a_graph_out_of_order_is_refused():
    with pytest.raises(TaskGraphError, match="task 0 `a` depends on task 1"):
        TaskGraph((Task("a", "x", 1, deps=(1,)), Task("b", "x", 1)))
    with pytest.raises(TaskGraphError, match="depends on task 0, which is not listed before it"):
        TaskGraph((Task("a", "x", 1, deps=(0,)),))
    with pytest.raises(TaskGraphError, match="negative duration"):
        TaskGraph((Task("a", "x", -1),))


def test_transfers_lengthen_the_fill_and_wait_for_their_link():
    """GPipe on two ranks: with a link slower than the stage, the link sets the pace."""
    schedule = make_schedule("gpipe", 2, 4)
    cost = StageCost(2e-9, 1e-9, 1e-9, send_forward_s=3e-9, send_backward_s=1e-9)
    timeline = simulate(schedule_tasks(schedule, [cost] * 2))
    ends = {s.name: round(s.end_s * 1e9) for s in timeline.spans}
    assert [ends[f"0SEND_F{i}"] for i in range(4)] == [5, 8, 11, 14]
    assert ends["1F3"] == 16
    # Then four backwards of 2 on rank 1, the last gradient over the link, and its backward on rank 0.
    assert round(timeline.end_s * 1e9) == 16 + 8 + 1 + 2
    assert bubble_fraction(timeline) == pytest.approx(1 - 32 / (2 * 27))


def test_memory_of_a_schedule_follows_activations():
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=100, weight_grad_input_bytes=40)
    one = simulate(schedule_tasks(make_schedule("1f1b", 4, 8), [cost] * 4))
    assert peaks(one) == {f"rank {r}/device": 100 * (4 - r) for r in range(4)}
    split = simulate(schedule_tasks(make_schedule("zb_h1", 4, 8), [cost] * 4))
    # The last rank puts three weight gradients off, each keeping 40.
    assert peaks(split)["rank 3/device"] == 3 * 40 + 100
    assert {s.lane: s.value for s in split.counters} == {f"rank {r}/device": 0 for r in range(4)}


def test_parameters_are_gathered_before_use_and_freed():
    cost = StageCost(1.0, 1.0, 1.0, unshard_s=0.25, reduce_grad_s=0.5, parameter_bytes=10)
    lowered = lower(make_schedule("interleaved_1f1b", 2, 4, 4), unshard=True, max_unsharded=2)
    timeline = simulate(schedule_tasks(lowered, [cost] * 8))
    assert peaks(timeline) == {"rank 0/device": 20, "rank 1/device": 20}
    spans = {}
    for s in timeline.spans:
        spans.setdefault(s.name, s)
    for stage in range(8):
        assert spans[f"{stage}F0"].start_s >= spans[f"{stage}UNSHARD"].end_s
        last = max(s.end_s for s in timeline.spans if s.name.startswith(f"{stage}B"))
        assert spans[f"{stage}REDUCE_GRAD"].start_s >= last


def test_costs_must_match_the_stages():
    with pytest.raises(ScheduleError, match="number of costs differs"):
        schedule_tasks(make_schedule("1f1b", 2, 2), [StageCost(1, 1, 1)])


def test_time_is_exact_however_long_the_run():
    tasks = tuple(Task(str(i), "gpu", 100_000_001) for i in range(20_000))
    assert simulate(TaskGraph(tasks)).end_s == 20_000 * 100_000_001 / 1e9


@pytest.mark.slow
def test_a_large_schedule_simulates_quickly():
    """64 ranks x 8 stages: time per task at 64 microbatches against 4; anything quadratic would be 16 times."""

    def seconds_per_task(m):
        schedule = make_schedule("interleaved_1f1b", 64, m, 8)
        graph = schedule_tasks(schedule, [StageCost(1e-3, 1e-3, 1e-3)] * schedule.stages)
        best = float("inf")
        for _ in range(2):
            gc.collect()
            begin = time.process_time()
            simulate(graph)
            best = min(best, time.process_time() - begin)
        return best / len(graph.tasks)

    small, large = seconds_per_task(4), seconds_per_task(64)
    assert large < 4 * small + 1e-5


def test_json_round_trip():
    cost = StageCost(1.0, 1.0, 1.0, send_forward_s=0.1, activation_bytes=8)
    graph = schedule_tasks(make_schedule("1f1b", 2, 3), [cost] * 2)
    assert decode(TaskGraph, json.loads(json.dumps(encode(graph)))) == graph
    schedule = make_schedule("dualpipev", 2, 5)
    assert decode(Schedule, json.loads(json.dumps(encode(schedule)))) == schedule


def test_tasks_on_shared_cores_slow_each_other_by_hand():
    """Two cores and works of 2, 4 and 6: all three run at 2/3 until 3, the other two alone; a copy is not slowed."""
    tasks = (
        Task("a", "rank 0", 2), Task("b", "rank 1", 4), Task("c", "rank 2", 6), Task("copy", "link", 5),
        Task("after", "rank 0", 1, deps=(3,)),
    )  # fmt: skip
    lanes = frozenset({"rank 0", "rank 1", "rank 2"})
    ends = {s.name: round(s.end_s * 1e9) for s in simulate(TaskGraph(tasks, cores=_even(Fraction(2), lanes))).spans}
    # From 3 on b and c have a core each: b ends at 5. Then `after` and c run, to 6 and 7.
    assert ends == {"a": 3, "b": 5, "copy": 5, "after": 6, "c": 7}


@settings(deadline=None)
@given(_graphs(("order", "priority")), st.integers(1, 8))
def test_shared_cores_are_never_idle_beside_waiting_work(graph, quarters):
    """Work done equals what the cores give while tasks run; as many cores as executors change nothing."""
    lanes = frozenset(t.executor for t in graph.tasks)
    assert simulate(replace(graph, cores=_even(Fraction(4), lanes))) == simulate(graph)
    coarse = replace(graph, tasks=tuple(replace(t, duration_ns=t.duration_ns * 1_000_000) for t in graph.tasks))
    count = Fraction(quarters, 4)
    timeline = simulate(replace(coarse, cores=_even(count, lanes)))
    assert timeline == simulate(replace(coarse, cores=_even(count, lanes)))
    instants = sorted({round(x * 1e9) for s in timeline.spans for x in (s.start_s, s.end_s)})
    given_ns = Fraction(0)
    for start, stop in itertools.pairwise(instants):
        running = sum(s.start_s * 1e9 < stop - 0.5 and s.end_s * 1e9 > start + 0.5 for s in timeline.spans)
        given_ns += min(count, running) * (stop - start)
    assert float(given_ns) == pytest.approx(sum(t.duration_ns for t in coarse.tasks), abs=200)


def test_ranks_that_share_cores_fill_each_others_bubbles():
    """Equal stages: all cores are busy but while fewer ranks than cores have work, at both ends of the step."""
    cost = StageCost(1e-3, 1e-3, 1e-3)
    own = makespan_s("1f1b", 4, 8, 1, [cost] * 4)
    assert own == pytest.approx((8 + 3) * 3e-3)
    crowded = makespan_s("1f1b", 4, 8, 1, [cost] * 4, (2.0, 2.0, 4 / 3, 1.0))
    # 32 units of work and 2 cores of twice the speed each: at least 8 rounds; one rank alone first and last.
    assert 8 * 3e-3 < crowded < own
    one_core = (4.0, 2.0, 4 / 3, 1.0)
    alone = makespan_s("1f1b", 4, 8, 1, [cost] * 4, one_core)
    assert alone == pytest.approx(8 * 3e-3)
    graph = schedule_tasks(make_schedule("1f1b", 4, 8), [cost] * 4)
    assert simulate(on_shared_cores(graph, one_core)).end_s == pytest.approx(alone)
    assert on_shared_cores(graph, ()) is graph
    assert on_shared_cores(graph, (1.0,) * 4) is graph


def test_measured_pace_by_hand():
    """Two stages, 2 s forward and 4 s backward, one and two microbatches; one rank alone is faster by 5/4.

    One microbatch: never two at work, so all 12 s run at 5/4. Two: F0 and the last B alone, the four between them in
    pairs: F1 beside F0, and B0 beside B1 for all of its 4 s, after B0 and F1 of the last stage alone.
    """
    cost = StageCost(2.0, 2.0, 2.0)
    assert makespan_s("gpipe", 2, 1, 1, [cost] * 2, (1.25, 1.0)) == pytest.approx(12 / 1.25)
    pair = makespan_s("gpipe", 2, 2, 1, [cost] * 2, (1.25, 1.0))
    assert pair == pytest.approx((2 + 2 + 4 + 4) / 1.25 + 2 + 4)


def test_more_at_work_than_measured_share_what_so_many_get():
    lanes = frozenset({"a", "b", "c", "d"})
    cores = Cores((Fraction(1), Fraction(3, 4)), lanes)
    assert [cores.rate(k) for k in (1, 2, 3, 4)] == [
        1,
        Fraction(3, 4),
        Fraction(1, 2),
        Fraction(3, 8),
    ]
    tasks = tuple(Task(name, name, 3) for name in sorted(lanes))
    assert simulate(TaskGraph(tasks, cores=cores)).end_s == pytest.approx(8e-9)
