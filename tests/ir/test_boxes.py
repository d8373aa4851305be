"""Boxes agree with sets of indices, computed one by one."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import (
    Box,
    boxes,
    choose_senders,
    divided_dims,
    merge,
    overlap,
    runs_of_splits,
    tile,
    transfers,
)
from tests.strategies_ir import layouts, meshes, shapes

pytestmark = pytest.mark.unit


def slices(ranges):
    return tuple(slice(start, stop) for start, stop in ranges)


def indices(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box.ranges)))


def draw_box(draw, shape, name="w"):
    ranges = []
    for size in shape:
        start = draw(st.integers(0, size))
        ranges.append((start, draw(st.integers(start, size))))
    return Box(name, tuple(ranges))


@st.composite
def shards(draw, shape):
    """Boxes of every rank of a random layout, by device; some dims have stacked parts."""
    mesh = draw(meshes())
    layout = draw(layouts(mesh, len(shape), partial_from=()))
    for dim, size in enumerate(shape):
        layout = layout.stack(dim, draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0])))
    runs = [layout.ranges(shape, mesh, mesh.coordinate(d)) for d in range(mesh.size)]
    return [(own, boxes("w", own)) for own in runs]


def numbered(shape):
    return np.arange(math.prod(shape)).reshape(shape)


def held(full, runs):
    """Local array of a rank: the runs of each dim one after another."""
    rows = [[i for start, stop in ranges for i in range(start, stop)] for ranges in runs]
    return full[np.ix_(*rows)]


@settings(deadline=None)
@given(st.data(), shapes())
def test_the_boxes_of_a_shard_are_its_elements_in_place(data, shape):
    full = numbered(shape)
    for runs, own in data.draw(shards(shape)):
        local = held(full, runs)
        for part in own:
            assert part.box.size > 0
            np.testing.assert_array_equal(local[part.index], full[slices(part.box.ranges)])
            assert part.box.shape == local[part.index].shape
        assert sum(part.box.size for part in own) == local.size


@settings(deadline=None)
@given(st.data(), shapes(), st.booleans())
def test_transfers_turn_the_shards_of_one_layout_into_those_of_another(data, shape, replicated):
    full = numbered(shape)
    sources = data.draw(shards(shape))
    sent_by = choose_senders([{part.box: part.box.size for part in own} for _, own in sources])
    have = [(box, box) for box in sent_by]
    have += [("other", Box("v", box.ranges)) for box in sent_by] * replicated
    for runs, own in data.draw(shards(shape)):
        local, copied = np.full_like(held(full, runs), -1), 0
        want = [(part, part.box) for part in own]
        for source, target, box in transfers(have, want):
            values = full[slices(source.ranges)][slices(box.within(source))]
            local[target.index][slices(box.within(target.box))] = values
            copied += values.size
        np.testing.assert_array_equal(local, held(full, runs))
        assert copied == local.size


@settings(deadline=None)
@given(st.data(), shapes(max_size=4))
def test_overlap_and_contains_agree_with_sets(data, shape):
    a, b = (draw_box(data.draw, shape) for _ in range(2))
    common = indices(a) & indices(b)
    shared = overlap(a, b)
    assert (shared is None) == (not common)
    assert common == (set() if shared is None else indices(shared))
    assert a.size == len(indices(a))
    if indices(b):
        assert a.contains(b) == (indices(b) <= indices(a))
    assert overlap(a, Box("v", b.ranges)) is None
    assert not a.contains(Box("w", (*b.ranges, (0, 1))))


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_boxes_tile_another_only_if_they_cover_every_element_once(data, shape):
    outer = Box("w", tuple((2, 2 + size) for size in shape))
    candidates = [Box("w", ())]
    for start, stop in outer.ranges:
        spans = [(a, b) for a in range(start, stop) for b in range(a + 1, stop + 1)]
        candidates = [Box("w", (*box.ranges, span)) for box in candidates for span in spans]
    parts = data.draw(st.lists(st.sampled_from(candidates), max_size=4))
    covered = Counter(index for part in parts for index in indices(part))
    assert tile(outer, parts) == (covered == Counter(indices(outer)))
    for d in range(len(shape)):
        assert (d in divided_dims(outer, parts)) == any(part.ranges[d] != outer.ranges[d] for part in parts)


def test_shards_tile_and_a_shifted_pair_of_equal_size_does_not():
    outer = Box.full("w", (4, 4))
    quarters = [Box.at("w", (i, j), (2, 2)) for i in (0, 2) for j in (0, 2)]
    assert tile(outer, quarters)
    assert not tile(outer, [*quarters[:3], Box.at("w", (1, 1), (2, 2))])
    assert tile(Box("w", ()), [Box("w", ())])


def chunk_rule(rows, count, number):
    length = -(-len(rows) // count)
    return rows[number * length : (number + 1) * length]


def divided(size, splits):
    """Rows of a rank by the definition of the placements."""
    rows = list(range(size))
    for degree, blocks, rank in splits:
        parts = [chunk_rule(rows, blocks, block) for block in range(blocks)]
        rows = [row for part in parts for row in chunk_rule(part, degree, rank)]
    return rows


@settings(deadline=None)
@given(st.integers(0, 24), st.integers(1, 4), st.integers(1, 3), st.data())
def test_runs_of_strided_shards_are_those_of_fsdp_within_tensor_parallelism(size, dp, tp, data):
    """FSDP is the outer axis of the mesh, and divides the shard of the inner axis."""
    ranks = [*itertools.product(range(dp), range(tp))]
    by_rank = {r: [(dp, tp, r[0]), (tp, 1, r[1])] for r in ranks}
    fsdp = {(i, j): chunk_rule(chunk_rule(list(range(size)), tp, j), dp, i) for i, j in ranks}
    agree = tp == 1 or all(divided(size, by_rank[r]) == fsdp[r] for r in ranks)
    rank = data.draw(st.sampled_from(ranks))
    runs = runs_of_splits(size, by_rank[rank])
    assert (runs is not None) == agree
    if runs is not None:
        rows = [i for start, stop in runs for i in range(start, stop)]
        assert rows == divided(size, by_rank[rank])
        assert merge(runs) == runs


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 4), st.data())
def test_runs_of_stacked_parts_are_a_chunk_of_each(half, blocks, degree, data):
    rank, size = data.draw(st.integers(0, degree - 1)), half * blocks * degree
    runs = runs_of_splits(size, [(degree, blocks, rank)])
    rows = [i for start, stop in runs for i in range(start, stop)]
    assert rows == divided(size, [(degree, blocks, rank)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=5))
def test_merging_keeps_the_order_of_indices(pairs):
    runs = [(start, start + length) for start, length in pairs]
    merged = merge(runs)
    flat = [[i for start, stop in some for i in range(start, stop)] for some in (runs, merged)]
    assert flat[0] == flat[1]
    assert all(start < stop for start, stop in merged)
    assert all(a[1] != b[0] for a, b in itertools.pairwise(merged))


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=4), st.data())
def test_senders_have_their_boxes_and_replicas_balance_their_bytes(ranks, data):
    sizes = {n: data.draw(st.integers(1, 20)) for n in set().union(*ranks)}
    have = [{Box(str(n), ()): sizes[n] for n in own} for own in ranks]
    senders = choose_senders(have)
    assert senders.keys() == set().union(*have)
    assert all(box in have[rank] for box, rank in senders.items())
    everywhere = choose_senders([{Box(str(n), ()): size for n, size in sizes.items()}] * len(ranks))
    loads = [0] * len(ranks)
    for box, rank in everywhere.items():
        loads[rank] += sizes[int(box.name)]
    assert max(loads) - min(loads) <= max(sizes.values())
