"""Microbatches in flight by formula equal those of the schedules themselves, on every rank."""

import numpy as np
import pytest

from hyper_parallel import mpmd
from hyper_parallel.cost import SCHEDULES, Candidates
from hyper_parallel.cost.candidates import in_flight

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_every_rank_has_as_many_microbatches_in_flight_as_its_schedule(schedule, stages, rounds, ranks):
    microbatches = rounds * ranks
    name = {"interleaved": "interleaved_1f1b", "zb-h1": "zb_h1"}.get(schedule, schedule)
    counted = mpmd.in_flight(mpmd.make_schedule(name, ranks, microbatches, stages))
    candidates = Candidates.of_columns(
        pp=ranks, vpp=stages, accumulation=microbatches, schedule=SCHEDULES.index(schedule)
    )
    formula = [in_flight(candidates, rank) for rank in range(ranks)]
    np.testing.assert_allclose(np.ravel(formula), np.array(counted) / stages)
    np.testing.assert_allclose(in_flight(candidates, candidates.pp - 1), formula[-1])
