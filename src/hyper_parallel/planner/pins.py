"""What a search may choose from: the table of keys that can be pinned, and pins as columns.

The table is read off the recipe's sections: a key of `parallel:` or `training:` that is a column of `cost.Candidates`
can be pinned, to the values that its section allows. What only a search may choose is named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin

from hyper_parallel.config import DEGREES, Parallel, Training
from hyper_parallel.cost import ORDERS, RECOMPUTE, Candidates
from hyper_parallel.errors import BadValue, UnknownKey


@dataclass(frozen=True, slots=True)
class Pinnable:
    """A key that can be pinned.

    Attributes:
        name: What limits call it: the column of `cost.Candidates` where there is one.
        recipe_key: Where a recipe says it, dotted; "" for what only a search chooses.
        values: Values it may have, pinned as their index; (): any positive number.
    """

    name: str
    recipe_key: str
    values: tuple[object, ...] = ()

    def shown(self, pinned: int) -> object:
        """The value behind a pin."""
        return self.values[pinned] if self.values else pinned


_COLUMNS: Final = {
    "virtual_stages": "vpp",
    "accumulation_steps": "accumulation",
    "attention_scatter": "attention_tokens",
    "gathered_inputs": "regather",
    "cp_kind": "cp_gather",
}
"""Columns that stand for a key of another name."""
_WIDER: Final = {"recompute": RECOMPUTE, "zero": (0, 1, 2, 3)}
"""Choices that a search knows more values of than a recipe can run."""
_SEARCHED: Final = (
    Pinnable("tp", ""),
    Pinnable("etp", ""),
    Pinnable("order", "", tuple(">".join(order) for order in ORDERS)),
)
_RENAMED: Final = ("virtual_stages", "accumulation_steps")


def _literals(annotation: Any) -> tuple[object, ...]:
    """Values of a literal type, or of those in a union; none of other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for part in get_args(annotation) for value in _literals(part))


def _table() -> Mapping[str, Pinnable]:
    """Every name that a pin may have."""
    table = {key.name: key for key in _SEARCHED}
    for section, fields in (
        ("parallel", Parallel.model_fields),
        ("training", Training.model_fields),
    ):
        for name, info in fields.items():
            column = _COLUMNS.get(name, name)
            if column not in Candidates.__slots__:
                continue
            own = column if name in _RENAMED else name
            values = _WIDER.get(name, _literals(info.annotation))
            table[name] = table[own] = Pinnable(own, f"{section}.{name}", values)
    return MappingProxyType(table)


PINNABLE: Final = _table()
"""Keys that can be pinned, by every name they have."""

EXCLUDABLE: Final = ("attention_scatter", "gathered_inputs", "recompute", "offload")
"""Choices that can be excluded like an axis: the first of their values is taken."""


def check_pins(pins: Mapping[str, int | str] | None) -> dict[str, int]:
    """Pins by the name of `Pinnable`: numbers as they are, choices as their index.

    As in a recipe `tp` is `tp_x`: pinned alone there is no second axis.

    Raises:
        UnknownKey: HP101 for a name that is neither an axis nor a choice.
        BadValue: HP102 for a value that it cannot have.
    """
    checked: dict[str, int] = {}
    given = dict(pins or {})
    if "tp" in given and "tp_y" not in given:
        given["tp_y"] = 1
    elif "tp" in given:
        given.setdefault("tp_x", given.pop("tp"))
    for name, value in given.items():
        key = PINNABLE.get(name)
        if key is None:
            near = get_close_matches(name, PINNABLE, 1)
            hint = f"--pin {near[0]}={value}" if near else None
            raise UnknownKey("a pin names no axis", got=name, allowed=tuple(PINNABLE), hint=hint)
        indices = {str(v): i for i, v in enumerate(key.values)}
        if key.values and str(value) in indices:
            checked[key.name] = indices[str(value)]
        elif not key.values and str(value).isdigit() and int(value) >= 1:
            checked[key.name] = int(value)
        else:
            shown = key.values if 0 < len(key.values) < 10 else "1 and more"
            raise BadValue(
                f"`{key.name}` cannot be pinned to that", got=f"{name}={value}", allowed=shown
            )
    return checked


def check_exclusions(excluded: Sequence[str], pins: Mapping[str, int | str]) -> dict[str, int]:
    """Excluded axes as pins to 1, excluded choices as pins to the first of their values.

    Raises:
        BadValue: HP102 for what cannot be excluded, or is pinned to something else.
    """
    checked = {}
    for axis in excluded:
        if axis in EXCLUDABLE:
            plain = str(PINNABLE[axis].values[0]) if axis in PINNABLE else None
            if str(pins.get(axis, plain)) != str(plain):
                raise BadValue("a choice is pinned and excluded", got=f"{axis}={pins[axis]}")
            checked[axis] = 0
            continue
        if axis not in (*DEGREES, "tp", "dp"):
            allowed = (*DEGREES, "tp", *EXCLUDABLE)
            raise BadValue("there is no such axis to exclude", got=axis, allowed=allowed)
        for name in ("dp_replicate", "dp_shard") if axis == "dp" else (axis,):
            if pins.get(name, 1) != 1:
                raise BadValue("an axis is pinned and excluded", got=f"{name}={pins[name]}")
            checked[name] = 1
    return checked


def shown_pin(name: str, pinned: int) -> str:
    """A pin as it is written: `schedule=zbv`."""
    return f"{name}={PINNABLE[name].shown(pinned) if name in PINNABLE else pinned}"
