"""Where the axes of candidates lie: strides of every axis in device ids, for every legal order.

A group of ranks is described by its axes as (degree, stride) pairs. Counting the members of a group inside a domain
of consecutive ids multiplies over its axes, so one law serves tensor, data, context and expert parallel groups in
any order of the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from hyper_parallel.cost._candidates import ORDERS, Array, Candidates
from hyper_parallel.ir import AXES

Axis = tuple[Array, Array]
"""Degree and stride of one axis of a group."""

_FOLDED = ("dp_shard", "cp", "tp_x", "tp_y")
_LIES_INSIDE: Final = {
    (a, b): np.array([order.index(a) > order.index(b) for order in ORDERS])
    for a in AXES
    for b in AXES
}
"""Whether axis a lies inside axis b, for every order."""


class Places:
    """The axes of every candidate, and the groups of experts that fold over several of them."""

    def __init__(self, c: Candidates) -> None:
        order = np.asarray(c.order, dtype=np.intp)
        same = order.size and (order == order.flat[0]).all()
        self._order, self._c = order.flat[:1] if same else order, c
        self._axes: dict[str, Axis] = {}

    def axis(self, name: str) -> Axis:
        """An axis of the mesh."""
        if name not in self._axes:
            self._axes[name] = getattr(self._c, name), self._inside(name, AXES)
        return self._axes[name]

    def group(self, axes: Sequence[str]) -> tuple[Axis, ...]:
        """A group of the boundary table by the names of its axes.

        Of cp alone those that pass keys around a ring, outside the ranks that exchange heads; of pp a stage and the
        next one.
        """
        if axes == ("pp",):
            return ((np.minimum(self._c.pp, 2.0), self.axis("pp")[1]),)
        if axes == ("cp",):
            (degree, stride), inner = self.axis("cp"), self._c.cp_ulysses
            return ((degree / inner, stride * inner),)
        if axes[0] in ("etp", "edp"):
            return self.experts[axes[0]]
        return tuple(self.axis(name) for name in axes)

    @cached_property
    def experts(self) -> dict[str, tuple[Axis, ...]]:
        """Parts of dp_shard, cp, tp_x and tp_y whose ranks cut one expert (etp), hold all experts (ep) or the same."""
        c, parts = self._c, []
        for name in _FOLDED:
            degree, stride = self.axis(name)
            # Experts take the inner ranks first: what is left of them for this axis is what the inner ones lack.
            inner = self._inside(name, _FOLDED)
            etp = np.clip(c.etp / inner, 1.0, degree)
            taken = np.clip(c.etp * c.ep / inner, 1.0, degree)
            parts.append(
                ((etp, stride), (taken / etp, stride * etp), (degree / taken, stride * taken))
            )
        return dict(zip(("etp", "ep", "edp"), zip(*parts, strict=True), strict=True))

    def _inside(self, name: str, among: Sequence[str]) -> Array:
        """Product of the degrees of the axes that lie inside an axis."""
        product: Array = np.ones(1)
        for other in among:
            lies = _LIES_INSIDE[other, name][self._order]
            if lies.any():
                product = product * np.where(lies, getattr(self._c, other), 1.0)
        return product
