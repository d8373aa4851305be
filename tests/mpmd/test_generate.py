"""Every generated schedule is legal, and its bubble and memory are those of its paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ScheduleError
from hyper_parallel.mpmd import (
    SCHEDULES,
    StageCost,
    in_flight,
    in_flight_limit,
    is_legal,
    legal_microbatches,
    lower,
    make_schedule,
    one_by_one,
    schedule_tasks,
    verify,
)
from hyper_parallel.sim import simulate

pytestmark = pytest.mark.unit

_quick = settings(deadline=None, max_examples=50)
_times = st.integers(1, 50)


def _bubble_ns(schedule, f, i, w, overlap=None):
    """Step minus the work of the rank with the least work, per-stage times in nanoseconds."""
    costs = [StageCost(f / 1e9, i / 1e9, w / 1e9)] * schedule.stages
    timeline = simulate(schedule_tasks(schedule, costs, overlap=overlap))
    work = {}
    for span in timeline.spans:
        work[span.lane] = work.get(span.lane, 0) + round(span.duration_s * 1e9)
    return round(timeline.end_s * 1e9) - min(work.values())


@st.composite
def _shapes(draw, names=SCHEDULES, max_ranks=9):
    name, p = draw(st.sampled_from(names)), draw(st.integers(1, max_ranks))
    v = draw(st.integers(1, 4)) if name == "interleaved_1f1b" else None
    m = draw(st.integers(1, 3 * p + 4).filter(lambda m: is_legal(name, p, m)))
    return name, p, m, v


@_quick
@given(_shapes(), st.booleans())
def test_schedules_are_legal_lowered_and_within_their_memory(shape, unshard):
    name, p, m, v = shape
    schedule = make_schedule(name, p, m, v)
    limit = in_flight_limit(name, p, m, schedule.stages // p)
    verify(schedule, max_in_flight=limit)
    verify(lower(schedule, unshard=unshard), max_in_flight=limit)
    if name not in ("zbv", "dualpipev") or m > 2 * p:
        assert list(in_flight(schedule)) == list(limit)


@_quick
@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 9),
    st.integers(1, 30),
    _times,
    _times,
    _times,
)
def test_bubble_of_gpipe_and_1f1b(name, p, m, f, i, w):
    assert _bubble_ns(make_schedule(name, p, m), f, i, w) == (p - 1) * (f + i + w)


@_quick
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), _times, _times, _times)
def test_bubble_of_interleaved_is_divided_by_the_stages_per_rank(p, rounds, v, f, i, w):
    # Per-stage times are a v-th of the rank's: (p-1)(tf+tb)/v in the papers' letters.
    schedule = make_schedule("interleaved_1f1b", p, p * rounds, v)
    assert _bubble_ns(schedule, f, i, w) == (p - 1) * (f + i + w)


@_quick
@given(st.integers(1, 9), st.integers(0, 20), _times, _times, _times)
def test_bubble_of_zb_h1(p, more, f, i, w):
    w = min(w, f, i)
    assert _bubble_ns(make_schedule("zb_h1", p, p + more), f, i, w) == (p - 1) * (f + i - w)


@_quick
@given(st.integers(1, 8), st.integers(0, 12), _times)
def test_zbv_pauses_only_for_the_start(p, more, t):
    assert _bubble_ns(make_schedule("zbv", p, 2 * p + more), t, t, t) == (p - 1) * t


@_quick
@given(st.integers(1, 8), st.integers(0, 12), _times, _times, st.sampled_from([0.75, 1.0]))
def test_bubble_of_dualpipev(p, more, f, w, overlap):
    f, w = 4 * max(f, w), 4 * min(f, w)
    together = round((f + f + w) * overlap)
    bubble = _bubble_ns(make_schedule("dualpipev", p, 2 * p + more), f, f, w, overlap)
    assert bubble == (p - 1) * (together + (f + w) - 3 * w)


def test_zero_bubble_order_of_schedules():
    """Four ranks, unit times: what the papers promise, in one line each."""
    got = {name: _bubble_ns(make_schedule(name, 4, 16), 1, 1, 1) for name in SCHEDULES}
    # Two half-size stages per rank in the last three, so their unit is half as long.
    assert got == {
        "gpipe": 9,
        "1f1b": 9,
        "zb_h1": 3,
        "interleaved_1f1b": 9,
        "zbv": 3,
        "dualpipev": 3,
    }


@pytest.mark.parametrize(
    ("name", "p", "m", "near"),
    [
        ("dualpipev", 4, 7, (8,)),
        ("interleaved_1f1b", 4, 9, (8, 10)),
        ("1f1b", 4, 0, (1,)),
        ("interleaved_1f1b", 8, 31, (30, 32)),
    ],
)
def test_illegal_microbatches_name_the_nearest_legal_ones(name, p, m, near):
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, p, m)
    assert caught.value.allowed[: len(near)] == [*near]
    assert legal_microbatches(name, p, m) == near
    for legal in near:
        verify(make_schedule(name, p, legal))


def test_other_refusals():
    with pytest.raises(ScheduleError, match="unknown schedule `2f2b`"):
        make_schedule("2f2b", 2, 4)
    with pytest.raises(ScheduleError, match="does not support 3 stages per rank") as caught:
        make_schedule("zbv", 2, 4, 3)
    assert caught.value.hint == 'name="interleaved_1f1b"'
    with pytest.raises(ScheduleError, match="does not support 1 stage per rank") as caught:
        make_schedule("zbv", 2, 4, 1)
    assert caught.value.hint == "stages_per_rank=2"
    with pytest.raises(ScheduleError) as caught:
        make_schedule("1f1b", 4, 9, 2)
    assert caught.value.hint == 'name="interleaved_1f1b", microbatches=10'
    with pytest.raises(ScheduleError) as caught:
        make_schedule("dualpipev", 4, 4, 1)
    assert caught.value.hint == "stages_per_rank=2, microbatches=8"
    with pytest.raises(ScheduleError, match="at least one rank"):
        make_schedule("1f1b", 0, 4)
    lowered = lower(make_schedule("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="only a compute-only schedule"):
        lower(lowered)
    with pytest.raises(ScheduleError, match="two gathered stages"):
        lower(make_schedule("1f1b", 2, 2), unshard=True, max_unsharded=1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 9)])
def test_parts_of_an_overlap_send_at_once_when_run_one_by_one(p, m):
    lowered = lower(make_schedule("dualpipev", p, m))
    apart = one_by_one(lowered)
    verify(apart, max_in_flight=in_flight_limit("dualpipev", p, m, 2))
    order = [[str(leaf) for a in rank for leaf in a.leaves] for rank in lowered.compute_only().ranks]
    assert [[str(a) for a in rank] for rank in apart.compute_only().ranks] == order
    place = apart.placement()
    for rank in apart.ranks:
        computed = None
        for action in rank:
            if action.kind.startswith("SEND"):
                # Between a computation and the send of its result only messages lie.
                assert (action.stage, action.microbatch) == (computed.stage, computed.microbatch)
                assert place[action.stage] == place[computed.stage]
            elif action.kind in ("F", "B", "I"):
                computed = action
    assert one_by_one(apart) is apart
