"""Placements: a layout seen from the mesh, one entry per mesh axis, as DTensor describes it.

A placement list has no order of its own for two axes that split one dim: the axis that comes first in the mesh makes
the large cuts. A layout that wants another order needs a strided shard. FSDP inside tensor parallelism is the common
case: the mesh is (dp_shard, tp_x), dim 0 is split by (tp_x, dp_shard), and the entry of dp_shard becomes
StridedShard(dim=0, split_factor=tp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hyper_parallel.errors import LayoutError
from hyper_parallel.ir.layout import Layout
from hyper_parallel.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same part."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the axis holds one summand."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts a tensor dim into consecutive slices."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts each of `split_factor` equal pieces of a dim; a rank holds its slice of every piece."""

    dim: int
    split_factor: int


Placement: TypeAlias = Replicate | Partial | Shard | StridedShard


def placements(
    layout: Layout, mesh: Mesh, axes: Sequence[str] | None = None
) -> tuple[Placement, ...]:
    """The layout as one placement per mesh axis.

    The split factor of an axis is the product of the degrees of the axes that follow it in the mesh but cut the dim
    before it, times the parts the dim stacks. The two descriptions hold the same elements when every cut of the dim is
    even.

    Args:
        layout: Layout to describe.
        mesh: Mesh that gives the degrees.
        axes: Axes of the list, outer to inner; None: all axes of the mesh. An axis that the layout uses may be left
            out only when its degree is 1.

    Raises:
        LayoutError: HP202 when the layout uses an axis that is left out.
    """
    names = mesh.names if axes is None else tuple(axes)
    lost = [
        a for a in (*layout.sharding_axes, *layout.partial) if a not in names and mesh.degree(a) > 1
    ]
    if lost:
        raise LayoutError(
            "a layout uses an axis that its placements leave out", got=lost, allowed=names
        )
    holder = {a: i for i, dim in enumerate(layout.axes) for a in dim}
    entries: list[Placement] = []
    for position, axis in enumerate(names):
        if axis in layout.partial:
            entries.append(Partial())
        elif axis not in holder:
            entries.append(Replicate())
        else:
            dim = holder[axis]
            cut_before = layout.axes[dim][: layout.axes[dim].index(axis)]
            factor = mesh.degree(a for a in cut_before if a in names[position + 1 :])
            factor *= layout.parts_of(dim)
            entries.append(StridedShard(dim, factor) if factor > 1 else Shard(dim))
    return tuple(entries)
