"""Layout: sharding of one tensor over a mesh, and its memory kind.

A layout is indexed by tensor dim, like a partition spec: for every dim the ordered tuple of mesh axes that shard it,
outermost first. Axes with partial sums are listed separately; all other axes replicate. Printed form:
`W[mlp:tp_x, embed:tp_y.dp_shard] @ hbm`.

Uneven sizes follow torch's chunk rule, axis by axis: each axis cuts the slices of the previous axis into slices of
ceil(size / degree); the last slices may be shorter or empty. Order is part of the value: (tp_x, dp_shard) and
(dp_shard, tp_x) assign different rows to a rank.

`placements` returns the DTensor form, one entry per mesh axis. That form has no order of its own: of two axes that
shard one dim, the first axis of the mesh is the outer one. Another order requires a strided shard. With FSDP inside
tensor parallelism, the mesh is (dp_shard, tp_x), dim 0 is sharded by (tp_x, dp_shard), and the entry of dp_shard is
StridedShard(dim=0, split_factor=tp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

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
        parts: Per dim the equal parts it stacks, each cut apart by the axes of the dim; () is one part each. With gate
            and up in one weight, `gate_up/2:tp_x` gives a rank its slice of each half.
        one_of: Axes of which one coordinate holds the tensor, as an expert that is a module of its own (`[mlp, embed]
            @ hbm, one of ep`); ranks at the others hold nothing of it.
    """

    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    memory: MemoryKind = "hbm"
    dims: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    one_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [a for dim in self.axes for a in dim] + [*self.partial, *self.one_of]
        if len(set(used)) != len(used):
            twice = sorted({a for a in used if used.count(a) > 1})
            raise LayoutError("a layout uses an axis twice", got=twice)
        if self.dims and len(self.dims) != len(self.axes):
            raise LayoutError(
                "a layout names another number of dims than it has",
                got=f"{len(self.dims)} names, {len(self.axes)} dims",
            )
        if self.parts and (len(self.parts) != len(self.axes) or min(self.parts) < 1):
            raise LayoutError(
                "the parts of a layout are not one number per dim",
                got=self.parts,
                allowed=f"{len(self.axes)} numbers of at least 1",
            )

    @classmethod
    def replicated(cls, num_dims: int, dims: tuple[str, ...] = ()) -> Layout:
        """Return the layout that replicates the tensor on every rank."""
        return cls(((),) * num_dims, dims=dims)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different elements: those that split some dim, in dim order, then `one_of`."""
        return (*(a for dim in self.axes for a in dim), *self.one_of)

    def parts_of(self, dim: int) -> int:
        """Return the number of equal parts that a dim stacks; 1 for a dim that no axis shards."""
        return self.parts[dim] if self.parts and self.axes[dim] else 1

    def stack(self, dim: int, parts: int) -> Layout:
        """Return the layout with `parts` equal parts stacked in a dim."""
        old = self.parts or (1,) * len(self.axes)
        return replace(self, parts=tuple(parts if i == dim else n for i, n in enumerate(old)))

    def check(self, mesh: Mesh) -> None:
        """Raise when the layout uses an axis that the mesh does not have."""
        missing = [a for a in (*self.sharding_axes, *self.partial) if a not in mesh.names]
        if missing:
            raise LayoutError(
                "a layout uses an axis that the mesh does not have", got=missing, allowed=mesh.names
            )

    def split(self, dim: int, *axes: str) -> Layout:
        """Return the layout with `axes` appended innermost to a dim."""
        if not 0 <= dim < len(self.axes):
            raise LayoutError(
                f"dim {dim} is out of range for a layout of {len(self.axes)} dims",
                got=dim,
                allowed=f"0..{len(self.axes) - 1}",
            )
        new = tuple((*d, *axes) if i == dim else d for i, d in enumerate(self.axes))
        return replace(self, axes=new)

    def bounds(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the half-open index range per dim of a rank's shard, if each dim has one range.

        Args:
            shape: Logical shape of the tensor.
            mesh: Mesh with the degrees.
            coordinate: Coordinate of the rank, as returned by `Mesh.coordinate`.

        Raises:
            LayoutError: HP202 for a dim with several stacked parts; use `ranges`, which returns one range per part.
        """
        result = self.ranges(shape, mesh, coordinate)
        for dim, runs in enumerate(result):
            if len(runs) > 1:
                raise LayoutError(
                    "a rank holds several ranges of a dim", got=f"dim {dim} of {self}"
                )
        return tuple(runs[0] for runs in result)

    def ranges(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the half-open index ranges per dim of a rank's shard, one per stacked part.

        Raises:
            LayoutError: HP202 when a dim does not divide into its parts.
        """
        result = []
        for dim, (size, axes) in enumerate(zip(shape, self.axes, strict=True)):
            parts = self.parts_of(dim)
            if size % parts:
                sizes = f"{size} / {parts}"
                raise LayoutError(f"dim {dim} does not divide into its parts", got=sizes)
            runs = []
            for part in range(parts):
                start, stop = part * (size // parts), (part + 1) * (size // parts)
                for axis in axes:
                    chunk = -(-(stop - start) // mesh.degree(axis))
                    start = min(start + coordinate.get(axis, 0) * chunk, stop)
                    stop = min(start + chunk, stop)
                runs.append((start, stop))
            result.append(tuple(runs))
        return tuple(result)

    def local_shape(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Shape of the part a rank holds."""
        result = self.ranges(shape, mesh, coordinate)
        return tuple(sum(stop - start for start, stop in runs) for runs in result)

    def max_local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of the largest part, the one at coordinate 0 of every axis."""
        return self.local_shape(shape, mesh, {})

    def __str__(self) -> str:
        shown = []
        for dim, axes in enumerate(self.axes):
            name = self.dims[dim] if self.dims else f"d{dim}"
            parts = f"/{self.parts_of(dim)}" if self.parts_of(dim) > 1 else ""
            shown.append(f"{name}{parts}:{'.'.join(axes)}" if axes else name)
        partial = f" partial({', '.join(self.partial)})" if self.partial else ""
        one_of = f", one of {'.'.join(self.one_of)}" if self.one_of else ""
        return f"[{', '.join(shown)}]{partial} @ {self.memory}{one_of}"


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
    """Return the layout as one placement per mesh axis.

    The split factor of an axis is the product of the degrees of axes that are inner in the mesh but outer in the dim,
    times the number of stacked parts of the dim. Both forms assign the same elements when every slice has equal size.

    Args:
        layout: Layout to convert.
        mesh: Mesh with the degrees.
        axes: Axes of the list, outer to inner; None: all axes of the mesh. An axis of the layout may be omitted only if
            its degree is 1.

    Raises:
        LayoutError: HP202 when an omitted axis is used by the layout.
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
