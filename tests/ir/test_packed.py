"""Which rows of a packed projection a rank works on, and which change hands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.ir import (
    equal_parts,
    exchanged,
    exchanged_rows,
    gate_up_parts,
    qkv_parts,
    working_rows,
)

pytestmark = pytest.mark.unit


@st.composite
def cases(draw):
    """Heads, key heads and a degree that divides the rows; width 1, 2 or 3."""
    kv = draw(st.sampled_from([1, 2, 4]))
    heads = kv * draw(st.sampled_from([1, 2, 4]))
    legal = [t for t in (1, 2, 4, 8) if heads % t == 0 and (kv % t == 0 or t % kv == 0)]
    width = draw(st.integers(1, 3))
    parts = qkv_parts(heads, kv, width)
    rows = (heads + 2 * kv) * width
    return heads, kv, width, parts, draw(st.sampled_from([t for t in legal if rows % t == 0]))


@given(cases())
def test_a_rank_works_on_its_queries_and_on_the_key_heads_these_need(case):
    heads, kv, width, parts, degree = case
    for rank in range(degree):
        query, key, value = working_rows(parts, degree, rank)
        own = range(rank * heads // degree, (rank + 1) * heads // degree)
        assert query == (own[0] * width, (own[-1] + 1) * width)
        needed = {h // (heads // kv) for h in own}
        first = heads * width
        assert key == (first + min(needed) * width, first + (max(needed) + 1) * width)
        assert value == (key[0] + kv * width, key[1] + kv * width)


@given(cases())
def test_every_row_a_rank_works_on_comes_from_the_rank_that_holds_it(case):
    *_, parts, degree = case
    held = sum(p.rows for p in parts) // degree
    for target in range(degree):
        runs = [(s, run) for s in range(degree) for run in exchanged(parts, degree, s, target)]
        assert all(s * held <= a < b <= (s + 1) * held for s, (a, b) in runs)
        rows = [r for _, (a, b) in runs for r in range(a, b)]
        wanted = [r for a, b in working_rows(parts, degree, target) for r in range(a, b)]
        assert rows == wanted  # in order: what arrives by rank is sorted by part
        assert len(rows) == sum(exchanged_rows(parts, degree, s, target) for s in range(degree))


def test_parts_of_one_size_are_cut_apart():
    assert equal_parts(gate_up_parts(12), 2)
    assert not equal_parts(gate_up_parts(12), 4)
    assert equal_parts(qkv_parts(4, 4, 8), 4)
    assert not equal_parts(qkv_parts(4, 2, 8), 2)
