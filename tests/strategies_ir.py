"""hypothesis strategies for meshes, shapes and layouts."""

import math

from hypothesis import strategies as st

from hyper_parallel.ir import Layout, Mesh


@st.composite
def meshes(draw, max_axes=3, max_size=16, with_devices=False):
    degrees = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=max_axes).filter(lambda d: math.prod(d) <= max_size)
    )
    size = math.prod(degrees)
    devices = ()
    if with_devices and draw(st.booleans()):
        devices = tuple(draw(st.permutations(range(100, 100 + size))))
    return Mesh(tuple(zip("abc", degrees, strict=False)), devices)


def shapes(max_dims=3, max_size=9):
    return st.lists(st.integers(0, max_size), min_size=1, max_size=max_dims).map(tuple)


@st.composite
def layouts(draw, mesh, num_dims, partial_from=None):
    """A random layout; `partial_from` limits the partial axes (None: any)."""
    dims = [[] for _ in range(num_dims)]
    partial = []
    for axis in draw(st.permutations(mesh.names)):
        allowed = partial_from is None or axis in partial_from
        where = draw(st.integers(-2 if allowed else -1, num_dims - 1))
        if where >= 0:
            dims[where].append(axis)
        elif where == -2:
            partial.append(axis)
    return Layout(tuple(tuple(d) for d in dims), tuple(partial))
