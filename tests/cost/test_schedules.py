"""Bubbles, stages, orders of the axes and sharding stages, on numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hyper_parallel.cost import (
    ORDERS,
    SCHEDULES,
    Candidates,
    Machine,
    ModelNumbers,
    Places,
    PricingCase,
    distinct,
    memory_key,
    offloaded_bytes,
    score,
    step_seconds,
)
from hyper_parallel.cost.candidates import bubble_seconds, in_flight, split_layers_closed_form
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.ir.layout import AXES
from hyper_parallel.model import load_model
from hyper_parallel.topology import load_topology
from tests.cost.machines import machine, small_model

pytestmark = pytest.mark.unit


def candidate(schedule, **columns):
    return Candidates.of_columns(schedule=SCHEDULES.index(schedule), **columns)


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    # p = 4 equal stages, F = B = W = 1: three other stages wait for a microbatch of 3 seconds.
    [("gpipe", 1, 9.0), ("1f1b", 1, 9.0), ("interleaved", 3, 3.0), ("zb-h1", 1, 3.0),
     ("zbv", 2, 0.0), ("dualpipev", 2, 3.0)],
)  # fmt: skip
def test_bubble_of_equal_stages(schedule, vpp, bubble):
    one = np.ones(1)
    c = candidate(schedule, pp=4, vpp=vpp, accumulation=16)
    assert bubble_seconds(c, 9.0 * one, one, 2.0 * one, one)[0] == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("schedule", "vpp", "held"),
    [("gpipe", 1, 16.0), ("1f1b", 1, 4.0), ("interleaved", 2, 5.5), ("zb-h1", 1, 4.0), ("dualpipev", 2, 4.5)],
)  # fmt: skip
def test_microbatches_in_flight(schedule, vpp, held):
    assert in_flight(candidate(schedule, pp=4, vpp=vpp, accumulation=16))[0] == held
    assert in_flight(candidate(schedule, pp=4, vpp=vpp, accumulation=2))[0] == 2.0


def test_layers_are_cut_so_that_the_slowest_stage_is_fastest():
    c, one = Candidates.of_columns(pp=4, accumulation=8), np.ones(1)
    for head in (0.0, 0.4, 1.0, 2.5, 5.0, 30.0):
        found = split_layers_closed_form(c, 30, one, head * one, even=False)
        best = min(max(np.ceil((30 - last) / 3), last + head) for last in range(28))
        assert found.slowest[0] == pytest.approx(best)
        assert found.slowest[0] + found.remaining_s[0] == pytest.approx(30 + head)
    even = split_layers_closed_form(c, 30, one, 2.5 * one, even=True)
    assert (even.fullest[0], even.last[0], even.slowest[0]) == (8, 6, 8.5)


def test_orders_start_with_the_mesh_and_keep_data_parallel_axes_together():
    assert ORDERS[0] == AXES
    assert len(set(ORDERS)) == 120
    for order in ORDERS:
        assert order.index("dp_shard") == order.index("dp_replicate") + 1


def test_strides_follow_the_order():
    columns = {"pp": 2, "dp_replicate": 3, "dp_shard": 4, "cp": 2, "tp_x": 2, "tp_y": 2}
    orders = [0, ORDERS.index(("cp", "tp_x", "tp_y", "pp", "dp_replicate", "dp_shard"))]
    places = Places(Candidates.of_columns(order=orders, **columns))
    assert places.axis("tp_y")[1].tolist() == [1, 24]
    assert places.axis("tp_x")[1].tolist() == [2, 48]
    assert places.axis("cp")[1].tolist() == [4, 96]
    assert places.axis("dp_shard")[1].tolist() == [8, 1]
    assert places.axis("pp")[1].tolist() == [96, 12]


def test_experts_fold_over_the_innermost_ranks():
    c = Candidates.of_columns(dp_shard=4, cp=2, tp_x=4, ep=8)
    places = Places(c)
    degrees = [float(d[0]) for d, _ in places.experts["ep"]]
    left = [float(d[0]) for d, _ in places.experts["edp"]]
    # Outer to inner: dp_shard, cp, tp_x, tp_y.
    assert degrees == [1, 2, 4, 1]
    assert left == [4, 1, 1, 1]


def test_an_axis_inside_a_node_is_faster_there():
    numbers = ModelNumbers.of(load_model("llama-3-70b"))
    inside = ORDERS.index(("pp", "cp", "tp_x", "tp_y", "dp_replicate", "dp_shard"))
    c = Candidates.of_columns(dp_shard=8, tp_x=8, zero=3, order=[0, inside])
    found = score(PricingCase(numbers, Machine.of(machine(num_devices=64), "bfloat16"), Workload(8192), c))
    time = {t.name: t.seconds for t in found.time}
    assert time["tp communication"][1] > 3 * time["tp communication"][0]
    assert time["fsdp communication"][1] < time["fsdp communication"][0]


def test_factorised_pricing_equals_pricing_one_by_one():
    rng = np.random.default_rng(1)
    rows = 700
    columns = {
        name: rng.choice([1, 2, 4], rows) for name in ("dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "pp")
    }  # fmt: skip
    columns |= {
        "microbatch": rng.choice([1, 2], rows), "accumulation": rng.choice([4, 8], rows),
        "recompute": rng.choice(3, rows), "zero": rng.choice(4, rows), "order": rng.choice([0, 7, 50], rows),
        "attention_shape": rng.choice(3, rows), "mlp_shape": rng.choice(3, rows), "ep": rng.choice([1, 2], rows),
    }  # fmt: skip
    c = Candidates.of_columns(**columns)
    numbers = ModelNumbers.of(load_model("mixtral-8x7b"))
    on = Machine.of(load_topology("dgx-h100"), "bfloat16")
    together = score(PricingCase(numbers, on, Workload(2048), c))
    apart = score(PricingCase(numbers, on, Workload(2048), c.take(np.arange(200))))
    assert together.step_s[:200] == pytest.approx(apart.step_s, rel=1e-12)
    assert together.memory_bytes[:200] == pytest.approx(apart.memory_bytes, rel=1e-12)


def test_sums_of_a_search_are_the_sums_of_the_terms():
    """Many strategies at once: seconds, those of the pace alone, and bytes under several choices."""
    rng = np.random.default_rng(2)
    rows = 900
    columns = {
        name: rng.choice([1.0, 2, 4], rows) for name in ("dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "pp")
    }  # fmt: skip
    columns |= {
        "microbatch": rng.choice([1.0, 2], rows), "accumulation": rng.choice([4.0, 8], rows),
        "zero": 1.0 * rng.choice(4, rows), "order": rng.choice([0.0, 7], rows), "schedule": 1.0 * rng.choice(6, rows),
        "vpp": rng.choice([1.0, 2], rows), "ep": rng.choice([1.0, 2, 4], rows), "offload": rng.choice([0.0, 1], rows),
    }  # fmt: skip
    columns["etp"] = np.where(columns["ep"] > 1, 1.0, columns["tp_x"] * columns["tp_y"])
    columns["cp_ulysses"] = np.minimum(columns["cp"], rng.choice([1.0, 2], rows))
    # A ring pads to an even number of pieces a rank, ranks that exchange heads do not.
    numbers, workload = ModelNumbers.of(load_model("mixtral-8x7b")), Workload(2050)
    on = Machine.of(load_topology("cloudmatrix384"), "bfloat16")
    choices = list(itertools.product((0, 1), (0, 1, 2)))
    bytes_ = offloaded_bytes(PricingCase(numbers, on, workload, Candidates.of_columns(**columns)), choices)
    first, index = distinct(memory_key(columns, workload.seq_len))
    assert len(first) < rows
    for (again, kind), found in zip(choices, bytes_, strict=True):
        c = Candidates.of_columns(**columns, regather=float(again), recompute=float(kind))
        whole = score(PricingCase(numbers, on, workload, c))
        assert step_seconds(PricingCase(numbers, on, workload, c)) == pytest.approx(whole.step_s, rel=1e-12)
        pace = sum(t.seconds for t in whole.time if t.name in PACE)
        assert step_seconds(PricingCase(numbers, on, workload, c), "pace") == pytest.approx(pace, rel=1e-12)
        assert found == pytest.approx(whole.memory_bytes, rel=1e-12)
        # Nothing but the columns of the key matters to memory.
        assert found[first][index] == pytest.approx(found, rel=1e-12)


def test_the_memory_key_tells_two_axes_from_one_if_the_residual_stream_is_replicated():
    styles = ("up", "colwise"), ("gate", "colwise"), ("down", "rowwise")
    rules = tuple((f"model.layers.*.mlp.{n}_proj", style) for n, style in styles)
    numbers = ModelNumbers.of(dataclasses.replace(small_model(), rules=rules))
    c = Candidates.of_columns(tp_x=[4, 2], tp_y=[1, 2], microbatch=[2, 2], etp=[4, 4])
    on = Machine.of(load_topology("dgx-h100"), "bfloat16")
    (found,) = offloaded_bytes(PricingCase(numbers, on, Workload(512), c), [(0, 0)])
    assert found[0] > found[1]
    columns = {name: getattr(c, name) for name in Candidates.__slots__}
    assert [len(distinct(memory_key(columns, 512, whole))[0]) for whole in (False, True)] == [1, 2]


def test_distinct_rows_of_many_and_of_large_values():
    rng = np.random.default_rng(3)
    columns = [rng.choice([0.0, 1, 7], 500) for _ in range(3)]
    columns += [rng.choice([1.0, 2.0**40, 2.0**41], 500), np.broadcast_to(np.ones(1), 500)]
    # More combinations than an integer can number.
    columns += [np.repeat(np.arange(250.0), 2) for _ in range(12)]
    first, index = distinct(columns)
    table = np.column_stack(columns)
    assert (table[first][index] == table).all()
    assert len(first) == len(np.unique(table, axis=0))


PACE = (
    "matmul", "attention", "element-wise", "casts", "head and loss", "recompute", "kernel launches",
    "tp communication", "cp communication", "ep communication", "pipeline bubble", "pipeline sends",
)  # fmt: skip


def test_an_open_grid_is_priced_without_being_written_out():
    numbers = ModelNumbers.of(small_model())
    on = Machine.of(machine(), "bfloat16")
    tp, m = np.asarray([[1.0], [2.0], [4.0]]), np.asarray([[1.0, 2.0, 8.0, 16.0]])
    grid = score(PricingCase(numbers, on, Workload(512), Candidates.of_columns(tp_x=tp, accumulation=m)))
    assert grid.step_s.shape == (3, 4)
    flat = Candidates.of_columns(tp_x=np.repeat([1, 2, 4], 4), accumulation=np.tile([1, 2, 8, 16], 3))
    assert grid.step_s.ravel() == pytest.approx(score(PricingCase(numbers, on, Workload(512), flat)).step_s)


def test_a_strategy_survives_the_round_trip():
    strategy = Strategy(
        pp=2, dp_shard=2, cp=4, tp_x=2, tp_y=2, attention_shape="weight", mlp_shape="1d",
        cp_kind="hybrid", cp_ulysses=2, schedule="interleaved", virtual_stages=2, recompute="full",
        reshard_after_forward=False,
    )  # fmt: skip
    workload = Workload(512, microbatch=1, accumulation_steps=4).resolve(strategy.dp)
    again, resolved = Candidates.of(strategy, workload).strategy_at(0, Strategy(), workload)
    assert again == strategy
    assert resolved == workload
