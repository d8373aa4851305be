"""State during emission: the actions so far, their simulated time, valid copies of each storage, and copies in flight.

A storage may have valid copies in several tiers. The action `detach` releases the copy in one tier, `free` all copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.ir import MemoryAction, MemoryActionKind, MemoryProgram, MemoryTier, Residency, slab_bytes
from hyper_parallel.memory.copy_issue import Gap, OutgoingCopy, ReloadQueue
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.timeline import ProgramClock


class EmissionLedger(Residency):
    """Actions emitted so far, with the simulated clock and the residency of storages after them.

    `reserved` maps a size in bytes to the number of DRAM buffers reserved for that size.

    Attributes:
        clock: Clock after the actions.
        actions: Emitted actions.
    """

    def __init__(
        self, program: MemoryProgram, machine: MemoryMachine, reserved: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(program, reserved)
        self._dram_capacity = machine.dram_bytes
        self.clock = ProgramClock(program, machine)
        self.actions: list[MemoryAction] = []

    def fits_dram(self, s: int) -> bool:
        """Return whether DRAM holds storage `s` or has a free buffer for it."""
        return "dram" in self.valid[s] or self.has_dram_buffer(self._sizes[s])

    def has_dram_buffer(self, num_bytes: int) -> bool:
        """Return whether DRAM has, or can still allocate, a free buffer of `num_bytes` bytes."""
        capacity = self._dram_capacity
        return capacity is None or self.buffers.fits(num_bytes, capacity)

    @property
    def dram_bytes(self) -> int:
        """Bytes of the host slabs from which the DRAM buffers are cut."""
        return slab_bytes(self.buffers.most)

    def emit(self, kind: MemoryActionKind, target: int, tier: MemoryTier = "device") -> None:
        """Append an action on `target` (operator or storage index), and update the residency and the clock."""
        action = MemoryAction(kind, target, tier)
        self.actions.append(action)
        self.apply(action)
        self.clock.apply(action)


class InFlightCopies:
    """Copies that were issued and not yet waited for.

    A storage with a gap in `gaps` that begins before the step has the tier of this gap as home tier; the home tier of
    other storages is `device`. `writes` has the positions that write each storage. The queue `reloads` is notified when
    an outgoing copy has ended.

    Attributes:
        position: Position whose actions are being emitted.
        homes: Home tier of every storage: the tier that holds it between steps.
        outgoing: Copies out of the device or out of DRAM.
        incoming: Copies towards the device, as (storage, destination tier).
        stored_early: Storages that were copied to DRAM before their eviction; the copy is kept until the eviction.
    """

    def __init__(
        self,
        program: MemoryProgram,
        ledger: EmissionLedger,
        gaps: Sequence[Gap],
        writes: Sequence[Sequence[int]],
        reloads: ReloadQueue,
    ) -> None:
        self._program, self._ledger = program, ledger
        self._writes, self._reloads = writes, reloads
        self.position = 0
        self.homes: list[MemoryTier] = ["device"] * len(program.storages)
        self._evictions_of: dict[int, list[int]] = {}
        for gap in gaps:
            self._evictions_of.setdefault(gap.storage, []).append(gap.first)
            if gap.first < 0:
                self.homes[gap.storage] = gap.tier
        self.outgoing: list[OutgoingCopy] = []
        self.incoming: dict[tuple[int, str], None] = {}
        self.stored_early: set[int] = set()

    def finish(self, item: OutgoingCopy) -> None:
        """Wait for an outgoing copy, if it is in flight; if `item.detaches`, release the source of the copy.

        Otherwise, release the copy in DRAM if nothing needs it any more.
        """
        s = item.storage
        if item not in self.outgoing:
            return
        if item.destination == "flash":
            for store in [p for p in self.outgoing if p.storage == s and p.destination == "dram"]:
                self.finish(store)
        self.outgoing.remove(item)
        self._reloads.copy_ended(s, self.position)
        self._ledger.emit("wait", s, item.destination)
        if item.detaches:
            self._ledger.emit("detach", s, "device" if item.destination == "dram" else "dram")
        elif item.destination == "dram" and not (
            s in self.stored_early
            or self.homes[s] == "dram"
            or any(p.storage == s and p.destination == "flash" for p in self.outgoing)
        ):
            self._ledger.emit("detach", s, "dram")

    def retain(self, s: int) -> None:
        """Wait for the outgoing copies of a storage, without releasing the sources of these copies."""
        for item in [p for p in self.outgoing if p.storage == s]:
            item.detaches = False
            self.finish(item)

    def evict(self, gap: Gap) -> None:
        """Evict a storage to `gap.tier`; copy nothing if the content is in that tier or in flight to it."""
        s = gap.storage
        self.stored_early.discard(s)
        tiers = self._ledger.valid[s]
        # The copy of an earlier eviction may still run. Its content is current: a write would have waited for it.
        running_copies = {p.destination: p for p in self.outgoing if p.storage == s}
        if gap.tier == "flash" and tiers.get("flash") and "flash" not in running_copies:
            self.retain(s)
            self._ledger.emit("detach", s, "device")
            if "dram" in tiers:
                self._ledger.emit("detach", s, "dram")
            return
        if "dram" in running_copies:
            running_copies["dram"].detaches = True
        elif tiers.get("dram"):
            self._ledger.emit("detach", s, "device")
        else:
            self.make_dram_room(s)
            self.store(s, detaches=True)
        if gap.tier == "flash":
            if "flash" in running_copies:
                running_copies["flash"].detaches = True
            else:
                self._ledger.emit("copy_out", s)
                self.outgoing.append(OutgoingCopy(s, "flash", True))

    def store(self, s: int, *, detaches: bool) -> None:
        """Start the copy of a storage to DRAM. If `detaches`, its device bytes are released when the copy ends."""
        self._ledger.emit("store", s)
        self.outgoing.append(OutgoingCopy(s, "dram", detaches))

    def copy_in(self, s: int) -> None:
        """Start the copy of a storage from flash to DRAM."""
        self.make_dram_room(s)
        self._ledger.emit("copy_in", s)
        self.incoming[s, "dram"] = None

    def await_arrival(self, s: int) -> None:
        """Wait for the copy of a storage to the device, if in flight, and release host copies that are not needed.

        A host copy is needed in the home tier, or if the next eviction can use it because the content stays unchanged.
        """
        if (s, "device") not in self.incoming:
            return
        arrivals: tuple[MemoryTier, ...] = ("dram", "device")
        for tier in arrivals:
            if (s, tier) in self.incoming:
                del self.incoming[s, tier]
                self._ledger.emit("wait", s, tier)
        later = [p for p in self._evictions_of.get(s, ()) if p >= self.position]
        clean = later and not any(self.position <= w <= later[0] for w in self._writes[s])
        host_tiers: tuple[MemoryTier, ...] = () if clean else ("dram", "flash")
        for tier in host_tiers:
            if tier in self._ledger.valid[s] and tier != self.homes[s]:
                self._ledger.emit("detach", s, tier)

    def make_dram_room(self, s: int) -> None:
        """Wait for copies until DRAM has a free buffer for storage `s`, or no copy in flight can free such a buffer."""
        sizes = self._program.sizes
        while not self._ledger.fits_dram(s):
            running_copies = (p for p in self.outgoing if p.detaches and p.destination == "flash" and p.storage != s)
            item = next((p for p in running_copies if sizes[p.storage] == sizes[s]), None)
            if item is not None:
                self.finish(item)
                continue
            incoming = (x for x, destination in self.incoming if destination == "device" and sizes[x] == sizes[s])
            transit = next((x for x in incoming if self.homes[x] != "dram" and x != s), None)
            if transit is None:
                return
            self.await_arrival(transit)

    def release(self, s: int) -> None:
        """Free a storage in every tier, after waiting for its outgoing copies."""
        self.retain(s)
        self._ledger.emit("free", s)
