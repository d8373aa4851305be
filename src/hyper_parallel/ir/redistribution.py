"""Redistribution: the cheapest sequence of collectives that turns one layout into another.

Every step keeps the tensor described by a layout, so the innermost axis of a dim is the only one that can be taken
away, and an axis is always put back innermost:

    slice           axis held by none     -> innermost of a dim        free
    all_gather      innermost of a dim    -> axis held by none         (g-1) * part before
    reduce_scatter  partial sums          -> innermost of a dim        (g-1) * part after
    all_reduce      partial sums          -> axis held by none         2 (g-1) * ceil(part / g)
    all_to_all      innermost of a dim    -> innermost of another dim  (g-1) * block

Costs are the bytes one rank sends in ring algorithms over g ranks, the padding of uneven parts included; a block of
an all_to_all is the largest piece that one rank keeps for another. Source: Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", section 3. The search is Dijkstra's over layouts, exact
for these steps on the axes that the two layouts use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from hyper_parallel.errors import LayoutError
from hyper_parallel.ir.layout import Layout
from hyper_parallel.ir.mesh import Mesh

StepKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Step of a redistribution.

    Attributes:
        kind: Collective or local operation.
        axis: Mesh axis of the group.
        dim: Tensor dim that is gathered, scattered or sliced; the one an all_to_all takes the axis from. None for
            all_reduce.
        to_dim: Tensor dim an all_to_all puts the axis on; None for the others.
        sent_bytes: Bytes a rank with a part of the largest size sends.
        layout: Layout after the step.
    """

    kind: StepKind
    axis: str
    dim: int | None
    to_dim: int | None
    sent_bytes: int
    layout: Layout

    def __str__(self) -> str:
        dims = "" if self.dim is None else f", dim {self.dim}"
        dims += "" if self.to_dim is None else f" -> {self.to_dim}"
        return f"{self.kind}({self.axis}{dims}) {self.sent_bytes} B"


def redistribute(
    src: Layout, dst: Layout, mesh: Mesh, shape: Sequence[int], dtype_bytes: int
) -> tuple[CollectiveStep, ...]:
    """Return the cheapest steps from one layout to another; among equally cheap ones, the fewest.

    Args:
        src: Present layout.
        dst: Requested layout. Axes of degree 1 are ignored.
        mesh: Mesh with the degrees.
        shape: Logical shape of the tensor.
        dtype_bytes: Width of one element.

    Raises:
        LayoutError: HP202 when a layout does not fit the shape or the mesh, the memory kinds differ, or `dst` holds
            partial sums over an axis where `src` holds none.
    """
    for layout in (src, dst):
        _check(layout, mesh, shape)
    start = _without_trivial(src, mesh)
    goal = _without_trivial(replace(src, axes=dst.axes, partial=dst.partial), mesh)
    if src.memory != dst.memory:
        moved = f"{src.memory} to {dst.memory}"
        raise LayoutError("redistribution does not move a tensor between memories", got=moved)
    if new := [a for a in goal.partial if a not in start.partial]:
        raise LayoutError(
            "redistribution does not split a whole tensor into partial sums",
            got=f"partial({', '.join(new)})",
            allowed=f"partial({', '.join(start.partial)}) or less",
        )
    axes = sorted({*start.sharding_axes, *start.partial, *goal.sharding_axes, *goal.partial})
    # Equal costs leave the heap first in, first out: the result does not depend on hashing.
    order = count()
    heap: list[tuple[int, int, int, Layout, tuple[CollectiveStep, ...]]] = []
    heapq.heappush(heap, (0, 0, next(order), start, ()))
    done: set[Layout] = set()
    while True:
        sent, length, _, layout, path = heapq.heappop(heap)
        if layout == goal:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step in _steps(layout, axes, mesh, shape, dtype_bytes):
            cost = sent + step.sent_bytes
            heapq.heappush(heap, (cost, length + 1, next(order), step.layout, (*path, step)))


def _check(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> None:
    layout.check(mesh)
    if len(layout.axes) != len(shape):
        raise LayoutError(
            "a layout has another number of dims than the tensor",
            got=f"{len(layout.axes)} dims, shape {tuple(shape)}",
        )
    if any(layout.parts_of(dim) > 1 for dim in range(len(shape))):
        raise LayoutError("redistribution does not move parts that are cut apart", got=layout)
    if layout.one_of:
        raise LayoutError("redistribution does not move whole tensors of one rank", got=layout)


def _without_trivial(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout without axes of degree 1 and with sorted partial axes."""
    axes = tuple(tuple(a for a in dim if mesh.degree(a) > 1) for dim in layout.axes)
    partial = tuple(sorted(a for a in layout.partial if mesh.degree(a) > 1))
    return replace(layout, axes=axes, partial=partial)


def _steps(
    layout: Layout, axes: Sequence[str], mesh: Mesh, shape: Sequence[int], dtype_bytes: int
) -> Iterator[CollectiveStep]:
    """Every step that the layout allows."""
    part = layout.max_local_shape(shape, mesh)
    for axis in axes:
        peers = mesh.degree(axis) - 1
        holder = next((i for i, dim in enumerate(layout.axes) if axis in dim), None)
        if axis in layout.partial:
            summed = replace(layout, partial=tuple(a for a in layout.partial if a != axis))
            slot_bytes = -(-math.prod(part) // (peers + 1)) * dtype_bytes
            yield CollectiveStep("all_reduce", axis, None, None, 2 * peers * slot_bytes, summed)
            for dim in range(len(shape)):
                new = summed.split(dim, axis)
                sent = peers * math.prod(new.max_local_shape(shape, mesh)) * dtype_bytes
                yield CollectiveStep("reduce_scatter", axis, dim, None, sent, new)
        elif holder is None:
            for dim in range(len(shape)):
                yield CollectiveStep("slice", axis, dim, None, 0, layout.split(dim, axis))
        elif layout.axes[holder][-1] == axis:
            freed = tuple(d[:-1] if i == holder else d for i, d in enumerate(layout.axes))
            gathered = replace(layout, axes=freed)
            sent = peers * math.prod(part) * dtype_bytes
            yield CollectiveStep("all_gather", axis, holder, None, sent, gathered)
            for dim in range(len(shape)):
                if dim != holder:
                    block = [-(-s // (peers + 1)) if i == dim else s for i, s in enumerate(part)]
                    sent = peers * math.prod(block) * dtype_bytes
                    new = gathered.split(dim, axis)
                    yield CollectiveStep("all_to_all", axis, holder, dim, sent, new)
