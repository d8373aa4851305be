"""Choices of plans: against optima by a solver, against counts by hand, and against plain arithmetic."""

import pytest

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    order_peak,
    plan_memory,
)
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
    """No state is stored before the peak; storing activations or weights instead takes 61 seconds and more."""
    machine = MemoryMachine(Channel(400.0, 0), Channel(400.0, 0))
    program = training_chain(layers=8)
    plan = plan_memory(program, machine, budget_bytes=13804, recompute=False)
    # 27608 bytes rest after 8.08 seconds, and what is over the budget comes back after that.
    assert 8.08 + (27608 - 13804) / 400.0 <= plan.seconds <= 58.0


def test_recomputation_is_spent_where_the_peak_is():
    """Both results have one size; only `a` is idle at the peak, and `c` is the cheaper one."""
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
        Operator("use big", (2,), (), (), 1.0),
        Operator("use a", (1,), (), (), 1.0),
        Operator("c", (0,), (), (3,), 0.5, repeatable=True),
        Operator("small", (0,), (), (4,), 1.0),
        Operator("use c", (3, 4), (), (5,), 1.0),
    )
    program = MemoryProgram("two gaps", storages, ops, 1)
    slow = MemoryMachine(Channel(1.0), Channel(1.0))
    plan = plan_memory(program, slow, max_slowdown=0.2, reorder=False)
    assert [(c.what, c.storage) for c in plan.choices] == [("recompute", 1)]
    assert plan.peak_bytes["device"] == 510
    too_short = plan_memory(program, slow, max_slowdown=0.1, reorder=False)
    assert not too_short.choices


def small_budget(layers, bytes_s, share):
    program = training_chain(layers=layers)
    machine = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
    peak = order_peak(program, range(len(program.operators)))
    return plan_memory(program, machine, budget_bytes=int(share * peak)).seconds / program.seconds


def test_under_a_budget_what_copies_leave_over_is_made_again():
    """Neither copies nor cheap recomputation suffice alone; without a joint choice the step takes 21 % longer."""
    assert small_budget(40, 300.0, 0.45) <= 1.1


def test_more_room_for_gaps_is_tried_while_a_faster_program_was_seen():
    """The first program whose addresses fit takes 88 % more time."""
    assert small_budget(8, 300.0, 0.45) <= 1.75
