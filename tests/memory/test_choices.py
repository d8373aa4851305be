"""What is chosen: against optima found by a solver, against counting by hand, and against plain arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    order_peak,
    plan_memory,
    use_definitions,
)
from hyper_parallel.memory._channel_capacity import ChannelCapacity
from hyper_parallel.memory._plan_memory import _identity
from hyper_parallel.memory._portfolio import Search
from hyper_parallel.memory._recompute import Chains, cheapest_at_peak, recompute_density
from hyper_parallel.memory._selection_rules import SelectionRules
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("layers", "bytes_s", "optimum"),
    [(3, 800.0, 9208), (3, 3000.0, 7408), (5, 800.0, 13808), (5, 3000.0, 9808)],
)
def test_small_plans_are_within_10_percent_of_the_optimum(layers, bytes_s, optimum):
    """The optima are those of a mixed-integer program, in whole storages with copies that may be cut."""
    machine = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
    program = training_chain(layers=layers)
    wanted = {"max_slowdown": 0.02, "bandwidth_margin": 0.0, "recompute": False, "reorder": False}
    plan = plan_memory(program, machine, **wanted)
    assert optimum <= plan.peak_bytes["device"] <= 1.1 * optimum
    assert plan == plan_memory(program, machine, **wanted)


def test_on_a_slow_link_state_starts_the_step_at_home():
    """Nothing of it is sent before the peak; sending activations or weights there instead takes 61 seconds and more."""
    machine = MemoryMachine(Channel(400.0, 0), Channel(400.0, 0))
    program = training_chain(layers=8)
    plan = plan_memory(program, machine, budget_bytes=13804, recompute=False)
    # 27608 bytes rest after 8.08 seconds, and what is over the budget comes back after that.
    assert 8.08 + (27608 - 13804) / 400.0 <= plan.seconds <= 58.0


def test_recomputation_is_spent_where_the_peak_is():
    """Both results cost the same per byte; only `a` is idle at the peak, and `c` is the cheaper one."""
    storages = (
        Storage("x", 10, "input", True, True),
        Storage("a", 100, "activation"),
        Storage("big", 500, "activation"),
        Storage("c", 100, "activation"),
        Storage("small", 10, "activation"),
        Storage("y", 10, "output", False, True),
    )
    ops = (
        Operator("a", (0,), (), (1,), 1.0, repeatable=True),
        Operator("big", (0,), (), (2,), 1.0),
        Operator("use a", (1, 2), (), (), 1.0),
        Operator("c", (0,), (), (3,), 0.5, repeatable=True),
        Operator("small", (0,), (), (4,), 1.0),
        Operator("use c", (3, 4), (), (5,), 1.0),
    )
    program = MemoryProgram("two gaps", storages, ops, 1)
    chains = use_definitions(program, range(len(ops)))
    density = recompute_density(Chains(program, chains))
    assert set(density) == {1, 3}
    assert cheapest_at_peak(program, chains, density, 1.0) == [1]
    assert cheapest_at_peak(program, chains, density, 0.5) == [3]
    assert cheapest_at_peak(program, chains, density, 1.5) == [1, 3]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 16), st.floats(0.1, 5.0)), max_size=20),
)
def test_a_lane_gives_the_first_and_the_last_free_seconds(copies):
    lane, free = ChannelCapacity(16.0, 1.0, slices=16), [1.0] * 16
    for forward, at, seconds in copies:
        slices = list(range(at, 16)) if forward else list(range(at - 1, -1, -1))
        fits = sum(free[i] for i in slices) >= seconds - 1e-9
        given = lane.first(at, seconds) if forward else lane.last(at, seconds)
        if abs(sum(free[i] for i in slices) - seconds) < 1e-6:
            continue
        assert (given is not None) == fits
        if given is None:
            continue
        left = seconds
        for i in slices:
            used = min(free[i], left)
            left -= used
            free[i] -= used
            if left <= 1e-12:
                assert given == pytest.approx(i + 1 if forward else i)
                break
        (lane.take_first if forward else lane.take_last)(at, seconds)
        assert lane.free_s == pytest.approx(free, abs=1e-9)


def small_budget(layers, bytes_s, share):
    program = training_chain(layers=layers)
    machine = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
    peak = order_peak(program, range(len(program.operators)))
    return plan_memory(program, machine, budget_bytes=int(share * peak)).seconds / program.seconds


def test_under_a_budget_what_copies_leave_over_is_made_again():
    """Neither copies nor cheap recomputation reach it alone: 21 % more time is taken without a share found for both."""
    assert small_budget(40, 300.0, 0.45) <= 1.1


def test_more_room_for_gaps_is_tried_while_a_faster_program_was_seen():
    """The first program whose addresses fit takes 88 % more time."""
    assert small_budget(8, 300.0, 0.45) <= 1.75


def test_what_takes_too_long_wherever_its_bytes_are_is_not_selected():
    program = training_chain(layers=6)
    machine = MemoryMachine(Channel(800.0, 0), Channel(800.0, 0))
    order = tuple(range(len(program.operators)))
    identity = _identity(program, order)
    where = ("", frozenset[int]())
    rules = SelectionRules(
        program, machine, order, program.seconds, None, where, move=None, recompute=True
    )
    limit_s = 1.01 * program.seconds
    Search(program, machine, order, rules, identity).portfolio(int(0.6 * identity.peak), limit_s)
    selectors = list(dict.fromkeys(rule.selector for rule in rules.fixed))
    in_time = [selector.least_s <= limit_s for selector in selectors]
    assert set(in_time) == {True, False}
    assert [bool(selector.sequences) for selector in selectors] == in_time
