"""What is wrong with a schedule is found and marked; deadlocks are found exactly where they are."""

import random
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.mpmd import in_flight, lower, make_schedule, replay, verify

pytestmark = pytest.mark.unit


def _edit(schedule, old, new, rank=None):
    """The schedule with an action replaced by a list of actions, on one rank or where it stands."""
    ranks = []
    for r, row in enumerate(schedule.ranks):
        out = []
        for action in row:
            hit = str(action) == old and rank in (None, r)
            out += [Action.parse(text) for text in new] if hit else [action]
        ranks.append(tuple(out))
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, tuple(ranks))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("1F1", [], "stage 1 has no forward of microbatch 1"),
        ("1F1", ["1F1", "1F1"], "1F1 is scheduled twice"),
        ("1B1", [], "1F1 has no backward"),
        ("1B1", ["1I1"], "has no 1W1"),
        ("1B1", ["1W1"], "has no 1I1"),
        ("1B1", ["1W1", "1I1"], "before an action that it depends on"),
        ("1B1", ["1B1", "1I1", "1W1"], "both as B and as I/W"),
        ("1F1", ["1F1", "3F0"], "3F0: stage out of range"),
        ("1F1", ["1F1", "1F9"], "microbatch out of range"),
        ("2F0", ["1F0"], "1F0 is scheduled twice, first as action 0 of rank 1"),
    ],
)
def test_wrong_computations_are_refused(old, new, what):
    with pytest.raises(ScheduleError, match=what):
        verify(_edit(make_schedule("1f1b", 3, 4), old, new))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("0SEND_F1", [], "1RECV_F1 has no 0SEND_F1"),
        ("1RECV_F1", [], "0SEND_F1 has no 1RECV_F1"),
        ("1SEND_B2", [], "0RECV_B2 has no 1SEND_B2"),
        ("0F1", ["0SEND_F1", "0F1"], "0SEND_F1 is scheduled twice"),
        ("1B1", ["1B1", "1SEND_F9"], "microbatch out of range"),
        ("2F0", ["2F0", "2SEND_F0"], "no peer stage on another rank"),
        ("1F0", ["1F0", "1UNSHARD"], "gathered twice"),
        ("1RESHARD", [], "holds gathered parameters at the end"),
        ("1UNSHARD", [], "parameters that are not gathered"),
        ("1UNSHARD", ["1RESHARD", "1UNSHARD"], "freed without being gathered"),
        ("1B3", ["1REDUCE_GRAD", "1B3"], "before the last backward"),
        ("1REDUCE_GRAD", [], "gradients of stage 1 are never reduced"),
    ],
)
def test_wrong_communication_is_refused(old, new, what):
    with pytest.raises(ScheduleError, match=what):
        verify(_edit(lower(make_schedule("1f1b", 3, 4), unshard=True), old, new))


def test_a_stage_lies_on_one_rank():
    with pytest.raises(ScheduleError, match="stage 0 is computed on rank 0 and on rank 1, but") as caught:
        verify(Schedule.from_csv("0F0,0B0,1F0,1B0\n0F1,0B1,1F1,1B1\n"))
    assert ">0F1<" in caught.value.render()
    with pytest.raises(ScheduleError, match="stage 1 has no computation"):
        verify(Schedule.from_csv("0F0,0B0\n2F0,2B0\n"))


def _swap(schedule, first, second):
    swapped = {first: second, second: first}
    ranks = tuple(tuple(Action.parse(swapped.get(str(a), str(a))) for a in row) for row in schedule.ranks)
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, ranks)


def test_late_receives_and_early_sends_are_refused():
    lowered = lower(make_schedule("1f1b", 2, 3))
    with pytest.raises(ScheduleError, match="1RECV_F1 is not before its use"):
        verify(_swap(lowered, "1RECV_F1", "1F1"))
    with pytest.raises(ScheduleError, match="0SEND_F1 is not after its computation"):
        verify(_swap(lowered, "0SEND_F1", "0F1"))


def test_messages_between_two_ranks_keep_their_order():
    lowered = lower(make_schedule("gpipe", 2, 3))
    verify(lowered)
    with pytest.raises(ScheduleError, match=r"rank 1 receives 1RECV_F\d, but rank 0 sends 0SEND_F\d next"):
        verify(
            Schedule.from_csv(
                "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
            )
        )


def test_a_deadlock_shows_who_waits_in_the_grid():
    # Rank 0 wants the gradient of 0 before it gives out the microbatch that rank 1 does first.
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "crossed")
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        verify(schedule)
    assert caught.value.what == "the schedule deadlocks: rank 0, action 1: 0B0 waits for 1B0"
    assert caught.value.others == ("rank 1, action 0: 1F1 waits for 0F1",)
    assert ">0B0<" in caught.value.render()


def test_a_deadlock_only_of_rendezvous_sends():
    """Both send first: fine when sends are buffered, a deadlock when they are not."""
    schedule = Schedule.from_csv(
        "0F0,0SEND_F0,2RECV_F0,2F0,2B0,2SEND_B0,0RECV_B0,0B0,0F1,0SEND_F1,2RECV_F1,2F1,2B1,2SEND_B1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,1RECV_F1,1F1,1SEND_F1,1RECV_B1,1B1,1SEND_B1\n"
    )
    verify(schedule)
    ranks = [[str(a) for a in row] for row in schedule.ranks]
    # Rank 0 sends the next microbatch before it takes the gradient that rank 1 is already sending.
    ranks[0] = [a for a in ranks[0] if a not in ("0F1", "0SEND_F1")]
    ranks[0][ranks[0].index("0RECV_B0") : ranks[0].index("0RECV_B0")] = ["0F1", "0SEND_F1"]
    crossed = Schedule.from_csv("\n".join(",".join(row) for row in ranks))
    replay(crossed)
    with pytest.raises(ScheduleError, match="deadlocks when sends wait"):
        verify(crossed)


def test_activations_in_flight_are_bounded():
    schedule = make_schedule("gpipe", 2, 4)
    verify(schedule, max_in_flight=4)
    with pytest.raises(ScheduleError, match="rank 1 holds 4 activations at once") as caught:
        verify(schedule, max_in_flight=[4, 3])
    assert ">1F3<" in caught.value.render()
    assert in_flight(schedule) == (4, 4)


def _waits(schedule, rendezvous):
    """Return the waits between actions as a graph; a rendezvous joins a send and its receive into one node."""
    place = schedule.placement()
    node = {}
    for row in schedule.ranks:
        for a in row:
            text = str(a)
            if a.kind.startswith("RECV") and rendezvous:
                step, kind = (-1, "SEND_F") if a.kind == "RECV_F" else (1, "SEND_B")
                text = str(Action(a.stage + step, kind, a.microbatch))
            node[a] = text
    graph = {}
    for row in schedule.ranks:
        for before, after in pairwise(row):
            graph.setdefault(node[after], set()).add(node[before])
    for a in node:
        if a.kind.startswith("RECV") and not rendezvous:
            step, kind = (-1, "SEND_F") if a.kind == "RECV_F" else (1, "SEND_B")
            graph.setdefault(node[a], set()).add(str(Action(a.stage + step, kind, a.microbatch)))
        if schedule.has_communication or a.kind not in ("F", "B"):
            continue
        other = a.stage + (-1 if a.kind == "F" else 1)
        if other in place:
            graph.setdefault(node[a], set()).add(str(Action(other, a.kind, a.microbatch)))
    return graph


@settings(deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 8),
    st.randoms(use_true_random=False),
)
def test_deadlocks_are_found_exactly(p, m, lowered, swaps, rng: random.Random):
    """Shuffle a good schedule within what is legal on each rank; the replay agrees with a search for cycles."""
    schedule = make_schedule("1f1b", p, m)
    if lowered:
        schedule = lower(schedule, reduce_grad=False)
    rows = [list(row) for row in schedule.ranks]
    for _ in range(swaps):
        row = rng.choice(rows)
        at = rng.randrange(len(row))
        to = rng.randrange(len(row))
        row.insert(to, row.pop(at))
    for row in rows:
        # Keep what is checked before the replay: a backward after its forward, messages around computations.
        rank_of = {"RECV_F": 0, "F": 1, "SEND_F": 2, "RECV_B": 3, "B": 4, "SEND_B": 5}
        for i in range(m):
            spots = [k for k, a in enumerate(row) if a.microbatch == i]
            ordered = sorted((row[k] for k in spots), key=lambda a: rank_of[a.kind])
            for k, a in zip(spots, ordered, strict=True):
                row[k] = a
    mixed = Schedule("mixed", schedule.stages, m, tuple(tuple(row) for row in rows))
    for rendezvous in (False, True):
        try:
            list(TopologicalSorter(_waits(mixed, rendezvous)).static_order())
            runs = True
        except CycleError:
            runs = False
        if runs:
            order = replay(mixed, rendezvous=rendezvous)
            assert sorted(order) == [(r, k) for r, row in enumerate(rows) for k in range(len(row))]
        else:
            with pytest.raises(ScheduleError, match="deadlocks"):
                replay(mixed, rendezvous=rendezvous)
