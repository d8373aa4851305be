"""Orders of the mesh axes that a search distinguishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.cost import ORDERS
from hyper_parallel.ir import AXES
from hyper_parallel.planner.strategy_space import TENSOR_INNERMOST, distinct_orders

pytestmark = pytest.mark.unit


def shares(order, degrees, tiers):
    """Ranks of every axis that lie in one domain of every tier, counted axis by axis."""
    stride, found = 1, {}
    for axis in reversed(order):
        degree = degrees[AXES.index(axis)]
        found[axis] = tuple(min(degree, max(1, size // stride)) for size in tiers)
        stride *= degree
    return tuple(found[axis] for axis in AXES)


@settings(max_examples=60)
@given(
    st.tuples(*(st.sampled_from((1, 2, 3, 4, 8, 12)) for _ in AXES)),
    st.lists(st.sampled_from((4, 8, 16, 72, 384)), max_size=3, unique=True).map(sorted),
)
def test_one_order_of_every_kind_is_kept_with_tensor_parallelism_innermost_where_possible(degrees, tiers):
    kept = distinct_orders(degrees, tuple(tiers))
    kinds = [shares(ORDERS[index], degrees, tiers) for index in kept]
    assert len({*kinds}) == len(kinds)
    assert {*kinds} == {shares(order, degrees, tiers) for order in ORDERS}
    inner = {shares(ORDERS[index], degrees, tiers) for index in TENSOR_INNERMOST}
    assert all((i in TENSOR_INNERMOST) == (k in inner) for i, k in zip(kept, kinds, strict=True))
