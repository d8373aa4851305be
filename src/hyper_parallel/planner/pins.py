"""Pins of a search: the choices that a user can fix (pin) to a value, and checks of pins and exclusions.

A key of the recipe's sections `parallel` and `training` can be pinned if `cost.Candidates` has a column for it. Some
choices that exist only in a search, such as the order of the mesh axes, can be pinned too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, get_args

from hyper_parallel.config import DEGREES, Parallel, Training
from hyper_parallel.cost import COLUMN_OF, ORDERS, VALUES, Candidates
from hyper_parallel.errors import BadValue, UnknownKey
from hyper_parallel.ir import Overlap
from hyper_parallel.ir.strategy import CpKind


@dataclass(frozen=True, slots=True)
class Pinnable:
    """Degree or other choice of a strategy that can be pinned to a value.

    Attributes:
        name: Key in `PlanRequest.pins`.
        recipe_key: Recipe key, such as `parallel.pp`; "" for choices without a recipe key of their own.
        values: Allowed values; the index of the pinned value is stored. (): any positive integer, which is stored.
    """

    name: str
    recipe_key: str
    values: tuple[object, ...] = ()

    def shown(self, pinned: int) -> object:
        """Return the value of a pin that is stored as the number `pinned`."""
        return self.values[pinned] if self.values else pinned

    def stored(self, value: int | str) -> int | None:
        """Return the number that is stored for a pin; None if the value is not allowed."""
        text = str(value)
        if self.values:
            return next((i for i, v in enumerate(self.values) if str(v) == text), None)
        return int(text) if text.isdecimal() and len(text) < 19 and int(text) >= 1 else None

    def usable(self, value: int | str) -> object:
        """Return the allowed value that `value` denotes; if there is none, the first allowed value."""
        stored = self.stored(value)
        return self.shown(stored if stored is not None else 0 if self.values else 1)


_COLUMNS: Final = {**COLUMN_OF, "accumulation_steps": "accumulation", "cp_kind": "cp_gather"}
"""Dict from recipe key to column of `cost.Candidates`, where the names differ."""
_VALUES: Final = {**VALUES, "cp_kind": get_args(CpKind), "zero": (0, 1, 2, 3)}
"""Dict from recipe key to the values of a choice that is not a positive integer."""
OVERLAPS: Final = (
    Overlap(),
    Overlap(half_batch=True),
    *(Overlap(ep_chunks=chunks) for chunks in (2, 4, 8)),
    *(Overlap(tp_chunks=chunks) for chunks in (2, 4)),
)
"""Overlaps that a search tries, the simplest first."""
AUTO_OVERLAP: Final = len(OVERLAPS)
"""Stored value of the pin `overlap=auto`: the search chooses among `OVERLAPS`."""
_SEARCH_ONLY: Final = (
    Pinnable("tp", ""),
    Pinnable("etp", ""),
    Pinnable("order", "", tuple(">".join(order) for order in ORDERS)),
    Pinnable("overlap", "overlap", (*map(str, OVERLAPS), "auto")),
)
_COLUMN_NAMED: Final = ("virtual_stages", "accumulation_steps")


def _table() -> Mapping[str, Pinnable]:
    """Return a dict from every accepted name of a choice to its `Pinnable`; some choices have two names."""
    table = {key.name: key for key in _SEARCH_ONLY}
    for section, keys in ("parallel", Parallel.model_fields), ("training", Training.model_fields):
        for name in keys:
            column = _COLUMNS.get(name, name)
            if column not in Candidates.__slots__:
                continue
            own = column if name in _COLUMN_NAMED else name
            table[name] = table[own] = Pinnable(own, f"{section}.{name}", _VALUES.get(name, ()))
    return MappingProxyType(table)


PINNABLE: Final = _table()
"""Dict from accepted name to the choice that can be pinned."""

EXCLUDABLE: Final = ("attention_scatter", "gathered_inputs", "recompute", "offload")
"""Choices that `--exclude` pins to their first value, the default."""


def check_pins(pins: Mapping[str, int | str] | None) -> dict[str, int]:
    """Return pins as a dict from `Pinnable.name` to the pinned number, or to the index of the pinned value.

    A pin of `tp` alone also pins `tp_y` to 1. With a pin of `tp_y` but none of `tp_x`, a pin of `tp` applies to `tp_x`.
    With a pin of `tp_x`, it applies to the product of both.

    Args:
        pins: Dict from a name in `PINNABLE` to the value; None: no pins.

    Raises:
        UnknownKey: HP101 for a name that is not in `PINNABLE`.
        BadValue: HP102 for a value that is not allowed, or two values of one choice under two names.
    """
    checked: dict[str, int] = {}
    named = dict(pins or {})
    if "tp" in named and "tp_x" not in named:
        if "tp_y" in named:
            named["tp_x"] = named.pop("tp")
        else:
            named["tp_y"] = 1
    for name, value in named.items():
        key = PINNABLE.get(name)
        if key is None:
            near = get_close_matches(name, PINNABLE, 1)
            likely = PINNABLE[near[0]].usable(value) if near else None
            raise UnknownKey(
                f"`{name}` is not a degree or choice that can be pinned",
                got=f"{name}={value}",
                allowed=tuple(PINNABLE),
                changes={"--pin": {near[0]: likely}} if near else None,
                where="--pin",
            )
        stored = key.stored(value)
        if stored is None:
            examples = (*key.values[:3], "...") if len(key.values) >= 10 else key.values
            raise BadValue(
                f"`{name}` cannot be pinned to `{value}`",
                got=f"{name}={value}",
                allowed=examples or "an integer from 1",
                changes={"--pin": {name: str(key.values[0]) if key.values else 1}},
                where="--pin",
            )
        if checked.setdefault(key.name, stored) != stored:
            raise BadValue(
                f"`{name}` is another name of a choice that is pinned to `{key.shown(checked[key.name])}`",
                got=f"{name}={value}",
                hint=f"leave out the pin {name}={value}",
                where="--pin",
            )
    return checked


def check_exclusions(excluded: Sequence[str], pins: Mapping[str, int | str]) -> dict[str, int]:
    """Return exclusions as pins: axes pinned to 1, and other choices to the index of their first value.

    Args:
        excluded: Names of mesh axes and of choices in `EXCLUDABLE`.
        pins: Pins of the user by name, as for `check_pins`; exclusions must not contradict them.

    Raises:
        BadValue: HP102 for a name that cannot be excluded, or that `pins` sets to another value under the same name.
    """
    allowed = (*DEGREES, "tp", "dp", *EXCLUDABLE)
    checked: dict[str, int] = {}
    for name in excluded:
        if name not in allowed:
            near = get_close_matches(name, allowed, 1)
            raise BadValue(
                f"`{name}` is not an axis or choice that can be excluded",
                got=name,
                allowed=allowed,
                hint={"--exclude": tuple(near)} if near else f"leave `{name}` out of --exclude",
                where="--exclude",
            )
        for key in ("dp_replicate", "dp_shard") if name == "dp" else (name,):
            checked[key] = 0 if key in EXCLUDABLE else 1
            implied, pinned = shown_pin(key, checked[key]), f"{key}={pins.get(key)}"
            if key in pins and pinned != implied:
                raise BadValue(
                    f"`{key}` is both excluded and pinned: an exclusion means {implied}",
                    got=pinned,
                    hint=f"leave out the pin {pinned}, or leave `{name}` out of --exclude",
                    where="--exclude",
                )
    return checked


def shown_pin(name: str, pinned: int) -> str:
    """Return one entry of `PlanRequest.pins` as text, such as `schedule=zbv`."""
    return f"{name}={PINNABLE[name].shown(pinned) if name in PINNABLE else pinned}"
