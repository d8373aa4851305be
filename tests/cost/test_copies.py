"""Seconds of offload copies: what hides, what does not, and what the terms of a plan say of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks._reload_bound import reload_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.cost import COPIES, OffloadDemand
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.memory import Channel, MemoryMachine, plan_memory, refine_order
from hyper_parallel.memory.def_use import live_bytes, use_definitions
from hyper_parallel.memory.residency_lp import LinearProgram
from hyper_parallel.topology import MemoryPool
from tests.cost.machines import machine, quantity, score_strategy, small_model
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit


def load(**given_values):
    """10 GB/s, a second of forward and two of backward, one microbatch, 100 GB of activations that may leave."""
    values = {
        "need_bytes": 0.0, "end_bytes": 0.0, "staged_bytes": 0.0, "host_bytes": 1e15,
        "optimizer_bytes": 0.0, "parameters_bytes": 0.0,
        "gradients_bytes": 0.0, "activations_bytes": 100e9, "passing_bytes": 0.0, "products_bytes": 0.0,
        "passing_s": 0.0, "products_s": 0.0, "forward_s": 1.0, "backward_s": 2.0, "update_s": 0.0,
        "microbatches": 1.0, "in_flight": 1.0, "alternating": 1.0, "link_bytes_s": 10e9,
    }  # fmt: skip
    assert not set(given_values) - set(values)
    return OffloadDemand(**{k: np.full(1, float(v)) for k, v in {**values, **given_values}.items()})


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"need_bytes": 10e9}, 0.0),  # leaves beside forward
        ({"need_bytes": 15e9}, 0.5),  # waits before the peak, returns beside backward
        ({"need_bytes": 30e9}, 3.0),  # and waits in backward
        ({"need_bytes": 15e9, "microbatches": 4}, 2.0),
        # In flight both lanes have all of the time, and a microbatch carries its share.
        ({"need_bytes": 60e9, "in_flight": 4, "alternating": 0, "forward_s": 1.5, "backward_s": 1.5}, 0.0),
        ({"need_bytes": 80e9, "in_flight": 4, "alternating": 0, "forward_s": 1.5, "backward_s": 1.5}, 0.5),
        # States: in beside backward, out after the update.
        ({"need_bytes": 15e9, "optimizer_bytes": 5e9, "update_s": 0.5}, 0.0),
        ({"end_bytes": 15e9, "need_bytes": 15e9, "optimizer_bytes": 20e9}, 1.5),
        ({"end_bytes": 25e9, "need_bytes": 25e9, "parameters_bytes": 30e9}, 1.5 + 0.5 + 2.5),
        # Computed again where that is cheaper, and where host memory is full.
        ({"need_bytes": 15e9, "passing_bytes": 10e9, "passing_s": 0.2}, 0.1),
        ({"need_bytes": 15e9, "passing_bytes": 10e9, "passing_s": 4.0}, 0.5),
        # Copies go on beside what is computed again: 25 GB in beside 2.5 s.
        ({"need_bytes": 35e9, "passing_bytes": 10e9, "passing_s": 0.5}, 1.5 + 0.5),
        ({"need_bytes": 15e9, "products_bytes": 20e9, "products_s": 4.0, "host_bytes": 10e9}, 1.0),
    ],
)  # fmt: skip
def test_what_no_work_hides_costs_time(values, seconds):
    away, found = load(**values).cheapest()
    assert found[0] == pytest.approx(seconds, abs=1e-12)
    gone = away.copied + away.passing + away.products
    assert gone[0] == pytest.approx(max(values.get("need_bytes", 0.0), values.get("end_bytes", 0.0)))
    assert away.copied[0] <= values.get("host_bytes", 1e15)


@settings(max_examples=40, deadline=None)
@given(
    need=st.floats(0, 80e9), states=st.floats(0, 20e9), again=st.floats(0, 30e9), again_s=st.floats(0, 5),
    micro=st.integers(1, 8), flight=st.sampled_from([1, 2, 4]), shorter=st.floats(0, 1), more=st.floats(1, 3),
)  # fmt: skip
def test_a_shorter_step_with_its_copies_is_not_longer(need, states, again, again_s, micro, flight, shorter, more):
    """Bounds of the search assume it: less time that hides copies costs at most the missing time."""
    values = {
        "need_bytes": need, "optimizer_bytes": states, "passing_bytes": again, "passing_s": again_s,
        "microbatches": micro, "in_flight": flight, "alternating": float(flight == 1),
    }  # fmt: skip
    # In flight both lanes have the seconds of forward and backward.
    forward, backward = (1.0, 2.0) if flight == 1 else (3.0, 3.0)
    long = load(**values, forward_s=forward, backward_s=backward)
    short = load(**values, forward_s=forward - shorter, backward_s=backward - shorter)
    gained = micro * 2 * shorter if flight == 1 else micro * shorter
    assert short.cheapest()[1][0] <= long.cheapest()[1][0] + gained + 1e-9
    faster = dataclasses.replace(long, link_bytes_s=long.link_bytes_s * more)
    assert faster.cheapest()[1][0] <= long.cheapest()[1][0] + 1e-9


def gigabytes(most):
    """Bytes in steps of a megabyte: next to nothing is no load, and no linear program is solved with it."""
    return st.integers(0, most * 1000).map(lambda megabytes: megabytes * 1e6)


ANY_LOAD = st.fixed_dictionaries(
    {
        "optimizer_bytes": gigabytes(40), "parameters_bytes": gigabytes(40),
        "gradients_bytes": st.sampled_from([0.0, 20e9]), "activations_bytes": gigabytes(80),
        "passing_bytes": gigabytes(30), "products_bytes": gigabytes(30), "passing_s": st.floats(0, 0.1),
        "products_s": st.floats(0.1, 1), "forward_s": st.floats(0.3, 1.5), "backward_s": st.floats(0.5, 3),
        "update_s": st.floats(0, 0.1), "microbatches": st.integers(1, 8), "in_flight": st.integers(1, 4),
        "link_bytes_s": st.sampled_from([10e9, 25e9, 50e9]),
    }
)  # fmt: skip


def any_load(values, need_share, end_share):
    """A load whose states and activations are as many bytes as said, of which shares exceed the budget."""
    if values["in_flight"] > 1:  # both lanes have forward and backward then
        both = values["forward_s"] + values["backward_s"]
        values = {**values, "forward_s": both, "backward_s": both}
    states = sum(values[f"{name}_bytes"] for name in ("optimizer", "parameters", "gradients"))
    return load(
        **values,
        need_bytes=need_share * (states + values["activations_bytes"]),
        end_bytes=end_share * states,
        alternating=float(values["in_flight"] == 1),
    )


@settings(max_examples=60, deadline=None)
@given(values=ANY_LOAD, need=st.floats(0.01, 1), end=st.floats(-1, 1), less=st.floats(1, 2))
def test_a_smaller_budget_or_a_slower_link_never_costs_less(values, need, end, less):
    one = any_load(values, need, end)
    slower = dataclasses.replace(one, link_bytes_s=one.link_bytes_s / less)
    assert slower.cheapest()[1][0] >= one.cheapest()[1][0] - 1e-9
    taken = 0.1 * less * np.maximum(one.need_bytes, 0.0)
    larger = dataclasses.replace(one, need_bytes=one.need_bytes - taken, end_bytes=one.end_bytes - taken)
    assert larger.cheapest()[1][0] <= one.cheapest()[1][0] + 1e-9


@settings(max_examples=30, deadline=None)
@given(values=ANY_LOAD, over=st.floats(0, 100e9))
def test_what_fits_costs_nothing(values, over):
    values = {**values, "need_bytes": -over, "end_bytes": -over}
    away, seconds = load(**values).cheapest()
    assert seconds[0] == 0.0
    assert all(getattr(away, f.name)[0] == 0.0 for f in dataclasses.fields(away))


def cheapest(one):
    """Seconds of the cheapest choice by linear programming: gigabytes by kind, and what each lane has to wait."""
    n = {f.name: float(getattr(one, f.name)[0]) / (1e9 if "bytes" in f.name else 1.0) for f in dataclasses.fields(one)}
    lp, micro, in_turn = LinearProgram(), n["microbatches"], n["alternating"] > 0
    passing_s, products_s = (n[f"{name}_s"] / max(n[f"{name}_bytes"], 1e-9) for name in ("passing", "products"))
    state = [lp.variable(n[f"{x}_bytes"]) for x in ("optimizer", "parameters", "gradients")]
    kept = lp.variable(n["activations_bytes"])
    passing = lp.variable(n["passing_bytes"], micro * passing_s)
    products = lp.variable(n["products_bytes"], micro * products_s)
    forward, each, last, written = (lp.variable(1e3, cost) for cost in (micro * in_turn, micro - 1.0, 1.0, 1.0))
    optimizer, parameters, gradients = state
    lp.at_least(dict.fromkeys((*state, kept, passing, products), 1.0), n["need_bytes"])
    lp.at_least(dict.fromkeys(state, 1.0), n["end_bytes"])
    lp.at_least(dict.fromkeys((kept, passing, products), -1.0), -n["activations_bytes"])
    per_s = 1.0 / n["link_bytes_s"]
    moved = {kept: -per_s / n["in_flight"], gradients: -per_s}
    again = {passing: passing_s, products: products_s}
    back = {**moved, parameters: -per_s * (1.0 if in_turn else 2.0), **again}
    if in_turn:
        lp.at_least({**moved, forward: 1.0}, -n["forward_s"])
        lp.at_least({parameters: -per_s, forward: 1.0}, -n["forward_s"])
    lp.at_least({**back, each: 1.0}, -n["backward_s"])
    lp.at_least({**back, optimizer: -per_s, last: 1.0}, -n["backward_s"])
    lp.at_least({optimizer: -per_s, parameters: -per_s, written: 1.0}, -n["update_s"])
    return float(np.dot(lp.costs, lp.solve()))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=ANY_LOAD, need=st.floats(0.01, 1), end=st.floats(-1, 1))
def test_no_choice_is_much_cheaper(values, need, end):
    one = any_load(values, need, end)
    if one.missing_bytes[0] > 0:
        return
    step_s = values["microbatches"] * (values["forward_s"] + values["backward_s"])
    least, found = cheapest(one), one.cheapest()[1][0]
    assert least - 1e-5 * (step_s + least) <= found <= 1.001 * least + 0.05 * step_s


@pytest.mark.parametrize(
    ("bytes_s", "share"),
    [(200.0, 0.9), (200.0, 0.7), (400.0, 0.7), (400.0, 0.5), (800.0, 0.5)],
)
def test_the_price_lies_between_a_proven_bound_and_a_plan(bytes_s, share):
    """A chain of layers of which only activations move: nothing is faster than the bound, and a plan exists."""
    program = training_chain(layers=40, weight=1)
    order, _ = refine_order(program)
    chains = use_definitions(program, order)
    live = live_bytes(program, chains.uses)
    peak = int(np.argmax(live))
    ends_s = np.cumsum([program.operators[i].seconds for i in order])
    resting = [
        size
        for size, storage, uses in zip(program.sizes, program.storages, chains.uses, strict=True)
        if storage.kind == "activation" and uses[0] < peak < uses[-1] and peak not in uses
    ]
    budget, channel = int(share * live[peak]), Channel(bytes_s, 0.0)
    price = load(
        need_bytes=live[peak] - budget, end_bytes=-1.0, activations_bytes=sum(resting), forward_s=ends_s[peak],
        backward_s=ends_s[-1] - ends_s[peak], link_bytes_s=bytes_s,
    ).cheapest()[1][0]  # fmt: skip
    machine, priced_s = MemoryMachine(channel, channel), ends_s[-1] + price
    assert reload_bound(program, machine, order, priced_s).num_bytes <= budget
    plan = plan_memory(program, machine, budget_bytes=budget, recompute=False)
    assert priced_s <= plan.seconds + 1e-6
    assert plan.seconds <= 1.08 * priced_s


def test_terms_say_what_is_away():
    pool = MemoryPool("dram", quantity(1e12), quantity(20e9), 8)
    supernode = dataclasses.replace(machine(memory_gib=1.08), pools=(pool,))
    model, workload = small_model(), Workload(512, 512 * 16, 4).resolve(2)
    plain, moved = Strategy(dp_shard=2), Strategy(dp_shard=2, offload=True)
    whole = sum(t.bytes for t in score_strategy(model, supernode, plain, workload).memory_at(0))
    capacity = supernode.device.memory_bytes.value
    assert whole > capacity
    scores = score_strategy(model, supernode, moved, workload)
    memory = scores.memory_at(0)
    held = sum(t.bytes for t in memory if t.tier == "hbm")
    away = sum(t.bytes for t in memory if t.tier == "dram")
    assert held == pytest.approx(capacity, rel=1e-6)
    cost = scores.cost_at(0)
    (term,) = [t for t in cost if t.name == COPIES]
    found, seconds = OffloadDemand.of_term(term).cheapest()
    assert seconds[0] == term.seconds
    again = float(found.passing[0] + found.products[0])
    # Beside its buffer a plan makes what attention gives, in the compute format; pieces of a gradient are smaller here.
    (staged,) = [t.bytes for t in memory if t.name == "staged results"]
    assert staged == pytest.approx(4 * 512 * 256 * 2, rel=1e-3)
    assert away + again == pytest.approx(whole + staged - capacity, rel=1e-6)
    assert sum(t.seconds for t in cost) - term.seconds == pytest.approx(
        sum(t.seconds for t in score_strategy(model, supernode, plain, workload).cost_at(0))
    )


def test_devices_share_what_host_memory_moves():
    link, memory = quantity(50e9), quantity(400e9)
    assert MemoryPool("dram", quantity(1e12), link, 8).shared_bytes_s == 50e9
    assert MemoryPool("dram", quantity(1e12), link, 8, memory).shared_bytes_s == 25e9
    assert MemoryPool("dram", quantity(1e12), link, 2, memory).shared_bytes_s == 50e9


def test_matmuls_write_values_as_wide_as_keys_and_not_the_output_of_attention():
    """Residual and queries (256 each), both inputs of the gate (768 each), keys and values (32 per head each)."""
    made = []
    for kv_heads in (2, 8):
        strategy, workload = Strategy(offload=True), Workload(512, microbatch=8, accumulation_steps=1)
        scores = score_strategy(small_model(kv_heads=kv_heads), machine(memory_gib=0.125), strategy, workload)
        term = next(t for t in scores.cost_at(0) if t.name == COPIES)
        made.append(float(OffloadDemand.of_term(term).products_bytes[0]))
    assert made[1] / made[0] == pytest.approx((2048 + 2 * 8 * 32) / (2048 + 2 * 2 * 32))
