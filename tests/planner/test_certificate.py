"""The certificate is true: no part of the space has anything better than the search of the whole space."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.errors import DoesNotFit, HyperParallelError
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan
from hyper_parallel.planner.bounds import strategy_at
from hyper_parallel.planner.pins import check_pins
from hyper_parallel.planner.pricing import pipeline_s, price
from hyper_parallel.planner.refinement import find_best
from hyper_parallel.planner.request import resolve
from hyper_parallel.planner.search import BranchAndBound
from hyper_parallel.planner.strategy_space import Space
from tests.planner.draws import draw_case, draw_pins
from tests.planner.exhaustive import COLUMNS, TWO, closed_forms, every_strategy
from tests.slow import slow_cells

pytestmark = pytest.mark.unit


@slow_cells(
    "qwen3-235b-a22b-dgx-h100-256-workload0-pins0-inside0",
    "gpt-oss-120b-dgx-h100-64-None-pins1-inside1",
)
@pytest.mark.parametrize(
    ("model", "topology", "devices", "workload", "pins", "inside"),
    [
        (
            "qwen3-235b-a22b",
            "dgx-h100",
            256,
            Workload(4096, 2**20),
            {"pp": 16},
            {"schedule": "zbv"},
        ),
        ("gpt-oss-120b", "dgx-h100", 64, None, {"tp": 4, "pp": 16, "ep": 4}, {"schedule": "zb-h1"}),
        pytest.param(  # zb-h1, as the one before
            "llama-3-405b",
            "cloudmatrix384",
            384,
            None,
            {"pp": 12},
            {"schedule": "zb-h1"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_siblings_that_differ_in_their_schedule_are_simulated(model, topology, devices, workload, pins, inside):
    asked = {"topology": topology, "workload": workload, "num_devices": devices}
    whole = plan(model, pins=pins, **asked)
    part = plan(model, pins=pins | inside, **asked)
    assert whole.step_s <= part.step_s * (1 + 1e-9)
    for found in (whole, part):
        assert found.certificate.gap == 0.0
        assert found.certificate.value == found.step_s


@slow_cells("case1", "case4")
@pytest.mark.parametrize(
    "case",
    [
        ("mixtral-8x7b", "dgx-a100", 16, 2048, 16, {"zero": 1}, {"zero": 1, "pp": 1}),
        ("qwen3-30b-a3b", "dgx-h100", 64, 2048, 128, {"zero": 1}, {"zero": 1, "microbatch": 16}),
        ("qwen3-8b", "dgx-a100", 16, 2048, 96, {"microbatch": 6}),
        ("qwen3-30b-a3b", "tpu-v5p", 16, 8192, 96, {"zero": 1}),
        ("llama-3-70b", "dgx-h100", 384, 8192, 384, {"cp": 12, "tp": 1, "pp": 1}),
    ],
)
def test_a_pin_adds_nothing_to_the_space(case):
    """Pins that leave less and less: each part has layouts and nothing better than the part before."""
    model, topology, devices, seq_len, sequences, *parts = case
    asked = {"topology": topology, "num_devices": devices}
    asked["workload"] = Workload(seq_len, seq_len * sequences)
    found = [plan(model, pins=pins, **asked) for pins in ({}, *parts)]
    assert all(one.layouts for one in found)
    for whole, part in itertools.pairwise(found):
        assert whole.step_s <= part.step_s * (1 + 1e-9)


def own_choices(request):
    """Every strategy of a request, what has no effect on it as it usually is."""
    rows = np.array([*every_strategy(request)]).reshape(-1, len(COLUMNS))
    at = {name: rows[:, i] for i, name in enumerate(COLUMNS)}
    for name in ("attention_shape", "mlp_shape"):
        at[name][at["tp_y"] == 1] = TWO
    at["zero"][(at["zero"] == 0) & (at["dp_shard"] * at["cp"] == 1)] = 1
    at["zero"][(at["zero"] == 1) & (at["accumulation"] == 1)] = 2
    at["order"][:] = 0  # a pinned one stands for others
    at["regather"][at["tp_x"] * at["tp_y"] == 1] = 0
    return {*map(tuple, rows.tolist())}


@slow_cells(*range(3, 6), "0-True")
@pytest.mark.parametrize("executable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_pinned_part_is_in_the_space(seed, executable, few_orders):
    model, supernode, _, _ = draw_case(seed)
    workload = Workload(500, 500 * 12)
    whole = plan(model, supernode, workload, num_devices=4)
    request = replace(resolve(model, supernode, workload, 4), executable=executable)
    every, seen = own_choices(request), 0
    one = [{"zero": z} for z in range(4)] + [{"microbatch": m} for m in (1, 3, 5, 6)]
    for pins in (*one, {"cp": 4}, {"recompute": "selective"}, *draw_pins(seed, whole, count=6)):
        part = own_choices(replace(request, pins=check_pins(pins)))
        shapes = [COLUMNS.index(n) for n in ("attention_shape", "mlp_shape")]
        # Two axes that do as one.
        part = {row for row in part if any(row[i] for i in shapes)}
        assert part <= every, pins
        seen += bool(part)
    assert seen >= 5


@pytest.mark.parametrize(
    ("seed", "pins", "gib"),
    [
        (1, {}, 64),
        (4, {"pp": 2}, 64),
        (2, {}, 1.04),
        (9, {"microbatch": 1}, 1.2),
        (0, {"zero": 0}, 1.1),
        # Where next to nothing fits, what a partial strategy is thought to hold at least decides.
        (0, {"zero": 1}, 1.05),
        (4, {"zero": 1}, 1.03),
        (5, {"zero": 2}, 1.08),
    ],
)
def test_no_bound_of_any_level_exceeds_what_becomes_of_it(seed, pins, gib, few_orders):
    """Every strategy that fits has a partial strategy at each level, whose bound is not above its price."""
    model, supernode, _, devices = draw_case(seed)
    workload = Workload(512, 512 * devices)
    request = resolve(model, supernode, workload, devices)
    request = replace(request, pins=check_pins(pins), capacity_bytes=gib * 2**30)
    rows, found = closed_forms(request)
    values = np.min([value for value, _, _ in found], axis=0)
    search = BranchAndBound(Space(request), keep=10**9)  # nothing is cut by time
    grown, levels = search._blocks(), 0
    for grow in (None, search._pipelines, search._states):
        columns, bounds = grown if grow is None else grow(*grown)
        grown = columns, bounds
        names = [n for n in COLUMNS if n in columns]
        if "zero" not in columns:  # open, though priced at its best
            names = [n for n in names if n not in ("dp_replicate", "dp_shard")]
        keys = np.column_stack([columns[n] for n in names]).tolist()
        bound_of = dict(zip(map(tuple, keys), bounds.tolist(), strict=True))
        mine = rows[:, [COLUMNS.index(n) for n in names]]
        for key, value in zip(map(tuple, mine.tolist()), values.tolist(), strict=True):
            if not np.isfinite(value):
                continue
            kinds = [names.index(n) for n in ("attention_tokens", "cp_gather")]
            if key not in bound_of:  # a way that never sends less
                assert any(key[i] for i in kinds), (key, names)
                continue
            assert bound_of[key] <= value * (1 + 1e-9), str(dict(zip(names, key, strict=True)))
            levels += 1
    assert levels > 5


@slow_cells(*range(10, 24))
@pytest.mark.parametrize("seed", range(24))
def test_no_pinned_part_of_the_space_beats_the_whole(seed):
    model, supernode, workload, devices = draw_case(seed)
    try:
        whole = plan(model, supernode, workload, num_devices=devices)
    except DoesNotFit:
        pytest.skip("nothing fits")
    assert whole.certificate.gap == 0.0
    for pins in draw_pins(seed, whole, count=3):
        try:
            part = plan(model, supernode, workload, num_devices=devices, pins=pins)
        except HyperParallelError:
            continue  # nothing in that part
        assert whole.step_s <= part.step_s * (1 + 1e-9), pins


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_no_full_price_is_below_the_closed_form_that_bounds_it(seed):
    """Whatever is not simulated cannot be better than its closed form: the bound of the certificate."""
    model, supernode, _, _ = draw_case(seed)
    request = resolve(model, supernode, Workload(512, 512 * 32), 4)
    rows = find_best(replace(request, pins={"pp": 2}), keep=20).search.rows
    values = rows["per_token_s"]
    assert len(values) > 10
    for position in range(0, len(values), max(1, len(values) // 12)):
        full = price(request, *strategy_at(rows, position, Strategy(), request.workload))
        assert full.per_token_s >= values[position] * (1 - 1e-9)
        simulated = pipeline_s(full, request.machine.paces(2))
        assert full.step_s >= simulated
