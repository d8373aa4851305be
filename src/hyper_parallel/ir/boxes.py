"""Boxes: rectangular parts of tensors in memory, in files and in messages; and packed projections.

For every dim of a tensor, a rank stores runs: ranges of consecutive indices. The shard of the rank is the product of
the runs of all dims, which is a set of boxes. A file or a message contains boxes too. The elements to copy from a
sender to a receiver are the intersections of their boxes, whatever the two layouts are:

    have  [0:4, 0:6]  [4:8, 0:6]        two pieces in files
    want  [2:6, 0:3]                    box of a rank
    ->    [2:4, 0:3]  [4:6, 0:3]        transfers

A packed weight stacks projections, its parts: query, key and value (or gate and up) are rows of one matrix. Under
tensor parallelism, each rank uses the outputs of a slice of every part, at head boundaries. With fewer key and value
heads than ranks, several ranks use the same head. See `equal_parts` for weights whose ranks store the slices that they
use. Other weights are stored in equal slices of all rows. After the projection, an all-to-all then moves activations:
rank s sends to rank t the output columns that s computes and t uses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Ranges = tuple[tuple[int, int], ...]
"""Half-open index range of each dim."""
Runs = tuple[tuple[int, int], ...]
"""Half-open index ranges of one dim, in the order in which a rank stores them."""

_S = TypeVar("_S")
_R = TypeVar("_R")


class Box(NamedTuple):
    """Rectangular part of a tensor.

    Attributes:
        name: Name of the tensor.
        ranges: Half-open index range per dim of the full tensor.
    """

    name: str
    ranges: Ranges

    @classmethod
    def at(cls, name: str, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the box of shape `shape` that starts at index `offset` of the full tensor."""
        return cls(name, tuple((o, o + n) for o, n in zip(offset, shape, strict=True)))

    @classmethod
    def full(cls, name: str, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor."""
        return cls(name, tuple((0, n) for n in shape))

    @property
    def offset(self) -> tuple[int, ...]:
        """First index, per dim of the full tensor."""
        return tuple(start for start, _ in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices per dim."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Return whether the ranges include those of `other`, for any names; False for different numbers of dims."""
        return len(self.ranges) == len(other.ranges) and all(
            first <= start and stop <= last
            for (first, last), (start, stop) in zip(self.ranges, other.ranges, strict=True)
        )

    def within(self, outer: Box) -> Ranges:
        """Return the index ranges of this box relative to the first index of an enclosing box."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple((start - first, stop - first) for (start, stop), (first, _) in pairs)


@dataclass(frozen=True, slots=True)
class LocalBox:
    """Box of a rank's shard, and its position in the local tensor.

    Attributes:
        box: Box in the full tensor.
        index: Slice per dim of the local tensor that contains the box.
    """

    box: Box
    index: tuple[slice, ...]


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty or the boxes are of different tensors."""
    if a.name != b.name:
        return None
    pairs = zip(a.ranges, b.ranges, strict=True)
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in pairs)
    return Box(a.name, common) if all(start < stop for start, stop in common) else None


def merge(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the runs of one dim without empty runs; a run that starts at the end of the previous one is merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        if start < stop and merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def chunk(runs: Iterable[tuple[int, int]], count: int, number: int) -> Runs:
    """Divide the indices in `runs` into `count` chunks, as `torch.chunk` does, and return the runs of chunk `number`.

    The last chunks may be shorter or empty.
    """
    runs = [*runs]
    length = -(-sum(stop - start for start, stop in runs) // count)
    first, chunked = number * length, []
    for start, stop in runs:
        begin, end = max(start + first, start), min(start + first + length, stop)
        chunked.append((begin, max(begin, end)))
        first -= stop - start
    return merge(chunked)


Split = tuple[int, int, int]
"""Division of a dim by a mesh axis: (degree, number of separately divided blocks, index of the rank on the axis)."""


def runs_of_splits(size: int, splits: Sequence[Split]) -> Runs | None:
    """Return the runs of a dim that one rank stores, if mesh axes divide the dim in mesh order, as in DTensor.

    Args:
        size: Size of the dim.
        splits: Divisions by the mesh axes, outer to inner.

    Returns:
        The runs of the rank. None if the order of FSDP, which divides after tensor parallelism, would give any rank
        other indices than mesh order.
    """
    divided = tuple((degree, blocks) for degree, blocks, _ in splits)
    return _divide(size, splits) if _is_unambiguous(size, divided) else None


def _divide(size: int, splits: Iterable[Split]) -> Runs:
    runs: Runs = ((0, size),)
    for degree, blocks, rank in splits:
        parts = (chunk(chunk(runs, blocks, block), degree, rank) for block in range(blocks))
        runs = tuple(itertools.chain.from_iterable(parts))
    return merge(runs)


@functools.lru_cache(maxsize=256)  # many parameters have equal sizes
def _is_unambiguous(size: int, splits: tuple[tuple[int, int], ...]) -> bool:
    """Return whether each rank stores equal indices in mesh order and in FSDP's order; `splits` is (degree, blocks)."""
    degrees = [degree for degree, _ in splits]
    if all(blocks == 1 for _, blocks in splits) or size % math.prod(degrees) == 0:
        return True
    inner = [k for k, (_, blocks) in enumerate(splits) if blocks == 1]
    outer = [k for k, (_, blocks) in enumerate(splits) if blocks > 1]
    for ranks in itertools.product(*(range(degree) for degree in degrees)):
        stored: Runs = ((0, size),)
        for k in inner + outer[::-1]:
            stored = chunk(stored, degrees[k], ranks[k])
        if stored != _divide(size, [(d, b, r) for (d, b), r in zip(splits, ranks, strict=True)]):
            return False
    return True


def boxes(name: str, runs: Sequence[Runs]) -> list[LocalBox]:
    """Return the nonempty boxes of a rank's shard.

    Args:
        name: Name of the tensor.
        runs: Runs of each dim, as returned by `Layout.ranges`. The local tensor stores the runs of a dim consecutively.
    """
    dims = []
    for ranges in runs:
        stops = itertools.accumulate(stop - start for start, stop in ranges)
        local = [slice(end - (stop - start), end) for end, (start, stop) in zip(stops, ranges, strict=True)]
        dims.append([pair for pair in zip(ranges, local, strict=True) if pair[0][0] < pair[0][1]])
    return [
        LocalBox(Box(name, tuple(r for r, _ in part)), tuple(index for _, index in part))
        for part in itertools.product(*dims)
    ]


def transfers(have: Iterable[tuple[_S, Box]], want: Iterable[tuple[_R, Box]]) -> Iterator[tuple[_S, _R, Box]]:
    """Yield (sender, receiver, box) for every nonempty intersection of a box in `have` with a box in `want`.

    Args:
        have: Senders (files, ranks) and their boxes. Elements in several boxes are sent several times, so pass replicas
            with one sender only, see `choose_senders`.
        want: Receivers and their boxes.
    """
    wanted: dict[str, list[tuple[_R, Box]]] = {}
    for receiver, box in want:
        wanted.setdefault(box.name, []).append((receiver, box))
    for sender, box in have:
        for receiver, target in wanted.get(box.name, ()):
            if (common := overlap(box, target)) is not None:
                yield sender, receiver, common


def choose_senders(have: Sequence[Mapping[Box, int]]) -> dict[Box, int]:
    """Return a dict from each box to one rank that has it, such that the ranks send about equal bytes.

    Args:
        have: Per rank, a dict from box to its bytes; replicas have equal boxes.
    """
    candidates: dict[Box, list[int]] = {}
    for rank, sizes in enumerate(have):
        for box in sizes:
            candidates.setdefault(box, []).append(rank)
    sent, result = [0] * len(have), {}
    # Boxes of a single rank first, then replicated boxes by decreasing size.
    order = sorted(candidates, key=lambda b: (len(candidates[b]) > 1, -have[candidates[b][0]][b], b))
    for box in order:
        rank = min(candidates[box], key=lambda r: sent[r])
        result[box] = rank
        sent[rank] += have[rank][box]
    return result


def divided_dims(outer: Box, parts: Iterable[Box]) -> list[int]:
    """Return the dims, ascending, in which the range of at least one box in `parts` differs from that of `outer`."""
    different = {d for part in parts for d, r in enumerate(part.ranges) if r != outer.ranges[d]}
    return sorted(different)


def tile(outer: Box, parts: Sequence[Box]) -> bool:
    """Return whether the boxes `parts` tile `outer`: every element of `outer` is in exactly one box.

    All boxes must lie inside `outer`. The boxes tile `outer` if and only if the sum of their corners, counted with
    alternating signs, equals that of `outer`.
    """
    divided = divided_dims(outer, parts)
    signs = [(-1) ** sum(bits) for bits in itertools.product((0, 1), repeat=len(divided))]
    corners: Counter[tuple[int, ...]] = Counter()
    for factor, box in itertools.chain(((1, part) for part in parts), [(-1, outer)]):
        points = itertools.product(*(box.ranges[d] for d in divided))
        for sign, corner in zip(signs, points, strict=True):
            corners[corner] += factor * sign
    return not any(corners.values())


@dataclass(frozen=True, slots=True)
class Part:
    """Projection stacked in a packed weight, such as the query rows of a QKV matrix.

    Attributes:
        rows: Number of rows.
        heads: Number of equal row groups (heads) that must stay whole; equal to `rows` if any row may start a slice.
    """

    rows: int
    heads: int


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Part, ...]:
    """Return the parts of a packed weight of query, key and value rows, in this order."""
    kv = Part(num_kv_heads * head_dim, num_kv_heads)
    return Part(num_heads * head_dim, num_heads), kv, kv


def gate_up_parts(rows: int) -> tuple[Part, ...]:
    """Return the parts of a packed weight of `rows` rows: gate and up, of equal size."""
    half = Part(rows // 2, rows // 2)
    return half, half


def equal_parts(parts: tuple[Part, ...], degree: int) -> bool:
    """Return whether all parts have the same number of rows and `degree` divides the heads of each part."""
    return len({p.rows for p in parts}) == 1 and all(p.heads % degree == 0 for p in parts)


def working_rows(parts: tuple[Part, ...], degree: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return, per part, the half-open range of rows whose outputs tensor-parallel rank `rank` of `degree` uses.

    For every part, `degree` must divide the number of heads or be a multiple of it.
    """
    result, first = [], 0
    for part in parts:
        shared = max(1, degree // part.heads)  # ranks that compute with the same rows
        size = part.rows * shared // degree
        start = first + rank // shared * size
        result.append((start, start + size))
        first += part.rows
    return tuple(result)


def exchanged(parts: tuple[Part, ...], degree: int, source: int, target: int) -> tuple[tuple[int, int], ...]:
    """Return the nonempty row ranges, ascending, that rank `source` computes and rank `target` uses.

    Rank `source` computes slice `source` of `degree` equal slices of all rows; `working_rows` has the rows of `target`.
    """
    size = sum(p.rows for p in parts) // degree
    owned = source * size, (source + 1) * size
    cut = [(max(a, owned[0]), min(b, owned[1])) for a, b in working_rows(parts, degree, target)]
    return tuple((a, b) for a, b in cut if a < b)


def exchanged_rows(parts: tuple[Part, ...], degree: int, source: int, target: int) -> int:
    """Return the number of rows in the ranges of `exchanged`."""
    return sum(b - a for a, b in exchanged(parts, degree, source, target))
