"""The cut of sequences over context-parallel ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.ir import SequenceCut
from hyper_parallel.ir.strategy import sees_all, sees_some

pytestmark = pytest.mark.unit

CUTS = st.builds(SequenceCut, st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
WINDOWS = st.none() | st.integers(1, 40)


def sees(query, key, window):
    return key <= query and (window is None or query - key < window)


@given(CUTS)
def test_every_position_is_on_one_rank(cut):
    ranks = [cut.positions(r) for r in range(cut.ring * cut.ulysses)]
    assert all(len(held) == cut.local for held in ranks)
    assert sorted(p for held in ranks for p in held) == list(range(cut.padded))
    assert cut.seq_len <= cut.padded < cut.seq_len + cut.unit


@given(CUTS)
def test_the_ranks_of_a_place_hold_its_spans_in_order(cut):
    for place, spans in enumerate(cut.spans):
        ranks = range(place * cut.ulysses, (place + 1) * cut.ulysses)
        held = [p for r in ranks for p in cut.positions(r)]
        assert held == [p for a, b in spans for p in range(a, b)]


@given(CUTS)
def test_places_do_equal_work_under_a_causal_mask(cut):
    work = {sum(p + 1 for a, b in spans for p in range(a, b)) for spans in cut.spans}
    assert len(work) == 1


@given(st.integers(0, 12), st.integers(1, 8), st.integers(0, 12), st.integers(1, 8), WINDOWS)
def test_visibility_of_spans(q, queries, k, keys, window):
    found = [sees(i, j, window) for i in range(q, q + queries) for j in range(k, k + keys)]
    assert sees_some((q, q + queries), (k, k + keys), window) == any(found)
    assert sees_all((q, q + queries), (k, k + keys), window) == all(found)


@given(CUTS, WINDOWS)
def test_rounds_are_those_in_which_somebody_sees_something(cut, window):
    held = [{p for a, b in spans for p in range(a, b)} for spans in cut.spans]
    wanted = [
        d
        for d in range(1, cut.ring)
        if any(sees(q, k, window) for j in range(cut.ring) for q in held[j] for k in held[(j - d) % cut.ring])
    ]
    assert list(cut.distances(window)) == wanted


def test_kinds():
    assert SequenceCut.of(64, 4, "ring") == SequenceCut(64, 4, 1)
    assert SequenceCut.of(64, 4, "all_gather") == SequenceCut(64, 4, 1)
    assert SequenceCut.of(64, 4, "ulysses") == SequenceCut(64, 1, 4)
    assert SequenceCut.of(64, 4, "hybrid", 2) == SequenceCut(64, 2, 2)
    assert SequenceCut(16, 2).spans == (((0, 4), (12, 16)), ((4, 8), (8, 12)))
