"""Collectives on a lane of their own: begun, joined, under computation, and in one order on every rank."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import BudgetImpossible, MemoryPlanInvalid, TierFull
from hyper_parallel.ir import MemoryAction, MemoryPlan, MemoryProgram, Operator, Storage, replay
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    clocked,
    dependencies,
    identity_actions,
    order_peak,
    order_seconds,
    overlapped,
    plan_memory,
    predicted_timeline,
    refine_order,
    summarise,
)
from tests.memory.test_random_programs import check, machines, programs

pytestmark = pytest.mark.unit

MACHINE = MemoryMachine(Channel(1e6, 0.0), Channel(1e6, 0.0))


def sharded_chain(layers=4, comm_s=1.0, size=100):
    """Layers whose weight is gathered, used and dropped; gradients that are scattered and used at the end."""
    storages, ops = [Storage("x", 10, "input", True, True)], []

    def new(name, num_bytes, kind="activation", start=False, end=False):
        storages.append(Storage(name, num_bytes, kind, start, end))
        return len(storages) - 1

    def gathered(i):
        whole = new(f"whole{i}", size, "scratch")
        ops.append(Operator("empty", (), (), (whole,)))
        ops.append(Operator("copy_in", (shards[i], whole), (whole,), seconds=0.01))
        ops.append(Operator("gather", (whole,), (whole,), comm_s=comm_s, group="dp", ordered=True))
        return whole

    shards = [new(f"shard{i}", size // 4, "weight", True, True) for i in range(layers)]
    h, saved = 0, []
    for i in range(layers):
        whole, y = gathered(i), new(f"y{i}", 10)
        ops.append(Operator("mm", (h, whole), (), (y,), 2.0, flops=1.0))
        saved.append(h)
        h = y
    parts, ahead = [], gathered(layers - 1)
    for i in reversed(range(layers)):
        whole, ahead = ahead, gathered(i - 1) if i else 0  # as FSDP records it: one ahead
        grad, part = new(f"grad{i}", size), new(f"part{i}", size // 4)
        ops.append(Operator("dw", (saved[i], whole, h), (), (grad,), 2.0, flops=1.0, phase="backward"))
        ops.append(Operator("empty", (), (), (part,), phase="backward"))
        ops.append(
            Operator(
                "scatter",
                (part, grad),
                (part,),
                comm_s=comm_s,
                group="dp",
                ordered=True,
                phase="backward",
            )
        )
        ops.append(Operator("div", (part,), (part,), seconds=0.01, phase="backward"))
        parts.append((i, part))
    for i, part in parts:
        ops.append(Operator("adamw", (shards[i], part), (shards[i],), seconds=0.1, phase="optimizer"))
    return MemoryProgram("sharded", tuple(storages), tuple(ops), 1)  # fmt: skip


def seconds(program, order):
    clock = clocked(program, MACHINE, identity_actions(program, order))
    assert clock.now_s == order_seconds(program, order)
    return clock.now_s


def comm_order(program, order):
    return [i for i in order if program.operators[i].group]


def pair():
    """Return a program of two operands, a gather between them, and the use of its result."""
    storages = tuple(Storage(name, 8, "activation") for name in "abcd")
    ops = (
        Operator("make", (), (), (0,), 1.0),
        Operator("gather", (0,), (), (1,), comm_s=3.0, group="dp", ordered=True),
        Operator("other", (0,), (), (2,), 2.0),
        Operator("use", (1, 2), (), (3,), 1.0),
    )
    return MemoryProgram("pair", storages, ops, 1)


def walk(program, *actions):
    return replay(program, program.on_device, [MemoryAction(*a) for a in actions])


FREE = tuple(("free", s) for s in (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ((("run", 0), ("run", 1), ("run", 2), ("run", 3)), "in use by a collective in flight"),
        ((("run", 0), ("run", 1), ("free", 0)), "in use by a collective in flight"),
        ((("run", 0), ("run", 1), ("store", 1)), "in use by a collective in flight"),
        ((("run", 0), ("run", 1), ("detach", 1)), "in use by a collective in flight"),
        ((("run", 0), ("join", 1)), "not started"),
        ((("run", 0), ("run", 1), ("join", 1), ("join", 1)), "not started"),
    ],
)
def test_what_other_ranks_use_is_not_touched(actions, text):
    with pytest.raises(MemoryPlanInvalid, match=text) as caught:
        walk(pair(), *actions)
    assert "HP404" in str(caught.value)


def test_what_other_ranks_read_is_not_written_and_a_step_does_not_end_before_them():
    program = pair()
    changed = replace(program.operators[2], writes=(0,))
    program = replace(program, operators=(*program.operators[:2], changed, program.operators[3]))
    with pytest.raises(MemoryPlanInvalid, match="in use by a collective in flight"):
        walk(program, ("run", 0), ("run", 1), ("run", 2))
    short = replace(program, operators=program.operators[:2])
    with pytest.raises(MemoryPlanInvalid, match="no action joins the collective"):
        walk(short, ("run", 0), ("run", 1))


def test_reading_what_is_sent_is_legal_and_its_bytes_count_until_the_join():
    program = pair()
    run = [("run", 0), ("run", 1), ("run", 2), ("join", 1), ("run", 3)]
    replayed = walk(program, *run, *FREE)
    assert replayed.profile[2] == 24
    assert identity_actions(program, range(4))[:4] == tuple(MemoryAction(*a) for a in run[:4])


def test_the_clock_has_a_lane_for_communication():
    program = pair()
    plan = MemoryPlan(program, program.on_device, identity_actions(program, range(4)), 5.0)
    clock = clocked(program, MACHINE, plan.actions)
    # The gather takes 3 s from second 1, beside 2 s of computation.
    assert (clock.now_s, clock.join_s, clock.wait_s) == (5.0, 1.0, 0.0)
    timeline = summarise(predicted_timeline(plan, MACHINE), plan)
    (span,) = [s for s in timeline.spans if s.lane == "communication"]
    assert (span.name, span.start_s, span.duration_s) == ("gather", 1.0, 3.0)
    assert sum(s.duration_s for s in timeline.spans if s.name == "wait") == 1.0


def test_gathers_are_begun_under_computation_and_scatters_are_waited_for_late():
    program = sharded_chain()
    recorded = tuple(range(len(program.operators)))
    order = overlapped(program, recorded, 1)
    assert comm_order(program, order) == comm_order(program, recorded)
    # All but the first gather and the last scatter are hidden; the last gather of forward is begun again at once.
    assert seconds(program, recorded) > program.seconds + 6.5
    assert seconds(program, order) <= program.seconds + 2.0 + 1e-9
    # One gather ahead costs the bytes of one gathered weight, not of all.
    ahead = order_peak(program, order) - order_peak(program, recorded)
    assert 0 <= ahead <= 100 + 25


def test_a_budget_decides_how_early_collectives_are_begun():
    program = sharded_chain(comm_s=1.9)
    recorded = tuple(range(len(program.operators)))
    free = plan_memory(program, MACHINE, budget_bytes=10**6)
    assert free.seconds < seconds(program, recorded) - 5
    tight = plan_memory(program, MACHINE, budget_bytes=order_peak(program, recorded) - 50)
    assert tight.device_bytes <= order_peak(program, recorded) - 50
    assert tight.seconds > free.seconds
    assert any("communication: recorded order" in line for line in tight.statement)
    fixed = plan_memory(program, MACHINE, budget_bytes=10**6, reorder=False)
    assert [a.target for a in fixed.actions if a.kind == "run"] == list(recorded)


def test_what_needs_a_message_stays_behind_what_was_begun_before_it():
    """Otherwise two ranks could wait for each other."""
    storages = tuple(Storage(name, 8, "activation") for name in "abcd")
    ops = (
        Operator("empty", (), (), (0, 1)),
        Operator("recv_", (0,), (0,), comm_s=1.0, group="pp", ordered=True, message=True),
        Operator("reduce", (1,), (1,), comm_s=1.0, group="dp", ordered=True),
        Operator("use", (0,), (), (2,), 1.0),
    )
    assert 2 in dependencies(MemoryProgram("messages", storages, ops, 1))[3]


def test_what_was_sent_is_waited_for_at_the_end_of_the_messages():
    """The send is joined neither before its receiver has begun nor after its bytes are released."""
    storages = tuple(Storage(name, 8, "activation") for name in "ab")
    ops = (
        Operator("make", (), (), (0,), 1.0),
        Operator("send", (0,), comm_s=0.1, group="pp", ordered=True, message=True),
        Operator("other", (0,), (), (1,), 5.0),
        Operator("sent", (0,), ordered=True, message=True),
        Operator("last", (1,), (1,), (), 1.0),
    )
    actions = identity_actions(MemoryProgram("messages", storages, ops, 1), range(5))
    assert [(a.kind, a.target) for a in actions] == [
        ("run", 0), ("run", 1), ("run", 2), ("join", 1), ("run", 3), ("free", 0), ("run", 4), ("free", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("message", [False, True])
def test_what_other_ranks_still_read_is_not_made_again(message):
    """`a` and `b` are results of one operator. While others read `a`, making `b` again would make `a` again.

    A collective is waited for. A message is not: its peer may be late, so `b` stays.
    """
    storages = (
        Storage("w", 8, "weight", True, True),
        Storage("a", 8, "activation"),
        Storage("b", 80, "activation"),
        Storage("wide", 100, "scratch"),
        Storage("out", 8, "output", False, True),
    )
    ops = (
        Operator("make", (0,), (), (1, 2), 0.1, repeatable=True),
        Operator("share", (1,), comm_s=9.0, group="dp", ordered=True, message=message),
        Operator("other", (0,), (), (3,), 10.0),
        Operator("use", (2,), (), (4,), 1.0),
        Operator("shared", (1,), ordered=True, message=message),
    )
    plan = plan_memory(
        MemoryProgram("twins", storages, ops, 1),
        MemoryMachine(Channel(1.0), Channel(1.0)),
        max_slowdown=0.5,
        reorder=False,
    )
    kinds = [(a.kind, a.target) for a in plan.actions]
    if message:
        assert kinds.index(("run", 3)) < kinds.index(("join", 1))
        assert ("recompute", 0) not in kinds
    else:
        assert kinds.index(("join", 1)) < kinds.index(("recompute", 0))


def test_what_other_ranks_still_read_is_there_for_a_recomputation():
    """`wide` is recomputed from `small`, which dies with the collective: a wait for room must not release it."""
    storages = (
        Storage("out", 443, "activation", False, True),
        Storage("small", 53, "activation"),
        Storage("wide", 210, "activation", False, True),
        Storage("other", 191, "activation", False, True),
        Storage("sent", 222, "activation"),
    )
    ops = (
        Operator("out", (), (), (0,), ordered=True),
        Operator("small", (), (), (1,), repeatable=True, ordered=True),
        Operator("wide", (1,), (), (2,), repeatable=True, ordered=True),
        Operator("other", (), (), (3,), ordered=True),
        Operator("work", (), (), (), 1.0, phase="backward"),
        Operator("sent", (), (), (4,), phase="backward"),
        Operator("share", (4, 1), comm_s=2.0, group="dp", ordered=True, phase="backward"),
        Operator("last", (), (2,), (), 1.0, phase="optimizer"),
    )
    program = MemoryProgram("shared input", storages, ops, 16)
    machine = MemoryMachine(Channel(2000.0, 0.0), Channel(20.0, 0.05))
    check(plan_memory(program, machine, max_slowdown=0.38), program, machine)


def test_a_copy_for_a_recomputation_that_is_not_needed_ends_before_its_bytes_go():
    """`made` is to be recomputed from `kept`, reloaded for it, but other ranks use `made` so long that it stays."""
    storages = (
        Storage("kept", 287, "activation", False, True),
        Storage("gradient", 266, "activation"),
        Storage("part", 0, "activation", False, True),
        Storage("made", 86, "activation", False, True),
        Storage("sum", 0, "activation", False, True),
        Storage("whole", 181, "activation", False, True),
    )
    ops = (
        Operator("gather", (), (), (0,), group="dp", ordered=True),
        Operator("share", comm_s=2.0, group="dp", ordered=True, phase="backward"),
        Operator("work", (), (), (1,), ordered=True, phase="backward"),
        Operator("part", (), (), (2,), comm_s=0.5, group="dp", ordered=True, phase="backward"),
        Operator("into", (1,), (2,), (), phase="backward"),
        Operator("make", (0,), (), (3,), repeatable=True, ordered=True, phase="optimizer"),
        Operator("sum", (), (), (4,), comm_s=0.5, group="dp", ordered=True, phase="optimizer"),
        Operator("add", (3,), (4,), (), phase="optimizer"),
        Operator("whole", (3,), (), (5,), group="dp", ordered=True, phase="optimizer"),
    )
    program = MemoryProgram("not made again", storages, ops, 1)
    machine = MemoryMachine(Channel(200.0, 0.0), Channel(20.0, 0.0))
    check(plan_memory(program, machine, max_slowdown=0.281), program, machine)


def test_an_input_of_a_recomputation_that_is_not_needed_is_freed():
    """`first` is retained to recompute `made`, which other ranks use so long that it is still resident."""
    sizes = {
        "state": 100, "first": 100, "other": 200, "made": 200, "sent": 200, "a": 200, "b": 200, "far": 200,
        "sum": 220, "c": 200, "d": 100, "end": 0,
    }  # fmt: skip
    n = {name: s for s, name in enumerate(sizes)}
    storages = tuple(
        Storage(k, size, "weight" if k == "state" else "activation", k == "state", k in ("state", "sum", "end"))
        for k, size in sizes.items()
    )  # fmt: skip

    def op(name, reads, allocs, seconds=0.0, **more):
        return Operator(name, tuple(n[s] for s in reads), (), tuple(n[s] for s in allocs), seconds, **more)

    ops = (
        op("first", (), ("first",)),
        op("other", (), ("other",)),
        op("make", ("first",), ("made",), 1.0, phase="backward", repeatable=True),
        op("send", ("other",), ("sent",), phase="backward"),
        op("split", ("made",), ("a", "b"), phase="backward", repeatable=True),
        op("share", ("first",), ("far",), comm_s=2.0, group="dp", phase="backward"),
        op("sum", ("sent", "made"), ("sum",), group="dp", phase="optimizer"),
        op("work", ("first", "state", "b"), ("c", "d"), 1.0, phase="optimizer"),
        op("end", ("sum", "b"), ("end",), phase="optimizer"),
    )
    program, lane = MemoryProgram("spared", storages, ops, 1), Channel(20.0, 0.0)
    machine = MemoryMachine(lane, lane, lane, lane, dram_bytes=200)
    budget = int(0.45 * order_peak(program, range(len(ops))))
    with pytest.raises((BudgetImpossible, TierFull)):
        plan_memory(program, machine, budget_bytes=budget)


@st.composite
def communicating(draw):
    """A random program in which other ranks take part in some operators."""
    program = draw(programs())
    ops = []
    for op in program.operators:
        if draw(st.integers(0, 2)) == 0:
            kind = draw(st.sampled_from(["collective", "collective", "message"]))
            comm_s = draw(st.sampled_from([0.0, 0.5, 2.0]))
            op = replace(
                op, seconds=0.0, comm_s=comm_s, group="dp", ordered=True, repeatable=False,
                message=kind == "message",
            )  # fmt: skip
        ops.append(op)
    return replace(program, operators=tuple(ops))


@settings(max_examples=60, deadline=None)
@given(communicating(), st.sampled_from([0, 1, 2]), st.booleans())
def test_any_order_keeps_dependencies_and_what_ranks_do_together(program, depth, refined):
    order = refine_order(program)[0] if refined else tuple(range(len(program.operators)))
    reordered = overlapped(program, order, depth)
    place = {index: position for position, index in enumerate(reordered)}
    assert sorted(reordered) == list(range(len(program.operators)))
    for index, before in enumerate(dependencies(program)):
        assert all(place[p] < place[index] for p in before)
    assert comm_order(program, reordered) == comm_order(program, range(len(program.operators)))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(communicating(), machines(), st.floats(0.3, 1.1), st.booleans())
def test_any_plan_is_legal(program, machine, share, budgeted):
    goal = {"max_slowdown": share - 0.3}
    if budgeted:
        whole = order_peak(program, range(len(program.operators)))
        goal = {"budget_bytes": int(whole * share)}
    try:
        plan = plan_memory(program, machine, **goal)
    except (BudgetImpossible, TierFull):
        return
    check(plan, program, machine)
    ran = [a.target for a in plan.actions if a.kind == "run"]
    assert comm_order(program, ran) == comm_order(program, range(len(program.operators)))
    if budgeted:
        assert plan.peak_bytes["device"] <= goal["budget_bytes"]
