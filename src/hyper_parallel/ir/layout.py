"""Layout: how one tensor lies on a mesh and in which memory.

A layout is indexed by tensor dim, like a partition spec: for every dim the ordered tuple of mesh axes that split it,
first axis outermost (it makes the large cuts). Axes that hold partial sums are listed apart; every other axis
replicates. Printed form: `W[mlp:tp_x, embed:tp_y.dp_shard] @ hbm`.

Uneven sizes follow torch's chunk rule, applied axis by axis: each axis cuts what the axes before it left into slices
of ceil(size / degree); the last slices may be shorter or empty. Order is part of the value: (tp_x, dp_shard) and
(dp_shard, tp_x) put different rows on a rank, which a list of DTensor placements cannot say without a strided shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.errors import LayoutError
from hyper_parallel.ir.mesh import Mesh

MemoryKind = Literal["hbm", "dram", "pool", "flash"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of one tensor.

    Attributes:
        axes: Per tensor dim the mesh axes that split it, outermost first; () keeps the dim whole.
        partial: Axes over which each rank holds one summand; the tensor is their sum.
        memory: Memory kind the local part lives in.
        dims: Logical names of the dims, for people; () when unknown.
    """

    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    memory: MemoryKind = "hbm"
    dims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [a for dim in self.axes for a in dim] + list(self.partial)
        if len(set(used)) != len(used):
            twice = sorted({a for a in used if used.count(a) > 1})
            raise LayoutError("a layout uses an axis twice", got=twice)
        if self.dims and len(self.dims) != len(self.axes):
            raise LayoutError(
                "a layout names another number of dims than it has",
                got=f"{len(self.dims)} names, {len(self.axes)} dims",
            )

    @classmethod
    def replicated(cls, num_dims: int, dims: tuple[str, ...] = ()) -> Layout:
        """The layout that keeps every dim whole on every rank."""
        return cls(((),) * num_dims, dims=dims)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Axes that split some dim, in dim order."""
        return tuple(a for dim in self.axes for a in dim)

    def check(self, mesh: Mesh) -> None:
        """Raise when the layout uses an axis that the mesh does not have."""
        missing = [a for a in (*self.sharding_axes, *self.partial) if a not in mesh.names]
        if missing:
            raise LayoutError(
                "a layout uses an axis that the mesh does not have", got=missing, allowed=mesh.names
            )

    def split(self, dim: int, *axes: str) -> Layout:
        """The same layout with `axes` appended innermost to a dim."""
        if not 0 <= dim < len(self.axes):
            raise LayoutError(
                "a layout has no such dim", got=dim, allowed=f"0..{len(self.axes) - 1}"
            )
        new = tuple((*d, *axes) if i == dim else d for i, d in enumerate(self.axes))
        return Layout(new, self.partial, self.memory, self.dims)

    def bounds(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """Half-open index range per dim of the part a rank holds.

        Args:
            shape: Logical shape of the tensor.
            mesh: Mesh that gives the degrees.
            coordinate: Coordinate of the rank, as `Mesh.coordinate` returns it.
        """
        ranges = []
        for size, axes in zip(shape, self.axes, strict=True):
            start, stop = 0, size
            for axis in axes:
                chunk = -(-(stop - start) // mesh.degree(axis))
                begin = min(start + coordinate.get(axis, 0) * chunk, stop)
                start, stop = begin, min(begin + chunk, stop)
            ranges.append((start, stop))
        return tuple(ranges)

    def local_shape(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Shape of the part a rank holds."""
        return tuple(stop - start for start, stop in self.bounds(shape, mesh, coordinate))

    def max_local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of the largest part, the one at coordinate 0 of every axis."""
        return self.local_shape(shape, mesh, {})

    def __str__(self) -> str:
        names = self.dims or tuple(f"d{i}" for i in range(len(self.axes)))
        parts = [f"{n}:{'.'.join(a)}" if a else n for n, a in zip(names, self.axes, strict=True)]
        partial = f" partial({', '.join(self.partial)})" if self.partial else ""
        return f"[{', '.join(parts)}]{partial} @ {self.memory}"
