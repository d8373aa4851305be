"""The placements of a layout mean to DTensor what the layout says."""

import itertools

import pytest

from hyper_parallel.ir import Layout, Mesh, Shard, StridedShard, placements

pytestmark = pytest.mark.torch

MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_dtensor_cuts_a_dim_in_the_order_of_the_layout(order):
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import placement_types

    layout = Layout((order,))
    rows = torch.arange(24)
    for device in range(MESH.size):
        at = MESH.coordinate(device)
        held = rows
        for axis, entry in zip(MESH.names, placements(layout, MESH), strict=True):
            if isinstance(entry, StridedShard):
                theirs = placement_types._StridedShard(entry.dim, split_factor=entry.split_factor)
            else:
                assert isinstance(entry, Shard)
                theirs = placement_types.Shard(entry.dim)
            parts, _ = theirs._split_tensor(held, MESH.degree(axis), with_padding=False)
            held = parts[at[axis]]
        (((start, stop),),) = layout.ranges((24,), MESH, at)
        assert held.tolist() == list(range(start, stop))
