"""Orders of the mesh axes that differ on a machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import ORDERS
from hyper_parallel.ir import AXES

TENSOR_INNERMOST: Final = frozenset(
    i for i, order in enumerate(ORDERS) if {*order[-2:]} == {"tp_x", "tp_y"}
)
"""Orders with tensor parallelism innermost, which communicates most."""


def distinct_orders(degrees: tuple[int, ...], tiers: tuple[int, ...]) -> list[int]:
    """One order of every kind, as indices into `cost.ORDERS`; where there is one, with tensor parallelism innermost.

    Two orders are the same when every axis has the same share of its ranks in every domain of links.

    Args:
        degrees: Degree of every axis of `ir.AXES`.
        tiers: Devices in the domains beyond which other links are used, inner to outer.
    """
    indices, axes = _permutations(tuple(i for i, d in enumerate(degrees) if d > 1))
    ranks = np.array(degrees)[axes]
    stride = np.cumprod(ranks, axis=1) // ranks
    shares = np.ones((len(indices), len(degrees), len(tiers)), dtype=np.int64)
    rows = np.arange(len(indices))[:, None]
    for tier, devices in enumerate(tiers):
        shares[rows, axes, tier] = np.minimum(ranks, np.maximum(1, devices // stride))
    first: dict[bytes, int] = {}
    for index, share in zip(indices, shares, strict=True):
        first.setdefault(share.tobytes(), index)
    return list(first.values())


@lru_cache(maxsize=64)  # one for every set of axes
def _permutations(axes: tuple[int, ...]) -> tuple[tuple[int, ...], NDArray[np.intp]]:
    """The orders that permute some axes of `ir.AXES`: an index of each, and the axes inner to outer, [orders, axes]."""
    first: dict[tuple[int, ...], int] = {}
    for index in sorted(range(len(ORDERS)), key=lambda i: i not in TENSOR_INNERMOST):
        places = (AXES.index(axis) for axis in reversed(ORDERS[index]))
        first.setdefault(tuple(p for p in places if p in axes), index)
    return tuple(first.values()), np.array([*first], dtype=np.intp).reshape(len(first), len(axes))
