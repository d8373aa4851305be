"""Exposed communication and both definitions of masking, by hand."""

from __future__ import annotations

import pytest

from hyper_parallel.ir import Flight, Purpose, masking

pytestmark = pytest.mark.unit


def test_masking_by_hand() -> None:
    gather, rows = Purpose.SEQUENCE_GATHER, Purpose.EXPERT_ROWS
    flights = [
        Flight(gather, ("all_gather", 8), 0.0, 3.0, 4.0, 4.0),  # in flight for 4, waited for 1
        Flight(rows, ("all_to_all", 8), 6.0, 8.0, 8.0, 7.0),  # complete before the wait
        Flight(gather, ("all_gather", 8), 10.0, 10.0, 12.0, 12.0),  # nothing beside it
    ]
    alone_s = {("all_gather", 8): 2.0, ("all_to_all", 8): 1.0}
    result = masking(flights, alone_s)
    assert result["exposed_s"] == {"tp": 3.0, "ep": 0.0}
    assert result["masking_timeline"] == pytest.approx(1 - 3 / 7)
    assert result["masking_wait"] == pytest.approx(1 - 3 / 5)


def test_waits_of_sub_models_for_each_other_are_no_communication() -> None:
    gather = Flight(Purpose.SEQUENCE_GATHER, ("all_gather", 8), 0.0, 0.5, 1.0, 1.0)
    parts = Flight(Purpose.SUBMODELS_SUM, ("all_reduce", 8), 2.0, 2.0, 9.0, 9.0)
    alone_s = {gather.work: 1.0, parts.work: 0.5}
    both, one = masking([gather, parts], alone_s), masking([gather], alone_s)
    assert both["exposed_s"] == {"tp": 0.5, "submodels": 7.0}
    assert both["masking_wait"] == one["masking_wait"] == 0.5
    assert both["masking_timeline"] == one["masking_timeline"] == 0.5
    assert masking([parts], alone_s)["masking_wait"] is None


def test_every_purpose_belongs_to_a_kind_of_parallelism() -> None:
    kinds = {purpose: purpose.parallelism for purpose in Purpose}
    assert {*kinds.values()} == {"dp", "tp", "cp", "ep", "pp", "step", "submodels"}
    assert kinds[Purpose.EXPERT_GRADIENTS] == "dp"
    assert kinds[Purpose.KEY_VALUE_GATHER] == "tp"
    assert kinds[Purpose.KEY_VALUE_GRADIENTS] == "cp"
    assert all(kinds[purpose.backward] == kind for purpose, kind in kinds.items())
