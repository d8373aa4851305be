"""Search over candidates with lower bounds: the best value against brute force, and no price that cannot win."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.mpmd import search_by_bound

pytestmark = pytest.mark.unit

_CANDIDATE = st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9))
"""Lower bound of a candidate, and the excess of its value over the bound; None: the candidate cannot run."""


@given(st.lists(_CANDIDATE, max_size=8))
def test_the_search_returns_the_best_of_all_candidates(candidates):
    bounds = [bound for bound, _ in candidates]
    values = [None if excess is None else bound + excess for bound, excess in candidates]
    priced, best = [], None

    def price(position, best_so_far):
        nonlocal best
        assert best_so_far == best
        assert best is None or bounds[position] < best
        priced.append(position)
        value = values[position]
        best = value if best is None else min(best, best if value is None else value)
        return value

    found = search_by_bound(bounds, price)
    runnable = [value for value in values if value is not None]
    if not runnable:
        assert found is None
        assert len(priced) == len(values)
        return
    assert found.value == values[found.position] == min(runnable)
    assert found.priced == len(priced) == len({*priced})
    assert all(bounds[k] >= found.value for k in {*range(len(bounds))} - {*priced})
    assert min(bounds) <= found.value
