"""What a search may choose from: devices, pins, and the values that a pin may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from hyper_parallel.cost import ORDERS, RECOMPUTE, SCHEDULES, SHAPES
from hyper_parallel.errors import BadValue, UnknownKey
from hyper_parallel.ir import Strategy
from hyper_parallel.ir.strategy import CpKind

DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may choose from.

    Attributes:
        num_devices: Devices; the degrees multiply to it.
        pins: What is fixed: degrees by axis name (`tp` is their product on x and y) and the other columns of
            `cost.Candidates`, choices as their index.
        tp: Tensor-parallel degrees that 1-D layouts can have.
        executable: Only what this version can run.
        ep: Expert-parallel degrees that layouts can have; None: any.
        base: Strategy whose rules and choices that no column stands for are kept.
    """

    num_devices: int
    pins: Mapping[str, int]
    tp: tuple[int, ...]
    executable: bool
    ep: tuple[int, ...] | None = None
    base: Strategy = field(default_factory=Strategy)

    def without(self, name: str) -> Limits:
        """The same limits without one pin."""
        return replace(self, pins={k: v for k, v in self.pins.items() if k != name})

    def allows(self, name: str, value: float) -> bool:
        """Whether a column may have a value, as far as pins say."""
        return self.pins.get(name, value) == value

    def allows_ulysses(self, cp: int, ulysses: int) -> bool:
        """Whether so many of the cp ranks may exchange heads; the kind has no effect without context parallelism."""
        if not self.allows("cp_ulysses", ulysses):
            return False
        kind = self.pins.get("cp_kind")
        if kind is None or cp == 1:
            return True
        name = CP_KINDS[kind]
        return {"ulysses": ulysses == cp, "hybrid": 1 < ulysses < cp}.get(name, ulysses == 1)


CP_KINDS: Final[tuple[CpKind, ...]] = ("ring", "ulysses", "hybrid", "all_gather")
CHOICES: Final[Mapping[str, tuple[object, ...] | None]] = MappingProxyType(
    {
        "microbatch": None,
        "accumulation": None,
        "vpp": None,
        "cp_kind": CP_KINDS,
        "cp_ulysses": None,
        "etp": None,
        "zero": (0, 1, 2, 3),
        "recompute": RECOMPUTE,
        "schedule": SCHEDULES,
        "attention_shape": SHAPES,
        "mlp_shape": SHAPES,
        "attention_scatter": ("head", "token"),
        "gathered_inputs": ("keep", "re-gather"),
        "order": tuple(">".join(order) for order in ORDERS),
    }
)
"""What may be pinned besides the degrees, and the values it may have; None: any positive number."""


EXCLUDABLE: Final = ("attention_scatter", "gathered_inputs", "recompute", "offload")
"""Choices that can be excluded like an axis: the first of their values is taken."""


def check_pins(pins: Mapping[str, int | str] | None) -> dict[str, int]:
    """Pins as columns of `cost.Candidates`: degrees as they are, choices as their index.

    Raises:
        UnknownKey: HP101 for a name that is neither an axis nor a choice.
        BadValue: HP102 for a value that it cannot have.
    """
    found = {}
    for name, value in (pins or {}).items():
        key = {"virtual_stages": "vpp"}.get(name, name)
        if key not in (*DEGREES, "tp", *CHOICES):
            raise UnknownKey("a pin names no axis", got=name, allowed=(*DEGREES, "tp", *CHOICES))
        allowed = CHOICES.get(key)
        named = {str(v): i for i, v in enumerate(allowed or ())}
        if allowed is not None and str(value) in named:
            found[key] = named[str(value)]
        elif allowed is None and str(value).isdigit() and int(value) >= 1:
            found[key] = int(value)
        else:
            shown = allowed if allowed and len(allowed) < 10 else "1 and more"
            raise BadValue(
                f"`{key}` cannot be pinned to that", got=f"{name}={value}", allowed=shown
            )
    return found
