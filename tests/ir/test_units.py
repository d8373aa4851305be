"""Integer arithmetic agrees with its definition."""

import pytest

from hyper_parallel.units import divisors, round_up

pytestmark = pytest.mark.unit


def test_divisors_are_all_and_ascending():
    for number in (1, 2, 16, 36, 97, 96):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_rounded_number_is_the_next_multiple():
    for number in range(1, 30):
        multiples = [m for m in range(0, 60, 7) if m >= number]
        assert round_up(number, 7) == multiples[0]
