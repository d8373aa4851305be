"""Mesh, layout of one tensor over it, purposes of collectives, and redistribution from one layout to another.

A mesh is an n-dimensional arrangement of device ids, axes written outer to inner. Neighbours on the innermost axis have
neighbouring ids, so inner axes lie on faster links.

    Mesh((("dp_shard", 2), ("tp_x", 4)))      ranks 0..3 are one tensor-parallel group, 4..7 the other

A layout is indexed by tensor dim, like a partition spec: for every dim the ordered tuple of mesh axes that shard it,
outermost first. Axes with partial sums are listed separately, as are axes along which only one rank has the tensor.
All other axes replicate. Printed form: `[mlp:tp_x, embed:tp_y.dp_shard] @ hbm`.

Uneven sizes follow torch's chunk rule, axis by axis: each axis cuts the slices of the previous axis into slices of
ceil(size / degree); the last slices may be shorter or empty. Order is part of the value: (tp_x, dp_shard) and
(dp_shard, tp_x) assign different rows to a rank.

`placements` returns the DTensor form, one entry per mesh axis. That form has no order of its own: of two axes that
shard one dim, the first axis of the mesh is the outer one. Another order requires a strided shard. With FSDP inside
tensor parallelism, the mesh is (dp_shard, tp_x), dim 0 is sharded by (tp_x, dp_shard), and the entry of dp_shard is
StridedShard(dim=0, split_factor=tp).

`redistribute` finds the cheapest sequence of collectives between two layouts. Every intermediate state is a layout, so
a step can remove only the innermost axis of a dim, and an added axis becomes the innermost:

    slice           replicating axis      -> innermost of a dim        free
    all_gather      innermost of a dim    -> replicating axis          (g-1) * part before
    reduce_scatter  partial sums          -> innermost of a dim        (g-1) * part after
    all_reduce      partial sums          -> replicating axis          2 (g-1) * ceil(part / g)
    all_to_all      innermost of a dim    -> innermost of another dim  (g-1) * block

The last column is the cost: bytes that one rank sends in ring algorithms over g ranks, including the padding of uneven
parts. A part is the largest local shard, before or after the step. The block of an all_to_all is the largest piece that
one rank sends to another. Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 3. The search is Dijkstra's over layouts, exact for these steps on the axes that the two layouts
use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Final, Literal, TypeAlias

from hyper_parallel.errors import LayoutError, MeshError

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")
"""Axis names, outer to inner. Experts use `ep`, folded over dp_shard x cp x tp."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Arrangement of device ids along named axes, outer to inner.

    Attributes:
        axes: Pairs of axis name and degree, outer to inner.
        devices: Device ids in row-major order of the axes; empty means 0, 1, 2, ...

    Raises:
        MeshError: HP201 for a repeated axis or device, a degree below 1, or a wrong number of devices.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError("a mesh names an axis twice", got=names, hint="give every axis its own name")
        for name, degree in self.axes:
            if degree < 1:
                raise MeshError(f"the degree of axis `{name}` is {degree}, below 1", got=degree)
        if self.devices and len(self.devices) != self.size:
            raise MeshError(
                f"the degrees multiply to {self.size}, but the mesh has {len(self.devices)} devices",
                got=f"{self.axes}, {len(self.devices)} devices",
                hint="change a degree, or pass as many devices as the degrees multiply to",
            )
        if len(set(self.devices)) != len(self.devices):
            raise MeshError("a mesh holds a device twice", got=self.devices, hint="list every device id once")

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outer to inner."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees, outer to inner."""
        return tuple(degree for _, degree in self.axes)

    @property
    def size(self) -> int:
        """Number of positions, the product of the degrees."""
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: str | Iterable[str]) -> int:
        """Return the degree of an axis, or the product over several axes; an axis that the mesh lacks counts as 1."""
        degrees = dict(self.axes)
        if isinstance(axis, str):
            return degrees.get(axis, 1)
        return math.prod(degrees.get(a, 1) for a in axis)

    def device(self, position: int) -> int:
        """Return the device id at a row-major position of the mesh."""
        return self.devices[position] if self.devices else position

    def position(self, device: int) -> int:
        """Return the row-major position of a device id; raise MeshError (HP201) if the mesh lacks the device."""
        devices = self.devices or range(self.size)
        if device not in devices:
            allowed = self.devices or f"0..{self.size - 1}"
            raise MeshError(f"device id {device} is not in the mesh", got=device, allowed=allowed)
        return devices.index(device)

    def coordinate(self, device: int) -> dict[str, int]:
        """Return a dict from axis name to the coordinate of a device; errors as for `position`."""
        rest = self.position(device)
        coordinate = {}
        for name, degree in reversed(self.axes):
            rest, coordinate[name] = divmod(rest, degree)
        return {name: coordinate[name] for name in self.names}

    def at(self, coordinate: Mapping[str, int]) -> int:
        """Return the device id at a coordinate; omitted axes have coordinate 0, axes that the mesh lacks are ignored.

        Raises:
            MeshError: HP201 when a coordinate is out of range for its axis.
        """
        position = 0
        for name, degree in self.axes:
            index = coordinate.get(name, 0)
            if not 0 <= index < degree:
                raise MeshError(
                    f"coordinate {index} is out of range for axis `{name}` of degree {degree}",
                    got=index,
                    allowed=f"0..{degree - 1}",
                )
            position = position * degree + index
        return self.device(position)

    def group(self, device: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """Return the device ids in the group of `device` over `axes`, first axis slowest; errors as for `position`."""
        group = [self.coordinate(device)]
        for axis in (axes,) if isinstance(axes, str) else axes:
            group = [{**c, axis: i} for c in group for i in range(self.degree(axis))]
        return tuple(self.at(c) for c in group)

    def groups(self, axes: str | Sequence[str], most: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Return the first `most` groups over `axes` (None: all), in the order of their first devices."""
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for device in self.devices or range(self.size):
            if len(groups) == most:
                break
            if device not in seen:
                groups.append(self.group(device, axes))
                seen.update(groups[-1])
        return tuple(groups)

    def __str__(self) -> str:
        shown = " x ".join(f"{name}={degree}" for name, degree in self.axes if degree > 1)
        return f"Mesh({shown or '1 device'})"


MemoryKind = Literal["hbm", "dram", "pool", "flash"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of one tensor: the mesh axes that shard each dim, and the memory kind of the shards.

    Attributes:
        axes: Per tensor dim, the mesh axes that shard it, outermost first; () if the dim is not sharded.
        partial: Axes whose ranks each have one summand of the tensor.
        memory: Memory kind that holds the local shard.
        dims: Displayed names of the dims; () if unknown.
        parts: Per dim, the number of equal parts stacked in it; the axes shard each part separately. (): one part per
            dim. With gate and up in one weight, `gate_up/2:tp_x` gives a rank its slice of each of the two parts.
        one_of: Axes along which only one rank has the tensor and the other ranks have nothing. Example: an expert that
            is a module of its own, `[mlp, embed] @ hbm, one of ep`.

    Raises:
        LayoutError: HP202 for an axis used twice, a number of names or parts other than that of dims, or parts below 1.
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
            raise LayoutError("a layout uses an axis twice", got=twice, hint="use every axis in one dim only")
        if self.dims and len(self.dims) != len(self.axes):
            raise LayoutError(
                f"the layout has {len(self.dims)} names for {len(self.axes)} dims",
                got=self.dims,
                hint="give one name per dim",
            )
        if self.parts and (len(self.parts) != len(self.axes) or min(self.parts) < 1):
            raise LayoutError(
                "`parts` of a layout must have one number per dim, each at least 1",
                got=self.parts,
                allowed=f"{len(self.axes)} numbers of at least 1",
            )

    @classmethod
    def replicated(cls, num_dims: int, dims: tuple[str, ...] = ()) -> Layout:
        """Return the layout that replicates the tensor on every rank."""
        return cls(((),) * num_dims, dims=dims)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Axes whose ranks have different elements: those that shard a dim, in dim order, then `one_of`."""
        return (*(a for dim in self.axes for a in dim), *self.one_of)

    def parts_of(self, dim: int) -> int:
        """Return the number of equal parts stacked in a dim; 1 for a dim that no axis shards."""
        return self.parts[dim] if self.parts and self.axes[dim] else 1

    def stack(self, dim: int, parts: int) -> Layout:
        """Return the layout with `parts` equal parts stacked in a dim; raise LayoutError (HP202) for less than 1."""
        old = self.parts or (1,) * len(self.axes)
        return replace(self, parts=tuple(parts if i == dim else n for i, n in enumerate(old)))

    def check(self, mesh: Mesh) -> None:
        """Raise LayoutError (HP202) if the layout uses an axis that the mesh does not have."""
        missing = [a for a in (*self.sharding_axes, *self.partial) if a not in mesh.names]
        if missing:
            raise LayoutError("a layout uses an axis that the mesh does not have", got=missing, allowed=mesh.names)

    def split(self, dim: int, *axes: str) -> Layout:
        """Add innermost axes to a dim of the layout; raise LayoutError (HP202) for an axis in use or a wrong dim."""
        if not 0 <= dim < len(self.axes):
            raise LayoutError(
                f"dim {dim} is out of range for a layout of {len(self.axes)} dims",
                got=dim,
                allowed=f"0..{len(self.axes) - 1}",
            )
        new = tuple((*d, *axes) if i == dim else d for i, d in enumerate(self.axes))
        return replace(self, axes=new)

    def ranges(
        self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, per dim, the half-open index ranges of a rank's shard: one range for each stacked part.

        Args:
            shape: Logical shape of the tensor.
            mesh: Mesh with the degrees.
            coordinate: Coordinate of the rank, as returned by `Mesh.coordinate`; omitted axes have coordinate 0.

        Raises:
            LayoutError: HP202 when a dim does not divide into its parts.
        """
        result = []
        for dim, (size, axes) in enumerate(zip(shape, self.axes, strict=True)):
            parts = self.parts_of(dim)
            if size % parts:
                sizes = f"{size} / {parts}"
                raise LayoutError(
                    f"dim {dim} of size {size} does not divide into {parts} equal parts",
                    got=sizes,
                    hint=f"use a multiple of {parts} as the size of dim {dim}",
                )
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

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard of the rank at `coordinate`; arguments and errors as for `ranges`."""
        result = self.ranges(shape, mesh, coordinate)
        return tuple(sum(stop - start for start, stop in runs) for runs in result)

    def max_local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the largest shard, which is at coordinate 0 of every axis; errors as for `ranges`."""
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
    """Placement on an axis whose ranks all have the same elements."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Placement on an axis whose ranks each have one summand of the tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement on an axis that shards a tensor dim into consecutive slices."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Placement on an axis that shards each of `split_factor` equal pieces of a dim; a rank has a slice per piece."""

    dim: int
    split_factor: int


Placement: TypeAlias = Replicate | Partial | Shard | StridedShard


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """Return the layout as one placement per mesh axis, outer to inner.

    The split factor of an axis is a product: the degrees of all axes that are inner in the mesh but outer in the dim,
    and the number of stacked parts of the dim. Both forms assign the same elements when every slice has equal size.
    Axes of `Layout.one_of` become `Replicate`.
    """
    holder = {a: i for i, dim in enumerate(layout.axes) for a in dim}
    entries: list[Placement] = []
    for position, axis in enumerate(mesh.names):
        if axis in layout.partial:
            entries.append(Partial())
        elif axis not in holder:
            entries.append(Replicate())
        else:
            dim = holder[axis]
            cut_before = layout.axes[dim][: layout.axes[dim].index(axis)]
            factor = mesh.degree(a for a in cut_before if a in mesh.names[position + 1 :])
            factor *= layout.parts_of(dim)
            entries.append(StridedShard(dim, factor) if factor > 1 else Shard(dim))
    return tuple(entries)


class Purpose(StrEnum):
    """Purpose of a collective, as named in run-time counters, traces and plans.

    For example, a gather of tokens in forward becomes a scatter of their gradients in backward, see `backward`.
    """

    # FSDP, and its replicas
    FSDP_PARAMETERS = "fsdp parameters"
    FSDP_GRADIENTS = "fsdp gradients"
    EXPERT_PARAMETERS = "expert parameters"
    EXPERT_GRADIENTS = "expert gradients"
    REPLICA_GRADIENTS = "replica gradients"
    UNIT_ORDER = "order of FSDP units"

    # Tensor parallelism: boundaries of blocks
    SEQUENCE_GATHER = "sequence gather"
    SEQUENCE_SCATTER = "sequence scatter"
    RELAYOUT = "relayout"
    EMBEDDING = "embedding"
    LOSS = "loss"
    LOSS_STATISTICS = "loss statistics"
    NORM_STATISTICS = "norm statistics"
    WHOLE_PARAMETERS = "gradients of whole parameters"
    ACTIVATIONS = "activations"
    LOGITS = "logits"

    # Tensor parallelism: inside blocks
    HEAD_GATHER = "head gather"
    HEAD_SCATTER = "head scatter"
    WIDTH_GATHER = "width gather"
    WIDTH_SCATTER = "width scatter"
    WEIGHT_GATHER = "weight gather"
    WEIGHT_SCATTER = "weight gradient scatter"
    KEY_VALUE_GATHER = "key and value gather"
    KEY_VALUE_SCATTER = "key and value gradient scatter"
    PACKED_COLUMNS = "packed columns"
    NORMS_OVER_HEADS = "norms over heads"

    # Context parallelism
    KEYS_AND_VALUES = "attention: keys and values"
    KEY_VALUE_GRADIENTS = "attention: key and value gradients"
    HEADS_FOR_TOKENS = "attention: heads for tokens"
    TOKENS_FOR_HEADS = "attention: tokens for heads"

    # Experts
    EXPERT_ROW_COUNTS = "expert row counts"
    EXPERT_ROWS = "expert dispatch and combine"
    EXPERT_LOAD = "expert load"
    BALANCE_LOSS = "balance loss"
    HALF_BATCHES = "agreement on half-batches"

    # Pipeline stages
    PIPELINE_ACTIVATIONS = "pipeline activations"
    PIPELINE_GRADIENTS = "pipeline gradients"
    SHARED_WEIGHT = "shared weight"

    SUBMODELS_SUM = "sum over sub-models"

    # Once a step
    GRADIENT_NORM = "gradient norm"
    STEP_LOG = "loss and memory of all ranks"
    """Collectives for the log of the trainer, which plans do not count."""

    @property
    def backward(self) -> Purpose:
        """Purpose of the transposed collective in backward; the purpose itself if it has no separate name."""
        return _BACKWARD.get(self, self)

    @property
    def parallelism(self) -> str:
        """Kind of parallelism that needs the collective: dp, tp, cp, ep, pp, submodels or step (once per step)."""
        return next((kind for start, kind in _PARALLELISMS if self.name.startswith(start)), "tp")


_PARALLELISMS = (
    *((start, "ep") for start in ("EXPERT_ROW", "EXPERT_LOAD", "BALANCE_", "HALF_")),
    *((start, "step") for start in ("GRADIENT_NORM", "STEP_")),
    *((start, "dp") for start in ("FSDP_", "EXPERT_", "REPLICA_", "UNIT_")),
    *((start, "cp") for start in ("KEYS_", "KEY_VALUE_GRADIENTS", "HEADS_FOR", "TOKENS_FOR")),
    ("SUBMODELS_", "submodels"),
    *((start, "pp") for start in ("PIPELINE_", "SHARED_")),
)
"""(prefix of a purpose's name, kind of parallelism); the first match counts. All other names belong to tp."""
_PAIRS = (
    (Purpose.SEQUENCE_GATHER, Purpose.SEQUENCE_SCATTER),
    (Purpose.HEAD_GATHER, Purpose.HEAD_SCATTER),
    (Purpose.WIDTH_GATHER, Purpose.WIDTH_SCATTER),
    (Purpose.WEIGHT_GATHER, Purpose.WEIGHT_SCATTER),
    (Purpose.KEY_VALUE_GATHER, Purpose.KEY_VALUE_SCATTER),
    (Purpose.HEADS_FOR_TOKENS, Purpose.TOKENS_FOR_HEADS),
    (Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS),
)
_BACKWARD = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}


StepKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Step of a redistribution: a collective or a local slice, with the resulting layout.

    Attributes:
        kind: Kind of collective, or `slice`.
        axis: Mesh axis of the group.
        dim: Tensor dim that is gathered, scattered or sliced; for all_to_all, the dim that the axis no longer shards.
            None for all_reduce.
        to_dim: Tensor dim that the axis shards after an all_to_all; None for other kinds.
        sent_bytes: Bytes sent by a rank with a shard of the largest size.
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
    """Return the sequence of collectives from one layout to another in which a rank sends the fewest bytes.

    Among sequences with equal bytes, the shortest is returned; () for equal layouts.

    Args:
        src: Layout of the tensor before the steps.
        dst: Layout after the steps; its `dims` are ignored. Axes of degree 1 are ignored in both layouts.
        mesh: Mesh with the degrees.
        shape: Logical shape of the tensor.
        dtype_bytes: Width of one element.

    Raises:
        LayoutError: HP202 when a layout does not fit the shape or the mesh, or has stacked parts or `one_of` axes; also
            when the memory kinds differ, or only `dst` has partial sums over an axis.
    """
    for layout in (src, dst):
        _check(layout, mesh, shape)
    start = _without_trivial(src, mesh)
    goal = _without_trivial(replace(src, axes=dst.axes, partial=dst.partial), mesh)
    if src.memory != dst.memory:
        moved = f"{src.memory} to {dst.memory}"
        raise LayoutError(
            "redistribution cannot move a tensor between memory kinds",
            got=moved,
            hint="use the same memory kind in both layouts",
        )
    if new := [a for a in goal.partial if a not in start.partial]:
        raise LayoutError(
            "redistribution cannot turn a complete tensor into partial sums",
            got=f"partial({', '.join(new)})",
            allowed=f"partial({', '.join(start.partial)}) or less" if start.partial else "no partial sums",
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
            f"the layout has {len(layout.axes)} dims, but the tensor has {len(shape)}",
            got=f"{layout}, shape {tuple(shape)}",
            hint="use a layout with one entry per dim of the tensor",
        )
    if any(layout.parts_of(dim) > 1 for dim in range(len(shape))):
        raise LayoutError("redistribution does not support dims with stacked parts", got=layout)
    if layout.one_of:
        raise LayoutError(
            "redistribution does not support tensors that only one rank of an axis has (`one_of`)",
            got=layout,
            hint="use layouts without `one_of`",
        )


def _without_trivial(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout without axes of degree 1 and with sorted partial axes."""
    axes = tuple(tuple(a for a in dim if mesh.degree(a) > 1) for dim in layout.axes)
    partial = tuple(sorted(a for a in layout.partial if mesh.degree(a) > 1))
    return replace(layout, axes=axes, partial=partial)


def _steps(
    layout: Layout, axes: Sequence[str], mesh: Mesh, shape: Sequence[int], dtype_bytes: int
) -> Iterator[CollectiveStep]:
    """Yield every collective or local slice over one of `axes` that can be applied to a layout."""
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
