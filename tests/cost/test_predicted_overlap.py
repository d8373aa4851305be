"""Predictions of the overlap benchmark: calibrated on the serial row, which they then reproduce."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks._predicted_overlap import Calibrated, predicted

from hyper_parallel.ir import Overlap, Strategy, Workload
from tests.cost.machines import machine, small_model
from tests.planner.draws import moe_model

pytestmark = pytest.mark.unit

TENSOR, EXPERTS = Strategy(tp_x=2), Strategy(dp_shard=2, ep=2, zero=0)
ROW = {"step_s": 0.8, "blocked_s": 0.2, "late_s": 0.0, "replayed_s": 0.8, "processor_s": 0.65}
"""Measured seconds of a serial step in which ranks are never late."""
CASES = [
    (small_model(), TENSOR, [Overlap(tp_chunks=4), Overlap(half_batch=True)]),
    (moe_model(), EXPERTS, [Overlap(ep_chunks=4), Overlap(half_batch=True, ep_chunks=2)]),
]


@pytest.mark.parametrize(("model", "serial", "overlaps"), CASES, ids=["tensor", "experts"])
def test_the_serial_row_is_reproduced_and_overlap_waits_less(model, serial, overlaps):
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(serial.dp)
    strategies = {"serial": serial}
    strategies |= {str(o): dataclasses.replace(serial, overlap=o) for o in overlaps}
    row = ROW | {"blocked_s": 0.24, "processor_s": 0.6, "speedup": 1.0}
    result = predicted(machine(), model, workload, strategies, dict.fromkeys(strategies, row))
    plain, *others = result["strategies"].values()
    assert plain["step_s"] == pytest.approx(0.8)
    assert plain["blocked_s"] == pytest.approx(0.24)
    assert all(r["blocked_s"] < 0.24 and r["step_s"] < 0.8 for r in others)
    assert result["auto"] != "serial"


def test_contention_is_the_processor_time_beyond_computation():
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(1)
    calibrated = Calibrated.of(machine(), small_model(), workload, TENSOR, ROW)
    assert calibrated.rates.share == pytest.approx(0.05 / 0.2)
    chunks = dataclasses.replace(TENSOR, overlap=Overlap(tp_chunks=4))
    alone = calibrated.replace(share=0.0)
    slower_s = calibrated.step_s(chunks) - alone.step_s(chunks)
    # Hidden communication slows computation down by its share.
    assert slower_s == pytest.approx(0.25 * (0.2 - calibrated.blocked_s(chunks)), rel=0.02)


def test_ranks_that_are_late_in_the_serial_step_block_each_other_in_an_overlapped_one():
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(1)
    late = ROW | {"late_s": 0.1, "replayed_s": 0.81}
    lockstep, calibrated = (
        Calibrated.of(machine(), small_model(), workload, TENSOR, row)
        for row in (ROW | {"step_s": 0.7, "replayed_s": 0.7}, late)
    )
    assert calibrated.step_s(TENSOR) == pytest.approx(0.8)
    # One rank has its data early: both are blocked for less time than the link is busy.
    assert calibrated.rates.spread == pytest.approx(2 * 0.01 / 0.21)
    assert calibrated.blocked_s(TENSOR) == pytest.approx(0.2)
    halves = dataclasses.replace(TENSOR, overlap=Overlap(half_batch=True))
    assert calibrated.blocked_s(halves) > 1.1 * lockstep.blocked_s(halves)


def test_the_elementwise_rate_explains_how_long_experts_compute():
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(EXPERTS.dp)
    parts = machine(), moe_model(), workload, EXPERTS
    row = ROW | {"late_s": 0.02, "replayed_s": 0.81}
    plain = Calibrated.of(*parts, row)
    assert plain.rates.elementwise is None
    # Slower element-wise kernels leave less of the same computation to the matmuls of experts.
    experts_s = 0.7 * plain.experts_s(EXPERTS)
    case = Calibrated.of(*parts, row | {"experts_s": experts_s})
    assert case.experts_s(EXPERTS) == pytest.approx(experts_s)
    assert case.step_s(EXPERTS) == pytest.approx(0.8)
    assert case.rates.elementwise < 0.55
    assert case.rates.slowdown < plain.rates.slowdown
