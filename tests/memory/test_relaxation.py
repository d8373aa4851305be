"""The residency linear program: optima of small steps by hand, and plans that weigh copies and recomputation."""

import numpy as np
import pytest

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory import Channel, MemoryMachine, order_peak, plan_memory
from hyper_parallel.memory.residency_lp import LinearProgram, ResidencyLP, SolverFailed
from hyper_parallel.memory.rounding import Rounding
from tests.memory.programs import training_chain
from tests.slow import slow_cells

pytestmark = pytest.mark.unit
SLOW = MemoryMachine(Channel(10.0, 0), Channel(10.0, 0))


def test_a_linear_program_at_its_optimum_and_without_one():
    lp = LinearProgram()
    x, y = lp.variable(10, -1.0), lp.variable(10, -2.0)
    lp.at_least({x: -1, y: -1}, -4)
    lp.equal({x: 1, y: -3}, 0)
    assert lp.solve() == pytest.approx([3, 1])
    lp.at_least({x: 1}, 4)
    assert lp.solve() is None


def test_a_solver_that_fails_is_not_read_as_out_of_reach():
    lp = LinearProgram()
    lp.at_least({lp.variable(10): float("inf")}, 4)
    with pytest.raises(SolverFailed, match="not finite"):
        lp.solve()
    unbounded = LinearProgram()
    unbounded.variable(cost=-1.0)
    with pytest.raises(SolverFailed, match="nbounded"):
        unbounded.solve()


def test_no_two_choices_of_two_parts_cost_the_same():
    """Else which one is taken is up to the solver, whose tolerance is 1e-9 of 1e4 times the costs."""
    model = ResidencyLP(np.array([100]), [1.0], SLOW, np.arange(1))
    costs = np.array([model.lp.costs[model.add_fraction()] for _ in range(60)])
    pairs = np.sort((costs[:, None] + costs)[np.triu_indices(60, 1)])
    assert np.diff(pairs).min() > 1e-13


def offload_optimum(target_bytes):
    """Return (offloaded fraction, seconds of the step) of 100 bytes that are idle for a second at 10 bytes a second."""
    model = ResidencyLP(np.array([100, 160, 100]), [1.0, 1.0, 1.0], SLOW, np.arange(3))
    part = model.add_fraction()
    model.add_absence(part, 1, 2, 100)
    model.add_store(part, 1, 1, 100)
    model.add_prefetch(part, 2, 100, 2)
    optimum = model.solve(target_bytes, {})
    return None if optimum is None else (optimum.fractions[part], optimum.seconds)


def test_only_what_must_leave_leaves_and_computing_waits_for_it():
    assert offload_optimum(160) == (0.0, pytest.approx(3.0))
    # Each way takes 4 seconds, of which one goes on beside the operator before; the waits are two of 3 seconds.
    assert offload_optimum(120) == (pytest.approx(0.4), pytest.approx(9.0))
    assert offload_optimum(50) is None


def read_again(density_s):
    """Return a step that reads a wide result again at the end, with the given seconds to recompute it."""
    storages = (
        Storage("input", 10, "input", True, True),
        Storage("wide", 100, "activation"),
        Storage("other", 100, "activation"),
        Storage("end", 10, "output", False, True),
    )
    operators = (
        Operator("make", (0,), (), (1,), density_s, repeatable=True),
        Operator("other", (0,), (), (2,), 1.0),
        Operator("end", (0, 1), (), (3,), 1.0),
    )
    return MemoryProgram("read again", storages, operators, 1)


@pytest.mark.parametrize(("density_s", "recomputed", "added_s"), [(2.0, (1,), 30.4 / 21), (40.0, (), 608 / 59)])
def test_results_that_are_cheaper_to_copy_than_to_recompute_are_copied(density_s, recomputed, added_s):
    """80 of its 100 bytes must leave. All of them are stored and reloaded in 20 seconds, one beside the other operator.

    A copied fraction waits 19 seconds times the fraction, a recomputed one takes `density_s` times it, both at the same
    time. The sum is least where both are equal, at 0.8 * 19 * density_s / (19 + density_s).
    """
    program = read_again(density_s)
    rounding = Rounding(program, SLOW, (0, 1, 2), movable_kinds=None, recompute=True)
    choice = rounding.choice(130, {})
    assert choice is not None
    assert tuple(choice.candidates.recomputes.gaps) == recomputed
    assert choice.optimum.seconds == pytest.approx(program.seconds + added_s)


@slow_cells("12-250.0-0.35-2.1")
@pytest.mark.parametrize(
    ("layers", "bytes_s", "share", "most"),
    [(12, 400.0, 0.35, 1.45), (12, 250.0, 0.35, 2.1), (20, 600.0, 0.3, 1.1)],
)
def test_copies_and_recompute_are_weighed_together(layers, bytes_s, share, most):
    """With recomputation chosen before the copies, the steps were 1.53, 2.55 and 1.15 times as long."""
    program = training_chain(layers)
    machine = MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))
    budget = int(share * order_peak(program, range(len(program.operators))))
    plan = plan_memory(program, machine, budget_bytes=budget)
    assert plan.device_bytes <= budget
    assert plan.seconds <= most * program.seconds


@pytest.mark.parametrize("goal", [{"budget_bytes": 7000}, {"max_slowdown": 0.05}])
def test_a_plan_does_not_depend_on_the_method_of_the_solver(monkeypatch, goal):
    """Equally good optima differ in tie-breaking costs, so interior points and vertices lead to the same plan."""
    program = training_chain(layers=5)
    machine = MemoryMachine(Channel(600.0), Channel(600.0))
    plans = []
    for method in ("simplex", "ipm"):
        monkeypatch.setattr("hyper_parallel.memory.residency_lp._METHODS", ({"solver": method},))
        plans.append(plan_memory(program, machine, **goal))
    assert plans[0].choices
    assert plans[0].actions == plans[1].actions


def test_small_weights_are_streamed_and_a_large_one_stays():
    """The link carries half of the weights. A copy takes all its room at once, so a large weight saves nothing."""
    sizes = [100] * 20 + [1500] + [100] * 20
    storages = [Storage("x", 1, "input", True, True)]
    storages += [Storage(f"w{i}", size, "weight", True, True) for i, size in enumerate(sizes)]
    operators = tuple(Operator(f"mm{i}", (0, i + 1), flops=1.0, access_bytes=1, seconds=1.0) for i in range(41))
    link = Channel(50.0, 0.0)  # a small weight takes two operators, 20 of them a step
    plan = plan_memory(
        MemoryProgram("stream", tuple(storages), operators, 1, 1), MemoryMachine(link, link),
        max_slowdown=0.0, bandwidth_margin=0.0,
    )  # fmt: skip
    moved = {a.target for a in plan.actions if a.kind == "prefetch"}
    assert {storages[s].num_bytes for s in moved} == {100}
    assert plan.peak_bytes["device"] <= sum(sizes) + 1 - 1600  # of 2,000 at most


def test_the_solver_prints_nothing(capfd):
    lp = LinearProgram()
    lp.variable(cost=1.0)
    assert lp.solve() == pytest.approx([0.0])
    assert capfd.readouterr() == ("", "")


def test_where_positions_are_still_missing_the_emission_decides(monkeypatch):
    """With few of them, and fewer added than the optimum asks for, a plan still keeps its budget."""
    monkeypatch.setattr("hyper_parallel.memory.lp_builder._SAMPLES", 3)
    monkeypatch.setattr("hyper_parallel.memory.rounding._MAX_REFINEMENTS", 1)
    program, link = training_chain(12), Channel(400.0)
    budget = order_peak(program, range(len(program.operators))) // 2
    plan = plan_memory(program, MemoryMachine(link, link), budget_bytes=budget)
    assert 0 < plan.device_bytes <= budget
