import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config import Training
from hyper_parallel.trainer import LrSchedule

pytestmark = pytest.mark.unit

KINDS = ("cosine", "wsd", "linear", "constant")
schedules = st.builds(
    LrSchedule,
    kind=st.sampled_from(KINDS),
    peak=st.floats(1e-6, 1.0),
    steps=st.integers(2, 500),
    warmup_steps=st.integers(0, 50),
    decay_steps=st.integers(1, 100),
    min_ratio=st.floats(0, 1),
)


@given(schedules)
def test_factor_rises_to_the_peak_and_never_rises_again(schedule):
    factors = [schedule.factor(step) for step in range(1, schedule.steps + 1)]
    warm = min(schedule.warmup_steps, schedule.steps)
    assert all(0 <= f <= 1 for f in factors)
    assert factors[:warm] == sorted(factors[:warm])
    after = factors[warm:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if warm:
        assert factors[warm - 1] == warm / schedule.warmup_steps


@given(schedules)
def test_the_last_step_has_the_least_rate(schedule):
    if schedule.steps <= schedule.warmup_steps or schedule.kind == "constant":
        return
    assert math.isclose(schedule.factor(schedule.steps), schedule.min_ratio, abs_tol=1e-12)


def test_cosine_is_halfway_at_half_time():
    schedule = LrSchedule("cosine", peak=2.0, steps=110, warmup_steps=10, min_ratio=0.0)
    assert schedule.lr(60) == pytest.approx(1.0)
    assert schedule.lr(5) == pytest.approx(1.0)


def test_wsd_is_flat_until_its_decay():
    schedule = LrSchedule(
        "wsd", peak=1.0, steps=100, warmup_steps=10, decay_steps=20, min_ratio=0.1
    )
    assert {schedule.lr(step) for step in range(10, 81)} == {1.0}
    assert schedule.lr(90) == pytest.approx(0.55)
    assert schedule.lr(100) == pytest.approx(0.1)


def test_wsd_decays_over_a_tenth_of_the_run_by_default():
    schedule = LrSchedule.of(Training(steps=200, lr_schedule="wsd", warmup_steps=0, lr=1.0))
    assert schedule.lr(180) == 1.0
    assert schedule.lr(181) < 1.0


def test_the_rate_depends_on_the_step_alone():
    schedule = LrSchedule("cosine", peak=1.0, steps=10, warmup_steps=2)
    assert [schedule.lr(s) for s in (7, 3, 7)] == [schedule.lr(7), schedule.lr(3), schedule.lr(7)]
