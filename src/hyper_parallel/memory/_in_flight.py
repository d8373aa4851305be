"""Copies that were begun and not waited for while a program is emitted, and updates in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_parallel.ir import MemoryProgram, MemoryTier
from hyper_parallel.memory._emission_ledger import EmissionLedger
from hyper_parallel.memory.copy_issue import Gap, Pending
from hyper_parallel.memory.host_updates import UpdatesInFlight
from hyper_parallel.memory.recompute import Recomputes
from hyper_parallel.memory.reload_queue import ReloadQueue


class InFlightCopies:
    """What was begun and not waited for.

    Args:
        program: Storages and operators.
        ledger: Where actions are written down.
        recomputes: What does not run on the device, or twice; and the accesses there.
        gaps: What is away when; those that begin the step give the homes.
        reloads: Told when a copy that a reload stands behind has ended.

    Attributes:
        updates: Operators in host memory.
        place: Position that is being emitted.
        homes: Where every storage is between steps.
        leaving: Copies out of the device or out of DRAM.
        arriving: Copies towards the device.
        ahead: Stored before they leave: the copy stays until then.
        arrived: Waits for a copy to the device, and drops what nothing will use in host memory.
    """

    arrived: Callable[[int], None]

    def __init__(
        self,
        program: MemoryProgram,
        ledger: EmissionLedger,
        recomputes: Recomputes,
        gaps: Sequence[Gap],
        reloads: ReloadQueue,
    ) -> None:
        self._program, self._ledger, self._recomputes = program, ledger, recomputes
        self._reloads = reloads
        self.updates = UpdatesInFlight(program, recomputes.host)
        self.place = 0
        self.homes: list[MemoryTier] = ["device"] * len(program.storages)
        for gap in gaps:
            if gap.first < 0:
                self.homes[gap.storage] = gap.tier
        self.leaving: list[Pending] = []
        self.arriving: dict[tuple[int, str], None] = {}
        self.ahead: set[int] = set()

    def update(self, index: int) -> None:
        """Begin an operator in host memory, behind the copies of what it reads."""
        op = self._program.operators[index]
        for s in op.touched:
            held = self._ledger.current[s]
            if not held.get("dram"):
                for running in self.updates.using(s) if "dram" in held else ():
                    self.end_update(running)
                self.free_dram(s)
                self.store(s, leaves=False)
            if s in self._recomputes.host.at_home:
                for item in [p for p in self.leaving if p.storage == s and p.into != "dram"]:
                    self.finish(item)
                for tier in [t for t in held if t != "dram"]:
                    self._ledger.detach(s, tier)
        self._ledger.emit("update", index)
        self.updates.begin(index)

    def end_update(self, index: int) -> None:
        """Wait for an operator in host memory; what only it needed is dropped there."""
        self._ledger.emit("join", index)
        for s in self.updates.end(index):
            uses = self._recomputes.uses[s]
            if not self._program.storages[s].at_end and (not uses or uses[-1] < self.place):
                self.release(s)
            elif (
                "device" in self._ledger.current[s]
                and self.homes[s] != "dram"
                and s not in self.ahead
            ):
                for item in [p for p in self.leaving if p.storage == s and p.into == "dram"]:
                    self.finish(item)
                if "dram" in self._ledger.current[s]:
                    self._ledger.detach(s, "dram")

    def finish(self, item: Pending) -> None:
        """Wait for a copy and give its source's bytes back."""
        s = item.storage
        if item not in self.leaving:
            return
        if item.into == "flash":
            for other in [p for p in self.leaving if p.storage == s and p.into == "dram"]:
                self.finish(other)
        self.leaving.remove(item)
        self._reloads.ended(s, self.place)
        self._ledger.emit("wait", s, item.into)
        if item.leaves:
            self._ledger.detach(s, "device" if item.into == "dram" else "dram")
        elif item.into == "dram" and not (
            s in self.ahead
            or s in self.updates
            or self.homes[s] == "dram"
            or self._is_leaving(s, "flash")
        ):
            self._ledger.detach(s, "dram")

    def _is_leaving(self, s: int, into: str) -> bool:
        return any(p.storage == s and p.into == into for p in self.leaving)

    def depart(self, gap: Gap) -> None:
        """A storage leaves for the tier of its gap: by copy, unless its content is there or on the way."""
        s = gap.storage
        self.ahead.discard(s)
        held = self._ledger.current[s]
        # A copy of an earlier leave may still run: it carries the same content (a write would have waited for it).
        going = {p.into: p for p in self.leaving if p.storage == s}
        if gap.tier == "flash" and held.get("flash") and "flash" not in going:
            for item in going.values():
                item.leaves = False
                self.finish(item)
            self._ledger.detach(s, "device")
            if "dram" in held:
                self._ledger.detach(s, "dram")
            return
        if "dram" in going:
            going["dram"].leaves = True
        elif held.get("dram"):
            self._ledger.detach(s, "device")
        else:
            self.free_dram(s)
            self.store(s, leaves=True)
        if gap.tier == "flash":
            if "flash" in going:
                going["flash"].leaves = True
            else:
                self._ledger.take(s, "flash")
                self._ledger.emit("copy_out", s)
                self.leaving.append(Pending(s, "flash", True))

    def store(self, s: int, *, leaves: bool) -> None:
        """Begin the copy of a storage to DRAM."""
        self._ledger.take(s, "dram")
        self._ledger.emit("store", s)
        self.leaving.append(Pending(s, "dram", leaves))

    def copy_in(self, s: int) -> None:
        """Begin the copy from flash to DRAM."""
        self.free_dram(s)
        self._ledger.take(s, "dram")
        self._ledger.emit("copy_in", s)
        self.arriving[s, "dram"] = None

    def free_dram(self, s: int) -> None:
        """Wait for updates, then for bytes on their way to flash, until a storage fits into DRAM, if it does.

        Only what has its size makes room for it.
        """
        sizes, touched = self._program.sizes, self._program.touched
        while not self._ledger.dram_fits(s):
            if any(sizes[x] == sizes[s] for i in self.updates.running for x in touched[i]):
                self.end_update(self.updates.running[0])
                continue
            going = (p for p in self.leaving if p.leaves and p.into == "flash" and p.storage != s)
            item = next((p for p in going if sizes[p.storage] == sizes[s]), None)
            if item is not None:
                self.finish(item)
                continue
            come = (x for x, into in self.arriving if into == "device" and sizes[x] == sizes[s])
            passed = next((x for x in come if self.homes[x] != "dram" and x != s), None)
            if passed is None:
                return
            self.arrived(passed)

    def release(self, s: int) -> None:
        """Free a storage, behind its running copies."""
        for item in [p for p in self.leaving if p.storage == s]:
            item.leaves = False
            self.finish(item)
        self._ledger.free(s)
