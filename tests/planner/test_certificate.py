"""The certificate is true: no part of the space has anything better than the search of the whole space."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.errors import DoesNotFit, HyperParallelError
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan
from hyper_parallel.planner._bounds import strategy_at
from hyper_parallel.planner._price import pipeline_s, price
from hyper_parallel.planner._refine import find
from hyper_parallel.planner._request import resolve
from tests.planner.draws import draw_case, draw_pins

pytestmark = pytest.mark.unit


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
        ("llama-3-405b", "cloudmatrix384", 384, None, {"pp": 12}, {"schedule": "zb-h1"}),
    ],
)
def test_siblings_that_differ_in_their_schedule_are_simulated(
    model, topology, devices, workload, pins, inside
):
    asked = {"topology": topology, "workload": workload, "num_devices": devices}
    whole = plan(model, pins=pins, **asked)
    part = plan(model, pins=pins | inside, **asked)
    assert whole.step_s <= part.step_s * (1 + 1e-9)
    for found in (whole, part):
        assert found.certificate.gap == 0.0
        assert found.certificate.value == found.step_s


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
    rows = find(replace(request, pins={"pp": 2}), keep=20).search.rows
    values = rows["per_token_s"]
    assert len(values) > 10
    for position in range(0, len(values), max(1, len(values) // 12)):
        full = price(request, *strategy_at(rows, position, Strategy(), request.workload))
        assert full.per_token_s >= values[position] * (1 - 1e-9)
        simulated = pipeline_s(full, request.machine.paces(2))
        assert full.step_s >= simulated
