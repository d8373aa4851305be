"""What an emission has written down: the actions, their time, and which tier holds what after them."""

from __future__ import annotations

from hyper_parallel.ir import (
    MEMORY_TIERS,
    HostBuffers,
    MemoryAction,
    MemoryActionKind,
    MemoryProgram,
    MemoryTier,
    slab_bytes,
)
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._simulate import TIMELESS, Clock


class Ledger:
    """The books of an `Emitter`.

    Attributes:
        clock: Time after the actions.
        actions: What was emitted.
        live: Bytes now, per tier.
        peaks: The most that there was.
        buffers: Those of DRAM.
        current: Per storage: tier -> its content is the newest.
    """

    def __init__(self, program: MemoryProgram, machine: MemoryMachine) -> None:
        self.program = program
        self.clock = Clock(program, machine)
        self.actions: list[MemoryAction] = []
        self.live: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.buffers = HostBuffers()
        self.current: list[dict[MemoryTier, bool]] = [{} for _ in program.storages]

    def _set(self, s: int, tier: MemoryTier) -> None:
        held = self.current[s]
        if tier not in held:
            size = self.program.sizes[s]
            live = self.live[tier] = self.live[tier] + size
            if live > self.peaks[tier]:
                self.peaks[tier] = live
            if tier == "dram":
                self.buffers.take(size)
        held[tier] = True

    def _unset(self, s: int, tier: MemoryTier) -> None:
        del self.current[s][tier]
        self.live[tier] -= self.program.sizes[s]
        if tier == "dram":
            self.buffers.give(self.program.sizes[s])

    def _detach(self, s: int, tier: MemoryTier) -> None:
        self._unset(s, tier)
        self._do("detach", s, tier)

    def _free(self, s: int) -> None:
        for tier in list(self.current[s]):
            self._unset(s, tier)
        self._do("free", s)

    def _dram_fits(self, s: int) -> bool:
        cap = self.clock.machine.dram_bytes
        return (
            cap is None
            or "dram" in self.current[s]
            or self.buffers.fits(self.program.sizes[s], cap)
        )

    @property
    def dram_bytes(self) -> int:
        """What host memory gives for the buffers."""
        return slab_bytes(self.buffers.most)

    def _do(self, kind: MemoryActionKind, target: int, tier: MemoryTier = "device") -> None:
        action = MemoryAction(kind, target, tier)
        self.actions.append(action)
        if kind not in TIMELESS:
            self.clock.apply(action)
