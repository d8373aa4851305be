import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import MeshError
from hyper_parallel.ir import AXES, Mesh, Strategy
from hyper_parallel.serde import decode, encode
from tests.strategies_ir import meshes

pytestmark = pytest.mark.unit


def devices(mesh):
    return [mesh.device(i) for i in range(mesh.size)]


def axis_subsets(mesh):
    return st.lists(st.sampled_from(mesh.names), unique=True, max_size=3)


@given(meshes(with_devices=True))
def test_at_is_the_inverse_of_coordinate(mesh):
    seen = [mesh.coordinate(d) for d in devices(mesh)]
    assert [mesh.at(c) for c in seen] == devices(mesh)
    spans = [range(d) for d in mesh.shape]
    assert [tuple(c.values()) for c in seen] == list(itertools.product(*spans))


@given(st.data())
def test_groups_partition_the_devices(data):
    mesh = data.draw(meshes(with_devices=True))
    axes = data.draw(axis_subsets(mesh))
    groups = mesh.groups(axes)
    assert sorted(d for g in groups for d in g) == sorted(devices(mesh))
    assert {len(g) for g in groups} == {mesh.degree(axes)}
    for group in groups:
        for device in group:
            assert mesh.group(device, axes) == group
            fixed = {k: v for k, v in mesh.coordinate(device).items() if k not in axes}
            assert fixed.items() <= mesh.coordinate(group[0]).items()


@given(st.data())
def test_the_first_axis_of_a_group_is_outermost(data):
    mesh = data.draw(meshes(with_devices=True))
    axes = data.draw(axis_subsets(mesh))
    group = mesh.group(mesh.device(0), axes)
    along = [tuple(mesh.coordinate(d)[a] for a in axes) for d in group]
    assert along == sorted(along)


@given(meshes(with_devices=True))
def test_json_round_trip(mesh):
    assert decode(Mesh, encode(mesh)) == mesh


def test_inner_axes_hold_neighbours():
    mesh = Mesh((("dp_shard", 2), ("tp_x", 4)))
    assert mesh.groups("tp_x") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp_shard") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.group(5, ("tp_x", "dp_shard")) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert str(mesh) == "Mesh(dp_shard=2 x tp_x=4)"


def test_an_axis_the_mesh_does_not_have_counts_one():
    mesh = Mesh((("a", 2),))
    assert mesh.degree("z") == 1
    assert mesh.degree(("a", "z")) == 2


def test_a_strategy_gives_every_axis_in_order():
    mesh = Strategy(dp_shard=2, tp_x=4).mesh()
    assert mesh.names == AXES
    assert mesh.size == 8


@pytest.mark.parametrize(
    ("axes", "devices", "says"),
    [
        ((("a", 2), ("a", 2)), (), "twice"),
        ((("a", 0),), (), "below 1"),
        ((("a", 2),), (0, 1, 2), "degrees multiply to 2"),
        ((("a", 2),), (1, 1), "a device twice"),
    ],
)
def test_what_is_no_mesh_is_refused(axes, devices, says):
    with pytest.raises(MeshError, match=says) as error:
        Mesh(axes, devices)
    assert error.value.code == "HP201"


@pytest.mark.parametrize("mesh", [Mesh((("a", 2),)), Mesh((("a", 2),), (4, 6))])
def test_a_device_outside_is_refused(mesh):
    with pytest.raises(MeshError, match="not in the mesh"):
        mesh.coordinate(5)


def test_an_index_outside_an_axis_is_refused():
    with pytest.raises(MeshError, match="is out of range for axis"):
        Mesh((("a", 2), ("b", 2))).at({"b": 2})
