"""Rows of a report about the parts of a multimodal model: spans are counted for the part that ran them."""

from __future__ import annotations

import pytest

from hyper_parallel.ir import PartPlan, Span, SubmodelsPlan, Timeline
from hyper_parallel.reports import submodel_rows

PLAN = SubmodelsPlan(
    (
        PartPlan("language", (0, 1), "pp=2", 2.0, 4.0),
        PartPlan("vision", (0,), "one device", 1.0, 2.0),
    ),
    8.0,
    0.25,
    6.0,
    "0F0",
)


def _step(number: int, scale: float) -> list[Span]:
    spans = [
        ("rank 0/compute", "tower forward", 0.0, 1.0),
        ("rank 0/compute", "0F0", 1.0, 2.0),
        ("rank 0/compute", "0I0", 5.0, 1.0),
        ("rank 0/compute", "0W0", 6.0, 1.0),
        ("rank 0/compute", "tower backward", 7.0, 3.0),
        ("rank 1/compute", "1F0", 3.0, 1.0),
        ("rank 1/compute", "1B0", 4.0, 2.0),
        ("rank 1/communication", "gradient reduction", 7.0, 9.0),
    ]
    start = number * 100.0
    return [Span(lane, name, start + scale * at, scale * length, "compute", number) for lane, name, at, length in spans]


def test_measured_seconds_belong_to_the_part_that_spent_them() -> None:
    timeline = Timeline("measured", (*_step(0, 5.0), *_step(1, 1.0), *_step(2, 1.0)))
    language, vision, step = submodel_rows(PLAN, timeline)
    assert language.measured == pytest.approx((2.0, 2.0))
    assert vision.measured == pytest.approx((1.0, 3.0))
    assert step.measured == pytest.approx((10.0, 1 - 11.0 / 20.0))
    assert (language.predicted, step.predicted) == ((2.0, 4.0), (8.0, 0.25))


def test_rows_without_a_timeline_have_predictions_only() -> None:
    assert [row.measured for row in submodel_rows(PLAN, None)] == [None] * 3
    assert submodel_rows(None, None) == []
