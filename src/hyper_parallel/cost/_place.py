"""Where the axes of candidates lie: strides of every axis in device ids, for every legal order.

A group of ranks is described by its axes as (degree, stride) pairs. Counting the members of a group inside a domain
of consecutive ids multiplies over its axes, so one law serves tensor, data, context and expert parallel groups in
any order of the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import ORDERS, Array, Candidates
from hyper_parallel.ir import AXES

Axis = tuple[Array, Array]
"""Degree and stride of one axis of a group."""

_FOLDED = ("dp_shard", "cp", "tp_x", "tp_y")


@dataclass(frozen=True, slots=True)
class Places:
    """Axes of every candidate as (degree, stride), and the groups that fold over several axes."""

    pp: Axis  # pipeline stages
    dp_replicate: Axis
    dp_shard: Axis  # FSDP ranks
    cp: Axis  # context-parallel ranks; the Ulysses ranks are the inner ones
    tp_x: Axis  # tensor-parallel ranks on x
    tp_y: Axis  # tensor-parallel ranks on y
    # axes of the ranks that cut one expert: their parts of dp_shard, cp, tp_x and tp_y
    etp: tuple[Axis, ...]
    ep: tuple[Axis, ...]  # the same of an expert-parallel group, outside them
    # the same of the group that shares the parameters of the same experts, outside those
    edp: tuple[Axis, ...]

    @classmethod
    def of(cls, c: Candidates) -> Places:
        """Places of the axes of candidates."""
        order, degrees = _order(c), {name: getattr(c, name) for name in AXES}
        strides = {name: _inside(order, name, AXES, degrees) for name in AXES}
        etp, ep, edp = [], [], []
        for name in _FOLDED:
            degree, stride = degrees[name], strides[name]
            # Experts take the inner ranks first: what is left of them for this axis is what the inner ones lack.
            inner = _inside(order, name, _FOLDED, degrees)
            cut = np.clip(c.etp / inner, 1.0, degree)
            taken = np.clip(c.etp * c.ep / inner, 1.0, degree)
            etp.append((cut, stride))
            ep.append((taken / cut, stride * cut))
            edp.append((degree / taken, stride * taken))
        axes = {name: (degrees[name], strides[name]) for name in AXES}
        return cls(**axes, etp=tuple(etp), ep=tuple(ep), edp=tuple(edp))


def neighbours(c: Candidates) -> Axis:
    """A pipeline stage and the next one, as an axis of two; of one where there is one stage."""
    degrees = {name: getattr(c, name) for name in AXES}
    return np.minimum(c.pp, 2.0), _inside(_order(c), "pp", AXES, degrees)


def _order(c: Candidates) -> NDArray[np.intp]:
    """Column `order`, or its one value."""
    order = np.asarray(c.order, dtype=np.intp)
    return order.flat[:1] if order.size and (order == order.flat[0]).all() else order


def _inside(
    order: NDArray[np.intp], name: str, among: Sequence[str], degrees: Mapping[str, Array]
) -> Array:
    """Product of the degrees of the axes that lie inside an axis."""
    product: Array = np.ones(1)
    for other in among:
        if other != name:
            lies = _LIES_INSIDE[other, name]
            if order.size == 1 and lies[order][0]:
                product = product * degrees[other]
            elif order.size > 1 and lies.any():
                product = product * np.where(lies[order], degrees[other], 1.0)
    return product


_LIES_INSIDE: Final = {
    (a, b): np.array([order.index(a) > order.index(b) for order in ORDERS])
    for a in AXES
    for b in AXES
}
"""Whether axis a lies inside axis b, for every order."""


def split(axis: Axis, inner: Array) -> tuple[Axis, Axis]:
    """An axis as its inner ranks and the rest outside them."""
    degree, stride = axis
    return (inner, stride), (degree / inner, stride * inner)
