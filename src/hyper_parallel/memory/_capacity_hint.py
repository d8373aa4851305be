"""What DRAM or flash would be enough when a budget cannot be kept with what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hyper_parallel.errors import TierFull
from hyper_parallel.memory._emitted import Emitted
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._programs import Search

_ROUNDS: Final = 6  # of bisection
_LARGE_ROUNDS: Final = 3
_LARGE: Final = 1500  # operators; an emission takes a part of a second

_Fits = Callable[[Emitted], bool]


def sufficient_capacity(
    searches: Sequence[Search],
    aim: int,
    fits: _Fits,
    planned: Callable[[Sequence[Search]], Emitted | None],
) -> dict[str, int]:
    """Bytes of DRAM or of flash, each with the other as it is, with which planning succeeds; empty when none helps.

    Args:
        searches: What has found nothing.
        aim: Device bytes that programs aim at.
        fits: Whether a program keeps the budget.
        planned: What planning with these searches ends with; None: it fails.
    """
    machine = searches[0].machine

    def on(changed: MemoryMachine) -> list[Search]:
        return [s.on(changed) for s in searches]

    def first(changed: MemoryMachine) -> Emitted | None:
        result = (search.first(aim, fits) for search in on(changed))
        return next((e for e in result if e is not None), None)

    result = {}
    if machine.dram_bytes is not None:
        result["dram"] = _least(
            machine.dram_bytes,
            lambda n: first(replace(machine, dram_bytes=n)),
            lambda e: e.dram_bytes,
            lambda n: planned(on(replace(machine, dram_bytes=n))),
            same=machine.copy_out is None,
        )
    if machine.copy_out is not None and machine.flash_bytes is not None:
        result["flash"] = _least(
            machine.flash_bytes,
            lambda n: first(replace(machine, flash_bytes=n)),
            lambda e: e.peaks["flash"],
            lambda n: planned(on(replace(machine, flash_bytes=n))),
            same=True,
        )
    return {tier: sufficient for tier, sufficient in result.items() if sufficient is not None}


def _least(
    low: int,
    first: Callable[[int], Emitted | None],
    taken: Callable[[Emitted], int],
    planned: Callable[[int | None], Emitted | None],
    *,
    same: bool,
) -> int | None:
    """The smallest capacity of a tier above `low` that was found to be enough; None when no capacity is.

    Args:
        low: A capacity that is not enough.
        first: A program for a capacity.
        taken: Bytes that a program takes in the tier.
        planned: What planning with a capacity ends with; None: unlimited.
        same: With what an unlimited plan takes, planning finds that plan again.
    """
    if (whole := planned(None)) is None:
        return None
    most = high = max(taken(whole), low + 1)
    for _ in range(_LARGE_ROUNDS if len(whole.actions) > _LARGE else _ROUNDS):
        middle = (low + high) // 2
        if middle == low:
            break
        if (now := first(middle)) is None:
            low = middle
        else:
            high = max(taken(now), low + 1)
    if high < most and planned(high) is not None:
        return high
    # With a capacity DRAM is shared between what stays there and what goes on to flash.
    tried = (most,) if same else (most, 2 * most, 4 * most)
    return next((n for n in tried if same or planned(n) is not None), None)


def tier_full(budget_bytes: int, machine: MemoryMachine, sufficient: Mapping[str, int]) -> TierFull:
    """The error that names every tier, and all that would be enough on its own.

    Args:
        budget_bytes: Device budget.
        machine: Capacities.
        sufficient: Of `device`, `dram` and `flash`, bytes with which there is a plan.
    """
    dram = "unlimited" if machine.dram_bytes is None else f"{machine.dram_bytes} bytes"
    flash = "unlimited" if machine.flash_bytes is None else f"{machine.flash_bytes} bytes"
    if machine.copy_out is None:
        flash = "none"
    error = TierFull(
        "the device budget needs more bytes in DRAM or flash than the machine allows",
        got=f"budget {budget_bytes} bytes, dram {dram}, flash {flash}",
    )
    return with_capacity_hint(error, sufficient)


def with_capacity_hint(error: TierFull, sufficient: Mapping[str, int]) -> TierFull:
    """The error with a hint that names these bytes."""
    keys = {"dram": "dram", "flash": "flash", "device": "budget"}
    ways = [
        f"`offload.{key}={sufficient[tier]}`" for tier, key in keys.items() if tier in sufficient
    ]
    error.enough_bytes = dict(sufficient)
    error.hint = f"set {', or '.join(ways)}"
    return error
