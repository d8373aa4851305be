"""A fixed subset of the fuzz on 4 and 8 ranks, and 16 for 2-D tensor parallelism; `make fuzz N=...` runs more.

The seed and the number of cases come from the environment, so that a nightly run explores and this one repeats.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.parity.fuzz import AXES, Case, Tally, cases, run_case

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(0)]
NUM_CASES = int(os.environ.get("FUZZ_CASES", "4"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
BYTES_TOO = os.environ.get("FUZZ_BYTES", "1") == "1"


def _rules(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


TALLY = Tally()


@seed(SEED)
@_rules(NUM_CASES)
@given(case=cases())
def test_any_strategy_repeats_one_device_or_is_refused(case: Case) -> None:
    run_case(case, TALLY, BYTES_TOO)


@seed(SEED)
@_rules(NUM_CASES)
@given(case=cases(twos=2))
def test_two_axes_on_four_ranks(case: Case) -> None:
    run_case(case, TALLY, BYTES_TOO)


@seed(SEED)
@_rules(max(1, NUM_CASES // 8))
@given(case=cases(twos=4, grid=True))
def test_two_tensor_axes_on_sixteen_ranks(case: Case) -> None:
    run_case(case, TALLY, BYTES_TOO)


def test_the_fuzz_ran_every_axis() -> None:
    print(TALLY)  # noqa: T201 what ran and what was refused is the result, shown with -s
    assert TALLY.ran, "the fuzz ran nothing"
    if "FUZZ_CASES" not in os.environ and "FUZZ_SEED" not in os.environ:
        assert TALLY.ran.keys() == set(AXES)
