"""What DRAM or flash would be enough when a budget cannot be kept with what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from hyper_parallel.errors import TierFull
from hyper_parallel.memory.emitted_programs import Emitted
from hyper_parallel.memory.memory_machine import MemoryMachine

_ROUNDS: Final = 5  # of bisection

_On = Callable[[MemoryMachine], Emitted | None]


def sufficient_capacity(machine: MemoryMachine, planned: _On, tried: _On) -> dict[str, int]:
    """Bytes of DRAM or of flash, each with the other as it is, with which planning succeeds; empty when none helps.

    It is what a plan without the limit takes; of DRAM before a flash tier, which goes without most of it, less.

    Args:
        machine: With it, planning finds nothing.
        planned: What planning with other capacities ends with; None: it fails.
        tried: The same of its first step only.
    """
    result = dict[str, int]()
    if machine.dram_bytes is not None:
        unlimited = planned(replace(machine, dram_bytes=None))
        if unlimited is not None:
            most = max(unlimited.dram_bytes, machine.dram_bytes + 1)
            enough = (
                most if machine.copy_out is None else _before_flash(machine, most, planned, tried)
            )
            if enough is not None:
                result["dram"] = enough
    if machine.copy_out is not None and machine.flash_bytes is not None:
        unlimited = planned(replace(machine, flash_bytes=None))
        if unlimited is not None:
            result["flash"] = max(unlimited.peaks["flash"], machine.flash_bytes + 1)
    return result


def _before_flash(machine: MemoryMachine, most: int, planned: _On, tried: _On) -> int | None:
    """Bytes of DRAM that are enough, at best the least; None when none were found.

    Args:
        machine: With its DRAM, planning finds nothing.
        most: What is taken when DRAM has no limit.
        planned: See `sufficient_capacity`.
        tried: See there.
    """
    low, high = machine.dram_bytes or 0, most
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        if (found := tried(replace(machine, dram_bytes=middle))) is None:
            low = middle
        else:
            high = max(found.dram_bytes, low + 1)
    # With a capacity DRAM is shared between what stays there and what goes on to flash.
    sizes = dict.fromkeys((high, most, 2 * most, 4 * most))
    return next((n for n in sizes if planned(replace(machine, dram_bytes=n)) is not None), None)


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
