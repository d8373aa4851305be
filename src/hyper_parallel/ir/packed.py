"""Packed projections: several projections stacked in one weight, and the rows of each rank.

Query, key and value (or gate and up) are rows of one matrix. Under tensor parallelism, each rank uses a slice of every
part, at head boundaries. With fewer key and value heads than ranks, several ranks use the same head.

A weight with parts of different sizes is sharded into equal slices of all rows, as any other matrix. Ranks then
exchange output columns: rank s sends to rank t the columns that s computes and t uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Projection stacked in a packed weight.

    Attributes:
        rows: Number of rows.
        heads: Number of equal row groups that must not be divided; equal to `rows` if any row may be separated.
    """

    rows: int
    heads: int


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Part, ...]:
    """Query, key and value, stacked in this order."""
    kv = Part(num_kv_heads * head_dim, num_kv_heads)
    return Part(num_heads * head_dim, num_heads), kv, kv


def gate_up_parts(rows: int) -> tuple[Part, ...]:
    """Gate and up, the halves of `rows`."""
    half = Part(rows // 2, rows // 2)
    return half, half


def equal_parts(parts: tuple[Part, ...], degree: int) -> bool:
    """Return whether all parts have the same size and their heads divide by the degree."""
    return len({p.rows for p in parts}) == 1 and all(p.heads % degree == 0 for p in parts)


def working_rows(parts: tuple[Part, ...], degree: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Half-open row ranges, one per part, that a rank works on."""
    result, first = [], 0
    for part in parts:
        shared = max(1, degree // part.heads)  # ranks that work on the same rows
        size = part.rows * shared // degree
        start = first + rank // shared * size
        result.append((start, start + size))
        first += part.rows
    return tuple(result)


def exchanged(
    parts: tuple[Part, ...], degree: int, source: int, target: int
) -> tuple[tuple[int, int], ...]:
    """Row ranges that `source` holds, in equal slices of all rows, and `target` works on; increasing, without empty."""
    size = sum(p.rows for p in parts) // degree
    owned = source * size, (source + 1) * size
    cut = [(max(a, owned[0]), min(b, owned[1])) for a, b in working_rows(parts, degree, target)]
    return tuple((a, b) for a, b in cut if a < b)


def exchanged_rows(parts: tuple[Part, ...], degree: int, source: int, target: int) -> int:
    """Return the number of rows listed by `exchanged`."""
    return sum(b - a for a, b in exchanged(parts, degree, source, target))
