import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import LayoutError
from hyper_parallel.ir import Layout, Mesh, redistribute
from hyper_parallel.serde import DecodeError, decode, encode
from tests.strategies_ir import layouts, meshes, shapes

pytestmark = pytest.mark.unit


@st.composite
def cases(draw):
    mesh, shape = draw(meshes()), draw(shapes())
    return mesh, shape, draw(layouts(mesh, len(shape)))


@given(cases())
def test_every_index_is_covered_once_per_replica(case):
    mesh, shape, layout = case
    covered = np.zeros(shape, dtype=int)
    for device in range(mesh.size):
        ranges = layout.ranges(shape, mesh, mesh.coordinate(device))
        covered[tuple(slice(*one) for (one,) in ranges)] += 1
    replicas = mesh.size // mesh.degree(layout.sharding_axes)
    assert (covered == replicas).all()


@given(cases())
def test_the_first_rank_holds_the_largest_part(case):
    mesh, shape, layout = case
    parts = [layout.local_shape(shape, mesh, mesh.coordinate(d)) for d in range(mesh.size)]
    assert layout.max_local_shape(shape, mesh) == tuple(max(sizes) for sizes in zip(*parts, strict=True))


@given(cases())
def test_ranges_follow_the_chunk_rule_axis_by_axis(case):
    mesh, shape, layout = case
    for device in range(mesh.size):
        at = mesh.coordinate(device)
        ranges = layout.ranges(shape, mesh, at)
        for size, axes, ((start, stop),) in zip(shape, layout.axes, ranges, strict=True):
            rows = np.arange(size)
            for axis in axes:
                chunk = max(1, math.ceil(len(rows) / mesh.degree(axis)))
                rows = rows[at[axis] * chunk : (at[axis] + 1) * chunk]
            assert rows.tolist() == list(range(start, stop))


@given(cases())
def test_json_round_trip(case):
    _, _, layout = case
    assert decode(Layout, json.loads(json.dumps(encode(layout)))) == layout


def test_order_within_a_dim_is_part_of_the_value():
    mesh = Mesh((("a", 2), ("b", 4)))
    at = {"a": 1, "b": 0}
    assert Layout((("a", "b"),)).ranges((8,), mesh, at) == (((4, 5),),)
    assert Layout((("b", "a"),)).ranges((8,), mesh, at) == (((1, 2),),)


def test_uneven_sizes_leave_the_last_parts_short_or_empty():
    mesh, layout = Mesh((("a", 4),)), Layout((("a",),))
    assert [layout.ranges((5,), mesh, {"a": i})[0][0] for i in range(4)] == [
        (0, 2),
        (2, 4),
        (4, 5),
        (5, 5),
    ]


def test_printed_form():
    layout = Layout((("tp_x",), ("tp_y", "dp_shard")), dims=("mlp", "embed"))
    assert str(layout) == "[mlp:tp_x, embed:tp_y.dp_shard] @ hbm"
    assert str(Layout(((), ("a",)), ("b",), "dram")) == "[d0, d1:a] partial(b) @ dram"


def test_split_appends_innermost():
    layout = Layout.replicated(2, dims=("out", "in")).split(0, "tp_x").split(0, "dp_shard")
    assert layout == Layout((("tp_x", "dp_shard"), ()), dims=("out", "in"))
    assert layout.sharding_axes == ("tp_x", "dp_shard")
    with pytest.raises(LayoutError, match="out of range for a layout"):
        layout.split(2, "cp")


def test_an_axis_is_used_once():
    for axes, partial in [((("a",), ("a",)), ()), ((("a", "a"),), ()), ((("a",),), ("a",))]:
        with pytest.raises(LayoutError, match="an axis twice") as error:
            Layout(axes, partial)
        assert error.value.code == "HP202"


def test_names_match_the_dims():
    with pytest.raises(LayoutError, match="1 names for 2 dims"):
        Layout(((), ()), dims=("embed",))


def test_an_axis_outside_the_mesh_is_refused():
    with pytest.raises(LayoutError, match="does not have"):
        Layout((("z",),)).check(Mesh((("a", 2),)))


def test_an_unknown_memory_is_refused():
    with pytest.raises(DecodeError, match=r"\$\.memory"):
        decode(Layout, {"axes": [[]], "memory": "tape"})


def test_parts_are_cut_apart():
    mesh = Mesh((("dp_shard", 2), ("tp_x", 2)))
    layout = Layout.replicated(2, dims=("gate_up", "embed")).stack(0, 2).split(0, "tp_x")
    layout = layout.split(1, "dp_shard")
    assert str(layout) == "[gate_up/2:tp_x, embed:dp_shard] @ hbm"
    at = {"dp_shard": 1, "tp_x": 1}
    assert layout.ranges((8, 6), mesh, at) == (((2, 4), (6, 8)), ((3, 6),))
    assert layout.local_shape((8, 6), mesh, at) == layout.max_local_shape((8, 6), mesh) == (4, 3)
    with pytest.raises(LayoutError, match="does not divide into 2 equal parts"):
        layout.ranges((7, 6), mesh, at)
    with pytest.raises(LayoutError, match="must have one number per dim, each at least 1"):
        Layout(((), ()), parts=(2,))
    with pytest.raises(LayoutError, match="does not support dims with stacked parts"):
        redistribute(layout, Layout(((), ())), mesh, (8, 6), 4)
    assert decode(Layout, json.loads(json.dumps(encode(layout)))) == layout


def test_a_tensor_may_lie_on_one_rank_of_an_axis():
    mesh = Mesh((("edp", 2), ("ep", 4)))
    layout = replace(Layout.replicated(2).split(0, "edp"), one_of=("ep",))
    assert str(layout) == "[d0:edp, d1] @ hbm, one of ep"
    assert layout.sharding_axes == ("edp", "ep")
    assert layout.max_local_shape((6, 5), mesh) == (3, 5)
    assert decode(Layout, json.loads(json.dumps(encode(layout)))) == layout
    with pytest.raises(LayoutError, match="an axis twice"):
        replace(layout, one_of=("edp",))
    with pytest.raises(LayoutError, match="`one_of`"):
        redistribute(layout, Layout(((), ())), mesh, (6, 5), 4)


def test_parts_of_a_whole_dim_make_no_difference():
    layout = Layout(((), ("a",)), parts=(2, 1))
    assert layout.ranges((8, 4), Mesh((("a", 2),)), {"a": 1}) == (((0, 8),), ((2, 4),))
    assert str(layout) == "[d0, d1:a] @ hbm"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"axes": [[]], "colour": 1}, r"\$\.colour: unknown key"),
        ({"memory": "hbm"}, r"\$\.axes: missing"),
        ({"axes": [["tp_x"], 3]}, r"\$\.axes\[1\]: .*got 3"),
        ({"axes": [[7]]}, r"\$\.axes\[0\]\[0\]: .*string, got 7"),
    ],
)
def test_a_damaged_file_is_refused_by_path(data, message):
    with pytest.raises(DecodeError, match=message):
        decode(Layout, data)
