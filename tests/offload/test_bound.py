"""Lower bounds hold for every plan, are exact where the answer is known, and say how far the planner is off."""

from dataclasses import replace

import pytest

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.offload import (
    Channel,
    MemoryMachine,
    least_peak_bound,
    least_time_bound,
    order_peak,
    plan_memory,
    reload_bound,
)
from hyper_parallel.offload._linear import LinearProgram
from tests.offload.programs import training_chain

pytestmark = pytest.mark.unit


def machine(bytes_s):
    return MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))


def test_a_linear_program_with_a_known_optimum():
    lp = LinearProgram()
    x, y = lp.variable(10, -1.0), lp.variable(10, -2.0)
    lp.at_least({x: -1, y: -1}, -4)
    lp.at_least({x: -1, y: -3}, -6)
    bound = lp.lower_bound()
    assert bound <= -5  # never above the optimum, at (3, 1)
    assert bound == pytest.approx(-5, rel=1e-5)


def one_gap(seconds):
    """A 100-byte result that is idle for one operator with 60 bytes of its own."""
    storages = (
        Storage("a", 100, "activation"),
        Storage("b", 60, "activation"),
        Storage("y", 10, "output", False, True),
    )
    ops = (
        Operator("make", (), (), (0,), seconds),
        Operator("other", (), (), (1,), seconds),
        Operator("end", (0,), (), (2,), seconds),
    )
    return MemoryProgram("gap", storages, ops, 1)


def test_one_gap_by_hand():
    program, order = one_gap(1.0), (0, 1, 2)
    # Under 130 bytes at most 70 bytes of `a` may stay beside `b`: 30 leave and come back, 0.3 s each way, all exposed.
    bound = least_time_bound(program, machine(100.0), order, 130, 10.0)
    assert bound == pytest.approx(3.6, rel=1e-4)
    # With 0.4 s of slack 0.2 s go each way: 20 bytes of 160 are away.
    assert least_peak_bound(program, machine(100.0), order, 3.4) == pytest.approx(140, rel=1e-4)
    assert least_peak_bound(program, machine(100.0), order, 3.0) == pytest.approx(160, rel=1e-4)


def test_what_must_come_back_before_its_use():
    program, order = one_gap(1.0), (0, 1, 2)
    # `a` has 0.4 s of slack to come back after `other` and before `end` starts: 40 bytes.
    assert reload_bound(program, machine(100.0), order, 3.4).num_bytes == pytest.approx(120, abs=1)
    assert reload_bound(program, machine(100.0), order, 3.0).num_bytes == 160
    make = replace(program.operators[0], seconds=0.5, repeatable=True)
    a, b, y = program.storages
    storages = (a, replace(b, num_bytes=120), y)
    again = replace(program, storages=storages, operators=(make, *program.operators[1:]))
    # Or it is made again: 0.25 s give half of it, while 25 bytes are copied.
    found = reload_bound(again, machine(100.0), order, 2.75, recompute=True)
    assert found.reloaded_bytes == pytest.approx(25, abs=1)
    assert found.recomputed_bytes == pytest.approx(50, abs=1)
    assert (found.position, found.num_bytes) == (1, pytest.approx(145, abs=2))


@pytest.mark.parametrize(("bytes_s", "share"), [(3000.0, 0.8), (3000.0, 0.6), (800.0, 0.8)])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_plan_is_faster_than_its_bound(bytes_s, share, recompute):
    program, m = training_chain(layers=2), machine(bytes_s)
    order = tuple(range(len(program.operators)))
    budget = int(order_peak(program, order) * share)
    plan = plan_memory(program, m, budget_bytes=budget, recompute=recompute, reorder=False)
    bound = least_time_bound(program, m, order, budget, plan.seconds, recompute=recompute)
    assert program.seconds <= bound <= plan.seconds * (1 + 1e-9)
    if (bytes_s, share) == (
        3000.0,
        0.8,
    ):  # tighter budgets are further off: whole storages against fractions
        assert plan.seconds <= 1.03 * bound


@pytest.mark.parametrize("bytes_s", [800.0, 3000.0])
def test_no_plan_is_smaller_than_its_bound(bytes_s):
    program, m = training_chain(layers=2), machine(bytes_s)
    order = tuple(range(len(program.operators)))
    plan = plan_memory(program, m, max_slowdown=0.02, recompute=False, reorder=False)
    bound = least_peak_bound(program, m, order, program.seconds * 1.02, recompute=False)
    simple = reload_bound(program, m, order, program.seconds * 1.02).num_bytes
    assert simple <= bound * (1 + 1e-6)
    assert bound <= plan.peak_bytes["device"]
