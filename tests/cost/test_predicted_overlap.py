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
CASES = [
    (small_model(), TENSOR, [Overlap(tp_chunks=4), Overlap(half_batch=True)]),
    (moe_model(), EXPERTS, [Overlap(ep_chunks=4), Overlap(half_batch=True, ep_chunks=2)]),
]


@pytest.mark.parametrize(("model", "serial", "overlaps"), CASES, ids=["tensor", "experts"])
def test_the_serial_row_is_reproduced_and_overlap_waits_less(model, serial, overlaps):
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(serial.dp)
    strategies = {"serial": serial}
    strategies |= {str(o): dataclasses.replace(serial, overlap=o) for o in overlaps}
    row = {"step_s": 0.8, "blocked_s": 0.24, "processor_s": 0.6, "speedup": 1.0}
    result = predicted(machine(), model, workload, strategies, dict.fromkeys(strategies, row))
    plain, *others = result["strategies"].values()
    assert plain["step_s"] == pytest.approx(0.8)
    assert plain["blocked_s"] == pytest.approx(0.24)
    assert all(r["blocked_s"] < 0.24 and r["step_s"] < 0.8 for r in others)
    assert result["auto"] != "serial"


def test_contention_is_the_processor_time_beyond_computation():
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(1)
    row = {"step_s": 0.8, "blocked_s": 0.2, "processor_s": 0.65}
    calibrated = Calibrated.of(machine(), small_model(), workload, TENSOR, row)
    assert calibrated.share == pytest.approx(0.05 / 0.2)
    chunks = dataclasses.replace(TENSOR, overlap=Overlap(tp_chunks=4))
    step_s, blocked_s = calibrated.seconds(chunks)
    alone_s, _ = dataclasses.replace(calibrated, share=0.0).seconds(chunks)
    # Hidden communication slows computation down by its share.
    assert step_s - alone_s == pytest.approx(0.25 * (0.2 - blocked_s), rel=0.02)
