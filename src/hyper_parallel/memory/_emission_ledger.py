"""What an emission has written down: the actions, their time, and which tier holds what after them."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.ir import (
    MEMORY_TIERS,
    HostBuffers,
    MemoryAction,
    MemoryActionKind,
    MemoryProgram,
    MemoryTier,
    slab_bytes,
)
from hyper_parallel.memory._clock import ProgramClock
from hyper_parallel.memory.memory_machine import MemoryMachine


class EmissionLedger:
    """The books of one emission.

    Args:
        program: Storages.
        machine: Capacities.
        kept: By size, buffers of DRAM that no other size gets the bytes of.

    Attributes:
        clock: Time after the actions.
        actions: What was emitted.
        live: Bytes now, per tier.
        peaks: Peak bytes per tier.
        buffers: Those of DRAM.
        current: Per storage: tier -> its content is the newest.
    """

    def __init__(
        self, program: MemoryProgram, machine: MemoryMachine, kept: Mapping[int, int] | None = None
    ) -> None:
        self._sizes = program.sizes
        self._dram_capacity = machine.dram_bytes
        self.clock = ProgramClock(program, machine)
        self.actions: list[MemoryAction] = []
        self.live: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.buffers = HostBuffers(kept)
        self.current: list[dict[MemoryTier, bool]] = [{} for _ in program.storages]

    def take(self, s: int, tier: MemoryTier) -> None:
        """A storage takes its bytes in a tier, unless it has them; its content there is the newest."""
        held = self.current[s]
        if tier not in held:
            size = self._sizes[s]
            live = self.live[tier] = self.live[tier] + size
            if live > self.peaks[tier]:
                self.peaks[tier] = live
            if tier == "dram":
                self.buffers.take(size)
        held[tier] = True

    def detach(self, s: int, tier: MemoryTier) -> None:
        """Emit that a storage gives its bytes in a tier back."""
        self._drop(s, tier)
        self.emit("detach", s, tier)

    def free(self, s: int) -> None:
        """Emit that a storage gives all its bytes back."""
        for tier in list(self.current[s]):
            self._drop(s, tier)
        self.emit("free", s)

    def dram_fits(self, s: int) -> bool:
        """Whether DRAM has room for a storage."""
        return "dram" in self.current[s] or self.has_dram(self._sizes[s])

    def has_dram(self, num_bytes: int) -> bool:
        """Whether DRAM has a buffer of so many bytes."""
        capacity = self._dram_capacity
        return capacity is None or self.buffers.fits(num_bytes, capacity)

    @property
    def dram_bytes(self) -> int:
        """What host memory gives for the buffers."""
        return slab_bytes(self.buffers.most)

    def emit(self, kind: MemoryActionKind, target: int, tier: MemoryTier = "device") -> None:
        """Write an action down."""
        action = MemoryAction(kind, target, tier)
        self.actions.append(action)
        self.clock.apply(action)

    def _drop(self, s: int, tier: MemoryTier) -> None:
        del self.current[s][tier]
        self.live[tier] -= self._sizes[s]
        if tier == "dram":
            self.buffers.give(self._sizes[s])
