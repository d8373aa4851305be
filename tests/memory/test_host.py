"""Optimizer updates in host memory: refusals of the replay, gains of the planner, and the lower bound."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir import MemoryAction, MemoryPlan, MemoryProgram, Operator, Storage, replay
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    order_peak,
    plan_memory,
    plan_memory_cached,
    predicted_timeline,
    refine_order,
    summarise,
)
from hyper_parallel.memory.bound import reload_bound
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit
do = MemoryAction


def machine(bytes_s=500.0, host_bytes_s=None, **kw):
    host = None if host_bytes_s is None else Roofline(1e12, host_bytes_s, 0.0)
    return MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0), host=host, **kw)


def chain(layers=6, weight=1500, **kw):
    """Updates read gradient, weight and state, and write the last two."""
    program = training_chain(layers=layers, act=400, weight=weight, **kw)
    moved = 7 * weight
    ops = tuple(replace(o, access_bytes=moved * (o.name == "adamw")) for o in program.operators)
    return replace(program, operators=ops)


def on_host(plan):
    return sum(action.kind == "update" for action in plan.actions)


STORAGES = (
    Storage("w", 8, "weight", True, True),
    Storage("m", 16, "optimizer", True, True),
    Storage("g", 8, "gradient"),
)
OPS = (
    Operator("backward", (0,), (), (2,)),
    Operator("adamw", (0, 1, 2), (0, 1), (), phase="optimizer"),
)
HOMES = ("dram", "dram", "device")
LEGAL = (
    do("prefetch", 0), do("wait", 0), do("run", 0), do("store", 2), do("detach", 0), do("update", 1),
    do("wait", 2, "dram"), do("detach", 2), do("join", 1), do("free", 2),
)  # fmt: skip


def without(*positions):
    return tuple(a for index, a in enumerate(LEGAL) if index not in positions)


def test_a_hand_written_update_is_counted_in_program_order():
    judged = replay(MemoryProgram("p", STORAGES, OPS, 1), HOMES, LEGAL)
    assert judged.peak_bytes == {"device": 16, "dram": 32, "flash": 0}  # the gradient is there once
    assert judged.copied_bytes["store"] == judged.copied_bytes["prefetch"] == 8


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        (without(3, 6), "`g` is not in dram"),
        (without(8), "an operator in host memory uses it"),  # freed under it
        (without(8, 9), "never joined"),
        (without(4), "wrong place"),  # a stale copy on the device
        ((*LEGAL[:5], *LEGAL[6:8], LEGAL[9]), "never runs"),
        ((*LEGAL[:6], do("update", 1), *LEGAL[6:]), "it ran before"),
        ((*LEGAL, do("join", 1)), "has ended"),
        ((*LEGAL[:4], do("update", 1), do("store", 0), *LEGAL[6:]), "no current content in device"),
        ((do("update", 1),), "`g` is not in dram"),
        ((*LEGAL[:6], do("prefetch", 0), do("run", 0)), "never ran|it ran before|not on the device"),
        ((*LEGAL[:6], do("detach", 1, "dram")), "an operator in host memory uses it"),
        ((*LEGAL[:6], do("wait", 2, "dram"), do("detach", 2, "dram")), "in host memory uses it"),
        ((do("update", 0),), "its results come to life on the device"),
    ],
)  # fmt: skip
def test_replay_refuses(actions, why):
    with pytest.raises(MemoryPlanInvalid, match=why):
        replay(MemoryProgram("p", STORAGES, OPS, 1), HOMES, actions)


def test_replay_refuses_what_would_race_with_a_copy():
    read = Operator("read", (0,), ())
    program = MemoryProgram("p", STORAGES, (*OPS, read), 1)
    early = (
        *LEGAL[:5],
        do("prefetch", 0),
        *LEGAL[5:],
    )  # on its way to the device when it is changed
    with pytest.raises(MemoryPlanInvalid, match="written while it is copied"):
        replay(program, HOMES, early)
    stale = (*LEGAL[:4], LEGAL[5], do("run", 2))  # the copy on the device is older than the update
    with pytest.raises(MemoryPlanInvalid, match="`w` is not on the device"):
        replay(program, HOMES, stale)
    behind = (
        *LEGAL[:6],
        do("prefetch", 0),
        do("wait", 0),
        do("run", 2),
        do("detach", 0),
        *LEGAL[6:],
    )
    assert replay(program, HOMES, behind).copied_bytes["prefetch"] == 16


@pytest.mark.parametrize("goal", ["budget", "peak"])
def test_a_slow_link_and_a_fast_host_gain(goal):
    program = chain()
    start = order_peak(program, range(len(program.operators)))
    wanted = {"budget_bytes": start // 3} if goal == "budget" else {"max_slowdown": 0.02}
    link = 500.0 if goal == "budget" else 2000.0
    alone = plan_memory(program, machine(link), **wanted)
    helped = plan_memory(program, machine(link, 50_000.0), **wanted)
    assert on_host(alone) == 0
    assert on_host(helped) > 0
    if goal == "budget":
        assert helped.seconds < 0.75 * alone.seconds
    else:
        assert helped.peak_bytes["device"] < 0.9 * alone.peak_bytes["device"]
        assert helped.seconds <= 1.02 * program.seconds
    assert any("update on host" in line for line in helped.statement)
    assert {c.what for c in helped.choices} >= {"update"}
    moved = helped.replayed.copied_bytes
    assert moved["store"] < alone.replayed.copied_bytes["store"] or goal == "peak"


def test_a_slow_host_changes_nothing():
    program = chain(layers=4, clip=True)
    for wanted in ({"budget_bytes": 15_000}, {"max_slowdown": 0.02}):
        alone = plan_memory(program, machine(4000.0), **wanted)
        assert plan_memory(program, machine(4000.0, 10.0), **wanted).actions == alone.actions


def test_after_clipping_updates_run_on_the_host_when_time_allows():
    program = chain(clip=True)
    plan = plan_memory(program, machine(4000.0, 1e6), budget_bytes=22_000)
    norm = next(i for i, op in enumerate(program.operators) if op.name == "norm")
    index = plan.actions.index(do("run", norm))
    assert on_host(plan) > 0
    assert all(k > index for k, a in enumerate(plan.actions) if a.kind == "update")


def test_the_host_is_one_serial_lane_beside_compute():
    program = chain()
    m = machine(2000.0, 20_000.0)
    plan = plan_memory(program, m, budget_bytes=16_000)
    timeline = predicted_timeline(plan, m)
    spans = [s for s in timeline.spans if s.lane == "host"]
    assert len(spans) == on_host(plan) > 1
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(spans))
    assert timeline.end_s == pytest.approx(plan.seconds, rel=1e-12)
    stores = {s.name: s.end_s for s in timeline.spans if s.lane == "store"}
    firsts = [a.target for a in plan.actions if a.kind == "update"]
    for span, index in zip(spans, firsts, strict=True):  # behind its gradient
        gradient = program.storages[program.operators[index].reads[-1]].name
        assert span.start_s >= stores[gradient]
    short = summarise(predicted_timeline(plan, m), plan)
    assert {s.name for s in short.spans if s.lane == "host"} == {"update"}


@pytest.mark.parametrize(("bytes_s", "host"), [(400.0, 50_000.0), (4000.0, 500.0)])
def test_no_plan_beats_the_bound(bytes_s, host):
    program = chain(layers=2, weight=1000)
    m = machine(bytes_s, host)
    order = refine_order(program)[0]
    limit_s = program.seconds * 1.02
    plan = plan_memory(program, m, max_slowdown=0.02, bandwidth_margin=0.0)
    peak = plan.peak_bytes["device"]
    assert reload_bound(program, m, order, limit_s, recompute=True).num_bytes <= peak


def test_state_that_does_not_fit_into_dram_is_updated_on_the_device():
    program = chain()
    small = machine(2000.0, 50_000.0, dram_bytes=5_000)
    plan = plan_memory(program, small, budget_bytes=30_000)
    assert plan.dram_bytes <= 5_000
    full = plan_memory(program, machine(2000.0, 50_000.0), budget_bytes=30_000)
    assert on_host(plan) < on_host(full)


def test_three_tiers_keep_updated_state_in_dram():
    program, disk = chain(), Channel(1000.0, 0)
    m = MemoryMachine(
        Channel(1e3, 0), Channel(1e3, 0), disk, disk, dram_bytes=30_000, host=Roofline(1e12, 5e4, 0)
    )
    plan = plan_memory(program, m, budget_bytes=12_000, recompute=False)
    assert on_host(plan) > 0
    assert plan.dram_bytes <= 30_000
    for action in plan.actions:
        if action.kind == "update":
            assert all(plan.homes[s] == "dram" for s in program.operators[action.target].writes)


def test_master_weights_are_updated_on_the_host_and_copied_on_the_device():
    """ZeRO-1: the operator behind the update needs its result on the device in the same step."""
    storages = (
        Storage("p", 1000, "weight", True, True),
        Storage("master", 2000, "optimizer", True, True),
        Storage("m", 4000, "optimizer", True, True),
        Storage("g", 2000, "gradient"),
        Storage("act", 6000, "activation"),
    )
    ops = (
        Operator("forward", (0,), (), (4,), 5.0),
        Operator("backward", (0, 4), (), (3,), 5.0, phase="backward"),
        Operator("adamw", (1, 2, 3), (1, 2), (), 0.1, access_bytes=14_000, phase="optimizer"),
        Operator("copy_", (1,), (0,), (), 0.1, phase="optimizer"),
    )
    program = MemoryProgram("zero", storages, ops, 1)
    m = machine(1000.0, 20_000.0)
    plan = plan_memory(program, m, budget_bytes=10_000)
    kinds = [(a.kind, a.target) for a in plan.actions]
    assert kinds.index(("update", 2)) < kinds.index(("prefetch", 1)) < kinds.index(("run", 3))
    alone = plan_memory(program, machine(1000.0), budget_bytes=10_000)
    assert plan.seconds < 0.8 * alone.seconds


def test_cached_and_written_plans_come_back(tmp_path):
    program, m = chain(), machine(2000.0, 20_000.0)
    planned = plan_memory_cached(program, m, cache=tmp_path, budget_bytes=16_000)
    cached = plan_memory_cached(program, m, cache=tmp_path, budget_bytes=16_000)
    assert on_host(planned) > 0
    assert cached == planned == MemoryPlan.from_json(planned.to_json())
    on_device = plan_memory_cached(program, machine(2000.0), cache=tmp_path, budget_bytes=16_000)
    assert on_host(on_device) == 0
