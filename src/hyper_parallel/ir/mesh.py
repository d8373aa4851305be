"""Mesh: named axes over devices, pure rank arithmetic.

A mesh is an n-dimensional arrangement of device ids, axes written outer to inner. Devices that are neighbours on
the innermost axis have neighbouring ids, so inner axes lie on faster links. Nothing here knows a framework.

    Mesh((("dp_shard", 2), ("tp_x", 4)))      ranks 0..3 are one tensor-parallel group, 4..7 the other
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hyper_parallel.errors import MeshError

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")
"""Axis names, outer to inner. Experts use `ep`, folded over dp_shard x cp x tp."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outer to inner, over a list of device ids.

    Attributes:
        axes: Pairs of axis name and degree, outer to inner.
        devices: Device ids in row-major order of the axes; empty means 0, 1, 2, ...
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise MeshError("a mesh names an axis twice", got=names)
        for name, degree in self.axes:
            if degree < 1:
                raise MeshError(f"axis `{name}` has a degree below one", got=degree)
        if self.devices and len(self.devices) != self.size:
            raise MeshError(
                "the degrees do not multiply to the number of devices",
                got=f"{self.size} positions, {len(self.devices)} devices",
            )
        if len(set(self.devices)) != len(self.devices):
            raise MeshError("a mesh holds a device twice", got=self.devices)

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
        """Degree of an axis, or the product over several; an axis the mesh does not have counts 1."""
        degrees = dict(self.axes)
        if isinstance(axis, str):
            return degrees.get(axis, 1)
        return math.prod(degrees.get(a, 1) for a in axis)

    def device(self, position: int) -> int:
        """Device id at a row-major position."""
        return self.devices[position] if self.devices else position

    def position(self, device: int) -> int:
        """Row-major position of a device id."""
        devices = self.devices or range(self.size)
        if device not in devices:
            allowed = self.devices or f"0..{self.size - 1}"
            raise MeshError(f"device id {device} is not in the mesh", got=device, allowed=allowed)
        return devices.index(device)

    def coordinate(self, device: int) -> dict[str, int]:
        """Coordinate of a device on every axis."""
        rest = self.position(device)
        coordinate = {}
        for name, degree in reversed(self.axes):
            rest, coordinate[name] = divmod(rest, degree)
        return {name: coordinate[name] for name in self.names}

    def at(self, coordinate: Mapping[str, int]) -> int:
        """Device id at a coordinate; axes left out count 0."""
        position = 0
        for name, degree in self.axes:
            index = coordinate.get(name, 0)
            if not 0 <= index < degree:
                raise MeshError(
                    f"axis `{name}` has no such index", got=index, allowed=f"0..{degree - 1}"
                )
            position = position * degree + index
        return self.device(position)

    def group(self, device: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """Return the devices that differ from `device` only on `axes`; the first of the axes is the outermost."""
        group = [self.coordinate(device)]
        for axis in (axes,) if isinstance(axes, str) else axes:
            group = [{**c, axis: i} for c in group for i in range(self.degree(axis))]
        return tuple(self.at(c) for c in group)

    def groups(
        self, axes: str | Sequence[str], most: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the groups over `axes`, in the order of their first devices; each device is in exactly one.

        Args:
            axes: Axes along which devices of a group differ.
            most: Number of groups to return; None: all.
        """
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
