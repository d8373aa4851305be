"""The search against brute force, its bounds, its certificate, and the partition of layers."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.cost import partition
from hyper_parallel.errors import BadValue, DeadlineMissed, DoesNotFit, NoLegalStrategy
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan, plan_tasks, simulate_plan
from hyper_parallel.planner.bounds import join, tuples
from hyper_parallel.planner.pins import check_pins
from hyper_parallel.planner.pricing import price
from hyper_parallel.planner.refinement import find_best
from hyper_parallel.planner.request import HostMemory, resolve
from hyper_parallel.sim import simulate
from tests.cost.machines import machine, small_model
from tests.planner.draws import draw_case
from tests.planner.exhaustive import closed_forms, least, least_refined
from tests.slow import slow_cells

pytestmark = pytest.mark.unit


@slow_cells(*range(9, 18))
@pytest.mark.parametrize("seed", range(18))
def test_search_equals_brute_force(seed, few_orders):
    model, supernode, workload, devices = draw_case(seed)
    request = resolve(model, supernode, workload, devices)
    best = least(request)
    outcome = find_best(request)
    assert outcome.fits == np.isfinite(best)
    if outcome.fits:
        assert outcome.search.rows["per_token_s"].min() == pytest.approx(best, rel=1e-9)
        assert outcome.ranked[0].memory_bytes <= request.machine.memory_bytes * (1 + 1e-6)
        # Nothing was left open.
        assert outcome.search.bound >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", [1, 8])
def test_search_of_all_orders_equals_brute_force(seed):
    model, supernode, _, _ = draw_case(seed)
    inner = dataclasses.replace(supernode.tiers[0], size=2)
    supernode = dataclasses.replace(supernode, tiers=(inner, supernode.tiers[1]))
    request = resolve(model, supernode, Workload(512, 512 * 4), 4)
    request = dataclasses.replace(request, pins=check_pins({"microbatch": 1, "zero": 3}))
    best, outcome = least(request), find_best(request)
    assert outcome.search.rows["per_token_s"].min() == pytest.approx(best, rel=1e-9)
    priced = join([outcome.search.rows, outcome.search.slower])
    assert len({*priced["order"].tolist()}) > 1


@slow_cells(*range(4, 8))
@pytest.mark.parametrize("seed", range(8))
def test_search_with_offload_equals_brute_force(seed, few_orders):
    model, supernode, workload, devices = draw_case(seed)
    draw = random.Random(seed + 1000)
    host = HostMemory(draw.choice([2e8, 1e12]), draw.choice([1e10, 5e10, 4e11]), draw.random() < 0.6)
    budget = draw.choice([1.03, 1.04, 1.06, 1.08]) * 2**30
    request = resolve(model, supernode, workload, devices)
    request = dataclasses.replace(request, offload=host, capacity_bytes=budget)
    request = dataclasses.replace(request, executable=bool(seed % 2))
    outcome = find_best(request)
    best = outcome.search.rows["per_token_s"].min()
    assert best == pytest.approx(least(request), rel=1e-9)
    assert outcome.search.bound >= best * (1 - 1e-9)
    chosen = outcome.ranked[0]
    assert chosen.memory_bytes <= request.machine.memory_bytes * (1 + 1e-6)
    # What is away, or dropped, is what the device lacks.
    whole = price(request, dataclasses.replace(chosen.strategy, offload=False), chosen.workload)
    if whole.memory_bytes > request.machine.memory_bytes:
        assert chosen.strategy.offload
        assert chosen.memory_bytes == pytest.approx(request.machine.memory_bytes, rel=1e-3)


@slow_cells("1-pins0")
@pytest.mark.parametrize(
    ("seed", "pins"),
    [
        (1, {"tp": 1, "zero": 3, "microbatch": 1}),
        (2, {"cp": 1, "tp": 1, "dp_replicate": 1, "microbatch": 1}),
        (3, {"cp": 1, "tp_y": 1, "zero": 3, "microbatch": 1, "recompute": "none"}),
        (4, {"pp": 2, "zero": 2, "cp": 1}),
    ],
)
def test_refined_search_equals_refined_brute_force(seed, pins, few_orders):
    model, supernode, workload, devices = draw_case(seed)
    supernode = dataclasses.replace(supernode, pools=())
    devices = 4
    workload = Workload(512, 512 * 16)
    request = resolve(model, supernode, workload, devices)
    request = dataclasses.replace(request, pins=check_pins(pins))
    best = least_refined(request)
    outcome = find_best(request)
    assert outcome.fits == np.isfinite(best)
    if outcome.fits:
        assert outcome.ranked[0].per_token_s == pytest.approx(best, rel=1e-9)


def test_executable_search_equals_brute_force():
    request = resolve(small_model(), machine(memory_gib=1.35), Workload(512, 512 * 16), 8)
    request = dataclasses.replace(request, executable=True)
    outcome = find_best(request)
    best = outcome.search.rows["per_token_s"].min()
    assert best == pytest.approx(least(request), rel=1e-9)


def test_runners_up_are_the_next_best_degrees(few_orders):
    request = resolve(small_model(), machine(), Workload(512, 512 * 8), 4)
    rows, found = closed_forms(request)
    values = np.min([v for v, _, _ in found], axis=0)
    best: dict[tuple[int, ...], float] = {}
    for row, value in zip(rows[:, [0, 1, 2, 3, 4, 5, 8]].astype(int).tolist(), values, strict=True):
        best[tuple(row)] = min(value, best.get(tuple(row), np.inf))
    wanted = sorted(best.values())[:6]
    outcome = find_best(request, keep=6)
    rows = outcome.search.rows
    closest: dict[tuple[int, ...], float] = {}
    for mesh, value in zip(tuples(rows), rows["per_token_s"], strict=True):
        closest[mesh] = min(value, closest.get(mesh, np.inf))
    got = sorted(closest.values())[:6]
    assert got == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_small_nodes_are_proved():
    # Nodes of 8 under a model whose states need hundreds of devices: many orders, many ways to shard.
    found = plan("deepseek-v3", "dgx-h100", num_devices=2048).certificate
    assert found.gap == 0.0
    assert found.bound == pytest.approx(found.value, rel=1e-9)


def test_two_searches_give_the_same_plan():
    first, second = (plan("llama-3-8b", "dgx-h100", num_devices=16) for _ in range(2))
    assert first == second


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    parts=st.integers(1, 5),
    last=st.integers(0, 12),
)
def test_partition_is_the_best_of_all(costs, parts, last):
    parts = min(parts, len(costs))

    def slowest(cuts):
        bounds = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[-1] += last
        return max(sums)

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
    got = partition([float(c) for c in costs], parts, last=float(last))
    assert len(got) == parts
    assert min(got) >= 1
    assert sum(got) == len(costs)
    assert slowest(list(itertools.accumulate(got))[:-1]) == best


def test_certificate_pareto_and_sensitivity():
    chosen = plan("llama-3-70b", "cloudmatrix384", num_devices=64)
    proof = chosen.certificate
    assert proof is not None
    assert proof.value == chosen.step_s
    assert proof.gap == pytest.approx(0.0, abs=1e-9)
    assert proof.priced > 0
    front = [
        (chosen.step_s, chosen.memory_bytes),
        *((a.step_s, a.memory_bytes) for a in chosen.pareto),
    ]
    for (fast, large), (slow, small) in itertools.pairwise(front):
        assert slow >= fast * (1 - 1e-9)
        assert small < large
    for one in chosen.sensitivity:
        assert 0.5 <= one.factor <= 2.0
        assert one.factor != 1.0


def test_pins_exclusions_and_choices():
    chosen = plan(
        "llama-3-70b", "cloudmatrix384", num_devices=64,
        pins={"tp": 8, "schedule": "interleaved", "pp": 4, "zero": 1}, exclude=("cp",),
    )  # fmt: skip
    s = chosen.strategy
    assert (s.tp, s.pp, s.schedule, s.cp, s.zero) == (8, 4, "interleaved", 1, 1)
    assert s.virtual_stages > 1
    with pytest.raises(BadValue):
        plan("llama-3-8b", machine(), pins={"schedule": "fastest"})
    with pytest.raises(BadValue):
        plan("llama-3-8b", machine(), pins={"cp": 2}, exclude=("cp",))


@pytest.mark.parametrize("objective", ["memory", "fewest-devices"])
def test_a_deadline_needs_the_tokens_of_a_step_and_may_be_zero(objective):
    workload = Workload(512, microbatch=1, accumulation_steps=4)
    asked = {"num_devices": 16, "objective": objective}
    with pytest.raises(BadValue, match="tokens per step") as caught:
        plan(small_model(), machine(), workload, deadline_s=1e-6, **asked)
    assert caught.value.hint == "tokens_per_step=32768"
    with pytest.raises(DeadlineMissed):
        plan(small_model(), machine(), Workload(512, 32768), deadline_s=0.0, **asked)


@pytest.mark.parametrize(
    ("name", "value"), [("memory_headroom", 1.5), ("memory_headroom", -1.0), ("num_devices", 0), ("num_devices", -8)]
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(BadValue) as caught:
        plan(small_model(), machine(), **{name: value})
    assert caught.value.where == name


@pytest.mark.slow
def test_objectives():
    model, supernode, workload = small_model(), machine(), Workload(512, 512 * 64)
    fast = plan(model, supernode, workload, num_devices=16)
    lean = plan(model, supernode, workload, num_devices=16, objective="memory")
    assert lean.memory_bytes < fast.memory_bytes
    within = plan(model, supernode, workload, num_devices=16, objective="memory", deadline_s=fast.step_s * 1.2)
    assert within.step_s <= fast.step_s * 1.2
    assert within.memory_bytes <= fast.memory_bytes
    thrifty = plan(model, supernode, workload, num_devices=16, objective="tokens-per-device-second")
    rate = 1 / (thrifty.step_s * thrifty.strategy.world_size)
    assert rate >= 1 / (fast.step_s * 16) * (1 - 1e-9)
    few = plan(
        model, supernode, workload, num_devices=16, objective="fewest-devices",
        deadline_s=fast.step_s * 3,
    )  # fmt: skip
    assert few.step_s <= fast.step_s * 3
    fewer = few.strategy.world_size // 2
    if fewer:
        half = plan(model, supernode, workload, num_devices=fewer)
        assert half.step_s > fast.step_s * 3
    with pytest.raises(DeadlineMissed) as caught:
        plan(model, supernode, workload, num_devices=16, objective="fewest-devices", deadline_s=1e-6)
    assert caught.value.hint is not None
    reachable = float(caught.value.hint.removeprefix("deadline_s="))
    plan(model, supernode, workload, num_devices=16, objective="fewest-devices", deadline_s=reachable)


def test_a_pinned_microbatch_that_is_too_large_is_named():
    with pytest.raises(DoesNotFit) as caught:
        plan(
            "llama-3-8b", machine(memory_gib=16), Workload(8192, 8192 * 128), num_devices=8,
            pins={"microbatch": 16, "recompute": "none", "tp": 1, "cp": 1, "pp": 1},
        )  # fmt: skip
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pins", "why"),
    [({"tp": 7}, "tp=7 does not divide 64 devices"), ({"ep": 8}, "ep=8, but the model has no experts")],
)  # fmt: skip
def test_pins_that_nothing_can_have_are_named_first(pins, why):
    with pytest.raises(NoLegalStrategy, match=why):
        plan("llama-3-8b", "dgx-h100", num_devices=64, pins=pins)


@pytest.mark.parametrize(
    "pins",
    [
        {"gathered_inputs": 1, "tp": 4, "pp": 1, "cp": 1},
        {"attention_scatter": 1, "tp_x": 2, "tp_y": 2, "attention_shape": 1, "mlp_shape": 1},
        {"cp": 4, "cp_kind": 3},
    ],
)
def test_choices_that_are_pinned_have_their_own_price(pins):
    """The search sorts by the cost of the strategy, which differs from the price of the usual choice."""
    request = resolve("llama-3-8b", "dgx-h100", Workload(8192, 2**20), 16)
    outcome = find_best(dataclasses.replace(request, pins=pins))
    best = outcome.ranked[0]
    assert best.per_token_s == pytest.approx(outcome.search.rows["per_token_s"].min())
    workload = Workload(8192, 2**20, best.workload.microbatch)
    again = plan("llama-3-8b", "dgx-h100", workload, strategy=best.strategy)
    assert again.step_s == pytest.approx(best.step_s)
    usual = Strategy()
    names = ("gathered_inputs", "attention_scatter", "cp_kind")
    other = dataclasses.replace(best.strategy, **{n: getattr(usual, n) for n in names})
    assert plan("llama-3-8b", "dgx-h100", workload, strategy=other).step_s != again.step_s


@slow_cells("8-4-pins0-head", "6-2-pins2-token")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "pins", "scatter"),
    [
        (8, 4, {"tp_x": 4, "tp_y": 1}, "head"),
        (8, 4, {"tp": 4, "pp": 1, "recompute": "none"}, "head"),
        # Heads do not divide over 2 x 2 ranks.
        (6, 2, {"tp_x": 2, "tp_y": 2, "cp": 1, "attention_shape": "2d"}, "token"),
    ],
)
def test_inputs_gathered_again_and_scattered_tokens_equal_brute_force(heads, kv_heads, pins, scatter, few_orders):
    """Devices from ones on which next to nothing fits to ones on which all inputs can be kept."""
    model, workload = small_model(3, 32 * heads, heads, kv_heads), Workload(4096, 4096 * 8)
    chosen = []
    for gib in np.linspace(1.05, 1.3, 6):
        request = resolve(model, machine(memory_gib=float(gib)), workload, 8)
        for executable in (False, True):
            request = dataclasses.replace(request, pins=check_pins(pins), executable=executable)
            best, outcome = least(request), find_best(request)
            assert outcome.fits == np.isfinite(best)
            if outcome.fits:
                first = outcome.search.rows["per_token_s"].min()
                assert first == pytest.approx(best, rel=1e-9)
                chosen.append(outcome.ranked[0].strategy)
    assert {s.gathered_inputs for s in chosen} == {"keep", "re-gather"}
    assert {s.attention_scatter for s in chosen} == {scatter}


def test_gathering_again_is_chosen_pinned_excluded_and_told():
    asked = {"topology": "dgx-h100", "num_devices": 16}
    pins = {"tp_x": 2, "tp_y": 2, "pp": 1, "cp": 1, "zero": 2}
    free = plan("llama-3-8b", pins=pins, **asked)
    assert free.strategy.gathered_inputs == "re-gather"
    assert any("inputs are re-gathered because it is the fastest" in note for note in free.notes)
    assert "gathered_inputs=re-gather" in str(free.strategy)
    kept = plan("llama-3-8b", pins=pins, exclude=["gathered_inputs"], **asked)
    assert kept.strategy.gathered_inputs == "keep"
    assert free.step_s < kept.step_s
    again = plan("llama-3-8b", pins={**pins, "gathered_inputs": "re-gather"}, **asked)
    assert again.strategy == free.strategy
    assert not any("inputs are re-gathered because it is the fastest" in note for note in again.notes)
    with pytest.raises(BadValue, match="excluded and pinned"):
        plan(
            "llama-3-8b",
            pins={**pins, "gathered_inputs": "re-gather"},
            exclude=["gathered_inputs"],
            **asked,
        )
    with pytest.raises(BadValue):
        plan("llama-3-8b", pins={"gathered_inputs": "twice"}, **asked)


def test_pinned_kinds_of_attention_are_taken_where_they_apply():
    asked = {"topology": "dgx-h100", "num_devices": 16}
    token = plan(
        "llama-3-8b",
        pins={"tp_y": 2, "attention_shape": "2d", "attention_scatter": "token"},
        **asked,
    )
    assert token.strategy.attention_scatter == "token"
    assert token.strategy.cp == 1
    gathered = plan("llama-3-8b", pins={"cp": 4, "cp_kind": "all_gather"}, **asked)
    assert gathered.strategy.cp_kind == "all_gather"
    assert gathered.step_s > plan("llama-3-8b", pins={"cp": 4, "cp_kind": "ring"}, **asked).step_s


def test_simulation_of_a_plan():
    chosen = plan(
        "llama-3-70b", "cloudmatrix384", num_devices=64,
        workload=Workload(8192, 8192 * 64), pins={"pp": 4, "schedule": "1f1b"},
    )  # fmt: skip
    timeline = simulate_plan(chosen)
    assert timeline == simulate(plan_tasks(chosen))
    assert timeline.kind == "simulated"
    assert {f"rank {r}/compute" for r in range(4)} <= set(timeline.lanes)
    # The closed form and the simulation describe the same step.
    assert timeline.end_s == pytest.approx(chosen.step_s, rel=0.03)
    assert sum(stage.layers for stage in chosen.stages) == 80


def test_the_simulated_tail_has_the_terms_of_the_closed_form():
    asked = {"num_devices": 64, "workload": Workload(8192, 8192 * 64)}
    chosen = plan("llama-3-70b", "cloudmatrix384", pins={"pp": 4, "schedule": "1f1b"}, **asked)
    spans = simulate_plan(chosen).spans
    terms = {t.name: t.seconds for t in chosen.cost}
    for name in ("gradient norm", "optimizer"):
        simulated = [s.duration_s for s in spans if s.name == f"0 {name}"]
        assert simulated == pytest.approx([terms[name]], abs=2e-9)
