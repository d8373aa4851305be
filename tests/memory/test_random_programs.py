"""Random programs: whatever the shape, a plan is legal (replay), keeps its promise, and its clock agrees."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import BudgetImpossible, TierFull
from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    dependencies,
    order_peak,
    plan_memory,
    predicted_timeline,
    refine_order,
    working_set_bytes,
)

pytestmark = pytest.mark.unit


@st.composite
def programs(draw):
    """Operators that read, write in place and make storages, in three phases, some of them repeatable."""
    storages, ops = [], []
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["weight", "optimizer", "kv", "input"]))
        storages.append(Storage(f"p{i}", draw(st.integers(0, 300)), kind, True, True))
    count = draw(st.integers(3, 24))
    for i in range(count):
        alive = list(range(len(storages)))
        reads = draw(st.lists(st.sampled_from(alive), min_size=1, max_size=3, unique=True))
        makes = draw(st.booleans()) or i == 0
        writes = () if makes else tuple(reads[:1])
        allocs = ()
        if makes:
            last = draw(st.integers(0, 9)) == 0
            kind = draw(st.sampled_from(["activation", "gradient"]))
            several = 1 + (draw(st.integers(0, 3)) == 0)
            storages += [Storage(f"s{i}", draw(st.integers(0, 300)), kind, False, last) for _ in range(several)]
            allocs = tuple(range(len(storages) - several, len(storages)))
        ops.append(
            Operator(
                f"op{i}",
                tuple(reads),
                writes,
                allocs,
                seconds=draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])),
                phase=("forward", "backward", "optimizer")[3 * i // count],
                repeatable=makes and draw(st.booleans()),
                ordered=draw(st.integers(0, 7)) == 0,
            )
        )
    unit = draw(st.sampled_from([1, 16]))
    return MemoryProgram("random", tuple(storages), tuple(ops), unit)


@st.composite
def machines(draw):
    speed = st.sampled_from([20.0, 200.0, 2000.0])
    latency = st.sampled_from([0.0, 0.05])
    channels = [Channel(draw(speed), draw(latency)) for _ in range(4)]
    if draw(st.booleans()):
        return MemoryMachine(*channels[:2])
    return MemoryMachine(*channels, dram_bytes=draw(st.integers(200, 1500)))


def check(plan, program, machine):
    assert replace(plan).replayed == plan.replayed  # replays every action
    assert predicted_timeline(plan, machine).end_s <= plan.seconds + 1e-9
    assert plan.peak_bytes["device"] >= working_set_bytes(program)
    for i, a in enumerate(plan.addresses):
        size = program.sizes[a.storage]
        assert a.offset_bytes >= 0
        assert a.offset_bytes + size <= plan.arena_bytes
        for b in plan.addresses[:i]:
            if a.start < b.stop and b.start < a.stop and size and program.sizes[b.storage]:
                low, high = sorted((a, b), key=lambda e: e.offset_bytes)
                assert low.offset_bytes + program.sizes[low.storage] <= high.offset_bytes


@settings(max_examples=20, deadline=None)
@given(programs(), machines(), st.floats(0.0, 1.0), st.booleans())
def test_least_peak(program, machine, slowdown, recompute):
    plan = plan_memory(program, machine, max_slowdown=slowdown, recompute=recompute)
    check(plan, program, machine)
    assert plan.seconds <= program.seconds * (1 + slowdown) + 1e-9
    assert plan.peak_bytes["device"] <= order_peak(program, range(len(program.operators)))
    if machine.dram_bytes is not None:
        assert plan.peak_bytes["dram"] <= plan.dram_bytes <= machine.dram_bytes


@settings(max_examples=20, deadline=None)
@given(programs(), machines(), st.floats(0.3, 1.1))
def test_least_time_under_a_budget(program, machine, share):
    budget = int(order_peak(program, range(len(program.operators))) * share)
    try:
        plan = plan_memory(program, machine, budget_bytes=budget)
    except (BudgetImpossible, TierFull):
        return
    check(plan, program, machine)
    assert plan.peak_bytes["device"] <= budget
    assert machine.dram_bytes is None or plan.dram_bytes <= machine.dram_bytes


@settings(max_examples=100, deadline=None)
@given(programs())
def test_a_new_order_keeps_every_dependency(program):
    order, _ = refine_order(program)
    assert sorted(order) == list(range(len(program.operators)))
    place = {index: position for position, index in enumerate(order)}
    for index, before in enumerate(dependencies(program)):
        assert all(place[p] < place[index] for p in before)
