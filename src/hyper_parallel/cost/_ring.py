"""Bytes a rank sends in ring collectives."""

from __future__ import annotations


def ring_bytes(kind: str, whole_bytes: int, degree: int) -> int:
    """Bytes one rank sends in a ring algorithm.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send_recv.
        whole_bytes: Size of the whole tensor: gathered, before scattering, or the one that is reduced.
        degree: Ranks of the group.

    Cost: (g-1)/g of the whole for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, the whole for
    broadcast and for a message; fractions are rounded down per call.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3.
    """
    if degree <= 1:
        return 0
    if kind in ("broadcast", "send_recv"):
        return whole_bytes
    passes = 2 if kind == "all_reduce" else 1
    return passes * whole_bytes * (degree - 1) // degree
