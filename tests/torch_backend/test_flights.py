"""Recorded collectives of a step: as many as the plan says, and in flight while the rank computes if it overlaps."""

from __future__ import annotations

from collections import Counter

import pytest

from hyper_parallel.backends.torch import flights_to
from hyper_parallel.ir import Flight, Overlap, Strategy, masking
from hyper_parallel.runtime import World, forward_backward, launch, parallelize
from tests.parity._case import Case

pytestmark = pytest.mark.dist

CASE = Case()


def flights_of(overlap: Overlap, world: World) -> tuple[list[Flight], Counter[str]]:
    """The flights of one step, and the planned calls by purpose."""
    strategy = Strategy(tp_x=2, overlap=overlap)
    model, plan = CASE.build(), CASE.plan(strategy)
    parallelize(model, plan, world)
    ids, labels = CASE.batches()[0]
    flights: list[Flight] = []
    with flights_to(flights.append):
        forward_backward(model, [{"input_ids": ids, "shift_labels": labels}], 1)
    planned: Counter[str] = Counter()
    for collective in plan.collectives:
        planned[collective.purpose] += collective.count
    return flights, planned


def test_flights_are_those_of_the_plan() -> None:
    def rank(_: int) -> list[tuple[list[Flight], Counter[str]]]:
        with World.join("cpu") as world:
            return [flights_of(overlap, world) for overlap in (Overlap(), Overlap(True))]

    for serial, halved in launch(rank, 2, timeout_s=100):
        for flights, planned in (serial, halved):
            counted = Counter(str(flight.purpose) for flight in flights)
            assert counted
            assert counted == {name: planned[name] for name in counted}
            assert all(f.start_s <= f.wait_s <= f.resume_s for f in flights)
            assert all(f.start_s <= f.end_s <= f.resume_s + 1.0 for f in flights)
        figures = []
        for flights, _ in (serial, halved):
            alone_s = {flight.work: flight.end_s - flight.start_s for flight in flights}
            figures.append(masking(flights, alone_s))
        assert figures[0]["masking_timeline"] == pytest.approx(0.0, abs=1e-6)
        assert figures[1]["masking_timeline"] > 0.0
        assert {*figures[0]["exposed_s"]} == {"tp"}
