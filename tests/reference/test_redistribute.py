import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import LayoutError
from hyper_parallel.ir import CollectiveStep, Layout, Mesh, redistribute
from tests.reference._simulate import assert_holds, distribute, execute
from tests.strategies_ir import layouts, meshes, shapes

pytestmark = pytest.mark.reference

ITEM = 4


@st.composite
def cases(draw):
    mesh, shape = draw(meshes(with_devices=True)), draw(shapes())
    src = draw(layouts(mesh, len(shape)))
    dst = draw(layouts(mesh, len(shape), partial_from=src.partial))
    return mesh, shape, src, dst


def run(mesh, shape, src, dst, seed=0):
    rng = np.random.default_rng(seed)
    full = rng.integers(-99, 99, shape)
    steps = redistribute(src, dst, mesh, shape, ITEM)
    local, sent = execute(steps, distribute(full, src, mesh, rng), mesh)
    return full, steps, local, sent


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_rank_ends_with_its_slice_and_sends_the_counted_bytes(case):
    mesh, _, _, dst = case
    full, steps, local, sent = run(*case)
    assert_holds(local, full, dst, mesh)
    assert [s.sent_bytes for s in steps] == [n * ITEM for n in sent]
    assert all(s.axis in mesh.names and mesh.degree(s.axis) > 1 for s in steps)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_each_step_ends_in_the_layout_it_names(case):
    mesh, shape, src, dst = case
    rng = np.random.default_rng(1)
    full = rng.integers(-99, 99, shape)
    local = distribute(full, src, mesh, rng)
    for step in redistribute(src, dst, mesh, shape, ITEM):
        local, _ = execute([step], local, mesh)
        assert_holds(local, full, step.layout, mesh)


def every_move(layout, mesh):
    """Steps a layout allows, written out without the code under test; costs are left to the simulator."""
    moves = []
    dims = range(len(layout.axes))

    def put(axes, dim, axis):
        return tuple((*d, axis) if i == dim else d for i, d in enumerate(axes))

    for axis in mesh.names:
        rest = tuple(p for p in layout.partial if p != axis)
        taken = tuple(tuple(a for a in d if a != axis) for d in layout.axes)
        if axis in layout.partial:
            moves.append(("all_reduce", axis, None, None, Layout(layout.axes, rest)))
            moves += [("reduce_scatter", axis, d, None, Layout(put(layout.axes, d, axis), rest)) for d in dims]
        elif axis not in layout.sharding_axes:
            moves += [("slice", axis, d, None, Layout(put(taken, d, axis), rest)) for d in dims]
        else:
            (src,) = (d for d in dims if axis in layout.axes[d])
            if layout.axes[src][-1] == axis:
                moves.append(("all_gather", axis, src, None, Layout(taken, rest)))
                moves += [("all_to_all", axis, src, d, Layout(put(taken, d, axis), rest)) for d in dims if d != src]
    return moves


def cheapest_by_brute_force(src, dst, mesh, shape, max_steps):
    """Least bytes over every sequence of at most `max_steps` steps, sent bytes counted by simulation."""
    full = np.zeros(shape, dtype=int)
    rng = np.random.default_rng(0)
    best = math.inf
    costs = {}

    def cost(layout, kind, axis, dim, to_dim):
        key = (layout, kind, axis, dim, to_dim)
        if key not in costs:
            step = CollectiveStep(kind, axis, dim, to_dim, 0, layout)
            costs[key] = execute([step], distribute(full, layout, mesh, rng), mesh)[1][0]
        return costs[key]

    def walk(layout, sent, left):
        nonlocal best
        # Sums over two axes are the same sums in either order.
        if {*layout.partial} == {*dst.partial} and replace(layout, partial=dst.partial) == dst:
            best = min(best, sent)
        if left:
            for kind, axis, dim, to_dim, after in every_move(layout, mesh):
                walk(after, sent + cost(layout, kind, axis, dim, to_dim), left - 1)

    walk(src, 0, max_steps)
    return best * ITEM


@st.composite
def tiny_cases(draw):
    mesh = Mesh((("a", draw(st.integers(2, 4))), ("b", draw(st.integers(2, 3)))))
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    src = draw(layouts(mesh, 2).filter(lambda x: len(x.sharding_axes + x.partial) == 2))
    return mesh, shape, src, draw(layouts(mesh, 2, partial_from=src.partial))


@settings(max_examples=40, deadline=None)
@given(tiny_cases())
def test_no_sequence_of_up_to_four_steps_is_cheaper(case):
    mesh, shape, src, dst = case
    steps = redistribute(src, dst, mesh, shape, ITEM)
    sent = sum(s.sent_bytes for s in steps)
    best = cheapest_by_brute_force(src, dst, mesh, shape, 4)
    assert sent <= best
    if len(steps) <= 4:
        assert sent == best


MESH = Mesh((("a", 2), ("b", 4)))


@pytest.mark.parametrize(
    ("src", "dst", "kinds", "sent"),
    [
        ([(), ()], [("a",), ()], ["slice"], 0),
        ([("b",), ()], [(), ()], ["all_gather"], 3 * 16 * ITEM),
        ([("b",), ()], [(), ("b",)], ["all_to_all"], 3 * 4 * ITEM),
        ([("a", "b"), ()], [("a",), ()], ["all_gather"], 3 * 8 * ITEM),
        ([("a", "b"), ()], [("a", "b"), ()], [], 0),
    ],
)
def test_known_sequences(src, dst, kinds, sent):
    steps = redistribute(Layout(tuple(src)), Layout(tuple(dst)), MESH, (8, 8), ITEM)
    assert [s.kind for s in steps] == kinds
    assert sum(s.sent_bytes for s in steps) == sent


def test_partial_sums_are_scattered_where_they_shall_lie():
    src, dst = Layout(((), ()), partial=("b",)), Layout((("b",), ()))
    (step,) = redistribute(src, dst, MESH, (8, 8), ITEM)
    assert str(step) == f"reduce_scatter(b, dim 0) {3 * 16 * ITEM} B"


def test_sums_over_two_axes_are_reduced_in_levels():
    src, dst = Layout(((), ()), partial=("a", "b")), Layout(((), ()))
    steps = redistribute(src, dst, MESH, (8, 8), ITEM)
    # One ring over all 8 ranks sends 2 * 7/8 of the tensor; two all-reduces one after the other would send more.
    assert sum(s.sent_bytes for s in steps) == 2 * 7 * 8 * ITEM
    assert "all_reduce" in [s.kind for s in steps]


def test_axis_order_within_a_dim_matters():
    src, dst = Layout((("a", "b"), ())), Layout((("b", "a"), ()))
    full, steps, local, _ = run(MESH, (8, 8), src, dst)
    assert steps
    assert_holds(local, full, dst, MESH)


def test_axes_of_degree_one_cost_nothing():
    mesh = Mesh((("a", 1), ("b", 2)))
    assert redistribute(Layout((("a", "b"),)), Layout((("b",),)), mesh, (4,), ITEM) == ()


@pytest.mark.parametrize(
    ("src", "dst", "shape", "says"),
    [
        (Layout(((),)), Layout(((),), partial=("a",)), (4,), "partial sums"),
        (Layout(((),)), Layout(((),), memory="dram"), (4,), "between memory kinds"),
        (Layout(((),)), Layout((("z",),)), (4,), "does not have"),
        (Layout(((),)), Layout(((),)), (4, 4), "1 dims, but the tensor has 2"),
    ],
)
def test_what_is_no_redistribution_is_refused(src, dst, shape, says):
    with pytest.raises(LayoutError, match=says) as error:
        redistribute(src, dst, MESH, shape, ITEM)
    assert error.value.code == "HP202"
