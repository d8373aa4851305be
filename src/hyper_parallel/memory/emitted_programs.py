"""Programs made of choices: each is emitted and judged by what came out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryProgram, MemoryTier
from hyper_parallel.memory.candidates import Candidate
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.emission import Emitter
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes
from hyper_parallel.memory.rounding import WholeChoice

_DRAM_SHARES = (0.75, 0.5, 0.25)  # part of the DRAM for what stays there; tried in turn


@dataclass(frozen=True)
class Emitted:
    """One emitted program with the emitter's own account of it; the chosen one is replayed.

    Attributes:
        peaks: Bytes that live at the same time.
        dram_bytes: What host memory gives for them.
        waited_s: Seconds that computing waits for copies at every position, and at the end.
    """

    actions: tuple[MemoryAction, ...]
    homes: tuple[MemoryTier, ...]
    seconds: float
    peaks: dict[MemoryTier, int]
    dram_bytes: int
    gaps: tuple[Gap, ...]
    recomputes: Recomputes | None
    statement: str
    waited_s: np.ndarray

    @property
    def peak(self) -> int:
        """Device bytes."""
        return self.peaks["device"]

    def overfull(self, machine: MemoryMachine) -> int:
        """Bytes by which DRAM and flash are too small for what the program puts there."""
        taken = (
            (self.dram_bytes, machine.dram_bytes),
            (self.peaks["flash"], machine.flash_bytes),
        )
        return sum(max(size - cap, 0) for size, cap in taken if cap is not None)


def emit(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: tuple[int, ...],
    choice: WholeChoice,
    limit_bytes: int | None,
    limit_s: float,
    pauses_s: np.ndarray,
    statement: str,
) -> Emitted | None:
    """The program of a choice; None when it takes longer than the limit.

    Args:
        program: Operators and storages.
        machine: Channels and capacities.
        order: Order of the operators.
        choice: What leaves and what is made again.
        limit_bytes: Device bytes for which operators and early reloads wait; None: they do not.
        limit_s: Seconds after which the program is given up.
        pauses_s: Seconds that computing is expected to wait or compute again at every position.
        statement: Where the choice comes from.
    """
    recomputes, emitted = choice.candidates.recomputes, None
    for share in _DRAM_SHARES:
        gaps = assign_tiers(program, machine, choice.chosen, share, recomputes.host.at_home)
        planned = choice.profile.copy()
        emitter = Emitter(program, machine, order, gaps, recomputes, limit_bytes, planned, pauses_s)
        actions = emitter.emit(limit_s * (1 + 1e-9))
        if actions is None:
            return None
        ledger = emitter.ledger
        emitted = Emitted(
            actions,
            tuple(emitter.copies.homes),
            ledger.clock.now_s,
            ledger.peaks,
            ledger.dram_bytes,
            tuple(gaps),
            recomputes,
            statement,
            emitter.waited_s,
        )
        if machine.copy_out is None or not emitted.overfull(machine):
            break
    return emitted


def assign_tiers(
    program: MemoryProgram,
    machine: MemoryMachine,
    chosen: Sequence[Candidate],
    share: float,
    at_home: Collection[int] = (),
) -> list[Gap]:
    """DRAM while its budget lasts; then the candidates with the longest idle time go on to flash.

    The DRAM account is the sum over all chosen candidates, an upper bound of what is there at any one time; replay
    gives the exact peak.

    Args:
        program: Sizes.
        machine: Capacities.
        chosen: What leaves the device.
        share: Part of the DRAM to fill; the rest is for bytes on their way through DRAM to flash and back.
        at_home: Storages that live in DRAM whatever is chosen.
    """
    flash = machine.copy_out is not None and machine.copy_in is not None
    room = machine.dram_bytes
    tiers: dict[int, MemoryTier] = {}
    if room is not None and flash:
        used = sum(program.sizes[s] for s in at_home)
        by_storage: dict[int, float] = {}
        for c in chosen:
            if c.storage not in at_home:
                by_storage[c.storage] = max(by_storage.get(c.storage, 0.0), c.idle_s)
        for s in sorted(by_storage, key=lambda s: by_storage[s]):
            if used + program.sizes[s] <= room * share:
                used += program.sizes[s]
            else:
                tiers[s] = "flash"
    return [
        Gap(g.storage, g.first, g.last, tiers.get(g.storage, "dram"))
        for c in chosen
        for g in c.gaps
    ]
