"""The choice of overlap: against brute force, and where it does not pay or does not run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Overlap, Strategy, Workload
from hyper_parallel.planner import plan
from hyper_parallel.planner.pins import OVERLAPS, check_pins
from hyper_parallel.planner.plan_builder import search
from hyper_parallel.planner.refinement import find_best
from hyper_parallel.planner.request import resolve
from tests.cost.machines import machine, small_model
from tests.planner.draws import draw_case, moe_model
from tests.planner.exhaustive import least, least_refined
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

AUTO = check_pins({"overlap": "auto"})


@slow_cells("4")
@pytest.mark.parametrize("seed", [1, 4, 8, 11])
def test_search_with_overlap_equals_brute_force(seed, few_orders):
    model, supernode, workload, devices = draw_case(seed)
    request = resolve(model, supernode, workload, devices)
    request = dataclasses.replace(request, pins=AUTO)
    best, outcome = least(request), find_best(request)
    assert outcome.fits == np.isfinite(best)
    if outcome.fits:
        assert outcome.search.rows["per_token_s"].min() == pytest.approx(best, rel=1e-9)
        assert outcome.search.bound >= best * (1 - 1e-9)


def slow_links(model, factor=40.0):
    """A request with 8 devices whose links are slower, so that overlap pays."""
    fast = machine()
    tiers = tuple(
        dataclasses.replace(t, bytes_s=dataclasses.replace(t.bytes_s, value=t.bytes_s.value / factor))
        for t in fast.tiers
    )
    supernode = dataclasses.replace(fast, tiers=tiers)
    return resolve(model, supernode, Workload(2048, 2048 * 64, microbatch=4), 8)


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (moe_model(), {"pp": 1, "dp_replicate": 1, "ep": 4, "tp": 1, "zero": 0}),
        (moe_model(), {"pp": 2, "dp_replicate": 1, "ep": 4, "tp": 1, "cp": 1, "zero": 3}),
        (small_model(), {"pp": 1, "dp_replicate": 1, "tp": 4, "cp": 1}),
    ],
)
def test_overlap_is_chosen_where_it_pays(model, pins, few_orders):
    request = slow_links(model)
    request = dataclasses.replace(request, pins=check_pins(pins | {"recompute": "none"}))
    plain = find_best(request)
    auto = dataclasses.replace(request, pins=request.pins | AUTO)
    outcome = find_best(auto)
    assert outcome.ranked[0].strategy.overlap != Overlap()
    assert outcome.ranked[0].per_token_s == pytest.approx(least_refined(auto), rel=1e-9)
    assert outcome.ranked[0].per_token_s < plain.ranked[0].per_token_s
    assert plain.ranked[0].strategy.overlap == Overlap()


def test_a_pin_fixes_the_overlap_and_unknown_half_batches_are_left_out():
    request = slow_links(small_model())
    pinned = check_pins({"overlap": "half-batch", "tp": 4})
    assert search(dataclasses.replace(request, pins=pinned)).strategy.overlap == Overlap(True)
    auto = dataclasses.replace(request, pins=check_pins({"tp": 4}) | AUTO, half_batches=False)
    assert search(auto).strategy.overlap == Overlap()
    with pytest.raises(HyperParallelError) as caught:
        plan(small_model(), machine(), request.workload, num_devices=8,
             pins={"overlap": "half-batch", "pp": 2})  # fmt: skip
    assert caught.value.code == "HP302"
    assert "half-batches do not work with pipeline parallelism" in str(caught.value)


def test_overlap_does_not_pay_on_ranks_that_share_cores():
    model, workload = moe_model(), Workload(512, microbatch=4, accumulation_steps=1)
    experts, tensor = Strategy(dp_shard=2, ep=2, zero=0), Strategy(tp_x=2)
    for strategy, overlaps in (
        (experts, [o for o in OVERLAPS if o.tp_chunks == 1]),
        (tensor, [o for o in OVERLAPS if o.ep_chunks == 1]),
    ):
        plans = [plan(model, "local", workload, strategy=dataclasses.replace(strategy, overlap=o)) for o in overlaps]
        assert all(p.step_s >= plans[0].step_s * (1 - 1e-12) for p in plans)
