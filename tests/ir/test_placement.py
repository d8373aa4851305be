import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import (
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    placements,
)
from tests.strategies_ir import layouts, meshes

pytestmark = pytest.mark.unit


def held(index, entries, mesh, at):
    """Return the part of an index array on a rank if placements act from the outermost mesh axis inwards."""
    for axis, entry in zip(mesh.names, entries, strict=True):
        if isinstance(entry, Shard):
            index = np.split(index, mesh.degree(axis), axis=entry.dim)[at[axis]]
        elif isinstance(entry, StridedShard):
            pieces = np.split(index, entry.split_factor, axis=entry.dim)
            mine = [np.split(p, mesh.degree(axis), axis=entry.dim)[at[axis]] for p in pieces]
            index = np.concatenate(mine, axis=entry.dim)
    return index


@settings(deadline=None)
@given(st.data())
def test_placements_hold_the_elements_of_the_layout(data):
    mesh = data.draw(meshes())
    layout = data.draw(layouts(mesh, 2))
    parts = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    layout = layout.stack(0, parts[0]).stack(1, parts[1])
    cuts = [math.prod(mesh.degree(a) for a in dim) for dim in layout.axes]
    even = tuple(2 * cut * part for cut, part in zip(cuts, parts, strict=True))
    entries = placements(layout, mesh)
    index = np.arange(math.prod(even)).reshape(even)
    for device in range(mesh.size):
        at = mesh.coordinate(device)
        rows = [np.concatenate([np.arange(a, b) for a, b in runs]) for runs in layout.ranges(even, mesh, at)]
        np.testing.assert_array_equal(held(index, entries, mesh, at), index[np.ix_(*rows)])
    assert {a for a, e in zip(mesh.names, entries, strict=True) if e == Partial()} == set(layout.partial)


MESH = Mesh((("dp_replicate", 2), ("dp_shard", 2), ("tp_x", 4)))


def test_fsdp_inside_tensor_parallelism_is_a_strided_shard():
    layout = Layout((("tp_x", "dp_shard"), ()))
    assert placements(layout, MESH) == (Replicate(), StridedShard(0, 4), Shard(0))


def test_mesh_order_needs_no_stride():
    assert placements(Layout((("dp_shard", "tp_x"),)), MESH) == (Replicate(), Shard(0), Shard(0))
    assert placements(Layout((("dp_shard",), ("tp_x",))), MESH)[1:] == (Shard(0), Shard(1))


def test_partial_sums():
    assert placements(Layout(((),), ("tp_x",)), MESH) == (Replicate(), Replicate(), Partial())
