"""Plans are judged by replay: never declared, never above the budget, never slower than allowed."""

import random
import re
from dataclasses import replace

import pytest

from hyper_parallel.errors import BadValue, BudgetImpossible, MemoryPlanInvalid, TierFull
from hyper_parallel.ir import MemoryAction, MemoryPlan, MemoryProgram, Operator, Storage
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    clocked,
    order_peak,
    plan_memory,
    predicted_timeline,
    refine_order,
    working_set_bytes,
)
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit
do = MemoryAction


def machine(bytes_s=3000.0, **kw):
    return MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0), **kw)


def test_a_hand_written_peak_is_what_replay_says():
    storages = (
        Storage("w", 100, "weight", True, True),
        Storage("a", 30, "activation"),
        Storage("b", 50, "activation"),
        Storage("y", 8, "output", False, True),
    )
    ops = (
        Operator("f", (0,), (), (1,), 1.0),
        Operator("g", (1,), (), (2,), 1.0),
        Operator("h", (2,), (), (3,), 1.0),
    )
    plan = plan_memory(MemoryProgram("p", storages, ops, 1), machine(), budget_bytes=200)
    assert plan.peak_bytes["device"] == 180  # w + a + b while g runs
    assert plan.replayed.profile[plan.replayed.peak_action] == 180
    assert any("identity" in line for line in plan.statement)
    rounded = plan_memory(MemoryProgram("p", storages, ops, 64), machine(), budget_bytes=1000)
    assert rounded.peak_bytes["device"] == 128 + 64 + 64


@pytest.mark.parametrize("bytes_s", [200.0, 800.0, 3000.0, 1e5])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("reorder", [True, False])
def test_least_peak_keeps_the_time_limit(bytes_s, recompute, reorder):
    program = training_chain()
    m = machine(bytes_s)
    plan = plan_memory(program, m, max_slowdown=0.02, recompute=recompute, reorder=reorder)
    base = order_peak(program, range(len(program.operators)))
    assert plan.peak_bytes["device"] < base
    assert plan.seconds <= program.seconds * 1.02
    assert clocked(program, m, plan.actions).now_s == plan.seconds
    # Every span of a timeline is in whole nanoseconds.
    rounding_s = 0.5e-9 * len(plan.actions)
    assert abs(predicted_timeline(plan, m).end_s - plan.seconds) <= rounding_s
    assert plan.peak_bytes["device"] >= working_set_bytes(program)


def test_a_faster_link_gives_half_the_peak_and_recompute_helps_a_slow_one():
    program = training_chain()
    slow = plan_memory(program, machine(800.0), max_slowdown=0.02, recompute=False)
    hybrid = plan_memory(program, machine(800.0), max_slowdown=0.02)
    fast = plan_memory(program, machine(1e5), max_slowdown=0.02)
    assert hybrid.peak_bytes["device"] < slow.peak_bytes["device"]
    assert fast.peak_bytes["device"] < hybrid.peak_bytes["device"]
    assert fast.peak_bytes["device"] < 21208 // 2


@pytest.mark.parametrize("budget", [6000, 9000, 15000, 20000])
def test_least_time_stays_under_the_budget(budget):
    program = training_chain()
    plan = plan_memory(program, machine(), budget_bytes=budget)
    assert plan.peak_bytes["device"] <= budget
    looser = plan_memory(program, machine(), budget_bytes=2 * budget)
    assert looser.seconds <= plan.seconds


def test_a_step_whose_operators_have_no_seconds_is_planned():
    """Without seconds every copy is waited for, and a budget is kept all the same."""
    program = training_chain()
    ops = tuple(replace(op, seconds=0.0) for op in program.operators)
    program = replace(program, operators=ops)
    plan = plan_memory(program, machine(), budget_bytes=9000)
    assert plan.device_bytes <= 9000
    assert plan.seconds > 0.0


def test_an_impossible_budget_says_the_least():
    program = training_chain()
    with pytest.raises(BudgetImpossible) as caught:
        plan_memory(program, machine(), budget_bytes=3000)
    least = int(caught.value.allowed.split()[2])
    assert plan_memory(program, machine(), budget_bytes=least).peak_bytes["device"] <= least


def named(error):
    """Bytes by recipe key, as a hint names them."""
    return {key: int(n) for key, n in re.findall(r"`offload\.(\w+)=(\d+)`", error.hint)}


def test_a_full_dram_is_named_with_what_is_enough():
    program, budget = training_chain(), 6000

    def planned(dram_bytes, budget_bytes=budget):
        m = machine(1e5, dram_bytes=dram_bytes)
        return plan_memory(program, m, budget_bytes=budget_bytes, recompute=False)

    with pytest.raises(TierFull, match="dram 1200 bytes, flash none") as caught:
        planned(1200)
    enough = named(caught.value)
    assert enough.keys() == {"dram", "budget"}
    plan = planned(enough["dram"])
    assert plan.device_bytes <= budget
    assert plan.dram_bytes <= enough["dram"]
    with pytest.raises(TierFull) as smaller:
        planned(plan.dram_bytes * 3 // 4)  # much less is not enough
    assert named(smaller.value)["dram"] <= enough["dram"]
    assert planned(1200, enough["budget"]).dram_bytes <= 1200


def test_dram_of_the_plan_with_unlimited_dram_may_not_be_enough():
    """With 10240 bytes, the DRAM of the plan for unlimited DRAM, the planner finds no plan."""
    program, scale = training_chain(layers=4), random.Random(660340)
    sizes = [int(s.num_bytes * scale.uniform(0.3, 2)) + 1 for s in program.storages]
    storages = tuple(replace(s, num_bytes=size) for s, size in zip(program.storages, sizes, strict=True))
    program = replace(program, storages=storages)
    budget = order_peak(program, range(len(program.operators))) // 2
    with pytest.raises(TierFull) as caught:
        plan_memory(program, machine(300.0, dram_bytes=3200), budget_bytes=budget, recompute=False)
    dram = named(caught.value)["dram"]
    plan = plan_memory(program, machine(300.0, dram_bytes=dram), budget_bytes=budget, recompute=False)
    assert plan.dram_bytes <= dram


def test_with_files_every_named_capacity_is_enough():
    program, disk = training_chain(), Channel(1e5, 0)

    def planned(dram_bytes, flash_bytes):
        m = MemoryMachine(
            Channel(1e5, 0), Channel(1e5, 0), disk, disk, dram_bytes=dram_bytes, flash_bytes=flash_bytes
        )  # fmt: skip
        return plan_memory(program, m, budget_bytes=7000, recompute=False)

    with pytest.raises(TierFull, match="dram 100 bytes, flash unlimited") as caught:
        planned(100, None)
    least = named(caught.value)["dram"]
    assert planned(least, None).dram_bytes <= least
    with pytest.raises(TierFull, match="dram 4096 bytes, flash 500 bytes") as caught:
        planned(4096, 500)
    ways = named(caught.value)
    assert ways.keys() == {"dram", "flash", "budget"}
    assert planned(ways["dram"], 500).peak_bytes["flash"] <= 500
    assert planned(4096, ways["flash"]).dram_bytes <= 4096


def test_a_full_dram_leaves_the_rest_to_flash():
    program, disk = training_chain(), Channel(1e5, 0)
    three = MemoryMachine(Channel(1e5, 0), Channel(1e5, 0), disk, disk, dram_bytes=9000)
    plan = plan_memory(program, three, budget_bytes=7000, recompute=False)
    assert plan.peak_bytes["device"] <= 7000
    assert plan.dram_bytes <= 9000
    assert plan.peak_bytes["flash"] > 0
    # A wait for a file stops the host of an accelerator, so it comes no earlier than it must.
    waits = [index for index, a in enumerate(plan.actions) if a.kind == "wait" and a.tier == "device"]
    assert waits
    for index in waits:
        last = next(i for i, a in enumerate(plan.actions) if i > index and a.kind == "run")
        runs = [a.target for a in plan.actions[index : last + 1] if a.kind in ("run", "recompute")]
        assert any(plan.actions[index].target in program.touched[i] for i in runs)


def test_one_goal_exactly():
    with pytest.raises(BadValue):
        plan_memory(training_chain(), machine())
    with pytest.raises(BadValue):
        plan_memory(training_chain(), machine(), budget_bytes=1, max_slowdown=0.1)


def test_nothing_pays_is_said():
    program = training_chain(seconds=1e-6)
    plan = plan_memory(program, machine(10.0), max_slowdown=0.0, recompute=False)
    assert plan.peak_bytes["device"] == order_peak(program, refine_order(program)[0])
    assert any("nothing moves" in line for line in plan.statement)
    assert not plan.choices


def test_updates_move_into_backward_unless_clipping_forbids_it():
    program = training_chain()
    order, sentences = refine_order(program)
    last_backward = max(i for i, op in enumerate(program.operators) if op.phase == "backward")
    assert order.index(len(program.operators) - 1) < order.index(last_backward)
    assert not any("stay after" in line for line in sentences)
    clipped = training_chain(clip=True)
    order, sentences = refine_order(clipped)
    norm = next(i for i, op in enumerate(clipped.operators) if op.name == "norm")
    updates = [i for i, op in enumerate(clipped.operators) if op.name == "adamw"]
    assert all(order.index(norm) < order.index(u) for u in updates)
    assert any("needs every gradient" in line and "norm" in line for line in sentences)


def test_a_damaged_plan_is_refused():
    plan = plan_memory(training_chain(), machine(), budget_bytes=9000)
    index = next(i for i, a in enumerate(plan.actions) if a.kind == "wait" and a.tier == "device")
    broken = replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :])
    with pytest.raises(MemoryPlanInvalid):
        _ = broken.replayed


@pytest.mark.parametrize(
    "actions",
    [
        (do("run", 1), do("run", 0)),  # use before it exists
        (do("run", 0),),  # an operator is missing
        (
            do("run", 0),
            do("detach", 0),
            do("run", 1),
        ),  # dropped, then used
        (
            do("run", 0),
            do("store", 0),
            do("detach", 0),
            do("run", 1),
        ),  # no wait
        (do("run", 0), do("run", 0), do("run", 1)),  # twice
        (
            do("run", 0),
            do("recompute", 0),
            do("run", 1),
        ),  # result still there
        (do("run", 0), do("run", 1)),  # `a` is never freed
    ],
)
def test_replay_refuses_illegal_actions(actions):
    storages = (Storage("a", 4, "activation"), Storage("y", 4, "output", False, True))
    ops = (Operator("f", (), (), (0,), repeatable=True), Operator("g", (0,), (), (1,)))
    program = MemoryProgram("p", storages, ops, 1)
    legal = (do("run", 0), do("run", 1), do("free", 0))
    assert MemoryPlan(program, ("device", "device"), legal, 0.0).peak_bytes["device"] == 8
    with pytest.raises(MemoryPlanInvalid):
        _ = MemoryPlan(program, ("device", "device"), actions, 0.0).replayed


def test_addresses_never_overlap_and_the_arena_is_tight():
    program = training_chain(layers=16, alignment=8)
    plan = plan_memory(program, machine(), budget_bytes=30_000)
    for i, a in enumerate(plan.addresses):
        for b in plan.addresses[:i]:
            if a.start < b.stop and b.start < a.stop:
                low, high = sorted((a, b), key=lambda e: e.offset_bytes)
                assert low.offset_bytes + program.sizes[low.storage] <= high.offset_bytes
    assert plan.arena_bytes <= 1.02 * plan.peak_bytes["device"]


@pytest.mark.parametrize("bytes_s", [300.0, 1000.0, 3000.0])
def test_a_link_that_is_slower_than_said_keeps_the_time_limit(bytes_s):
    program = training_chain()
    limit_s = program.seconds * 1.02 * (1 + 1e-9)
    plan = plan_memory(program, machine(bytes_s), max_slowdown=0.02)
    assert clocked(program, machine(bytes_s / 1.3), plan.actions).now_s <= limit_s
    assert plan.seconds == clocked(program, machine(bytes_s), plan.actions).now_s <= limit_s
    bare = plan_memory(program, machine(bytes_s), max_slowdown=0.02, bandwidth_margin=0.0)
    assert bare.peak_bytes["device"] <= plan.peak_bytes["device"]
    with pytest.raises(BadValue, match="bandwidth_margin"):
        plan_memory(program, machine(), max_slowdown=0.02, bandwidth_margin=-0.1)
    with pytest.raises(BadValue, match="max_slowdown"):
        plan_memory(program, machine(), max_slowdown=-0.1)


def decode(layers=40, weight=1000):
    """Return a step that reads every weight once, so a weight is idle only between two steps."""
    storages = [Storage("x", 8, "input", True, True)]
    storages += [Storage(f"w{i}", weight, "weight", True, True) for i in range(layers)]
    storages.append(Storage("y", 8, "output", False, True))
    ops = [Operator("mm", (0, i + 1), (), (), 1.0) for i in range(layers - 1)]
    ops.append(Operator("head", (0, layers), (), (layers + 1,), 1.0))
    return MemoryProgram("decode", tuple(storages), tuple(ops), 1)


def test_weights_of_a_decode_step_stream_in_a_ring():
    """The saving is close to the bytes that the link carries in the step, less two weights in flight or in use."""
    program, rate = decode(layers=100), 250.0
    carried = 1.02 * program.seconds * rate
    plan = plan_memory(program, machine(rate), max_slowdown=0.02, bandwidth_margin=0.0)
    saved = order_peak(program, range(len(program.operators))) - plan.peak_bytes["device"]
    assert 0.8 * carried <= saved <= carried
