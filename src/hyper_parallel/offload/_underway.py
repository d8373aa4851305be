"""What goes on beside the compute lane while a program is emitted: copies out of a tier, updates in host memory."""

from __future__ import annotations

from hyper_parallel.ir import MemoryProgram, MemoryTier
from hyper_parallel.offload._host import Updating
from hyper_parallel.offload._issue import Pending
from hyper_parallel.offload._ledger import Ledger
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._recompute import Recomputes
from hyper_parallel.offload._waiting import Waiting


class Underway(Ledger):
    """What was begun and not waited for.

    Attributes:
        again: What does not run on the device, or twice; and the accesses there.
        host: Operators in host memory.
        place: Position that is being emitted.
        homes: Where every storage is between steps.
        held: Device bytes while each position runs.
        pending: Copies out of the device or out of DRAM.
        flying: Copies towards the device.
        waiting: Copies towards the device that were to begin, but for which there was no room.
        ahead: Stored before they leave: the copy stays until then.
    """

    def __init__(
        self, program: MemoryProgram, machine: MemoryMachine, recomputes: Recomputes
    ) -> None:
        super().__init__(program, machine)
        self.again = recomputes
        self.host = Updating(program, recomputes.host)
        self.place = 0
        self.homes: list[MemoryTier] = ["device"] * len(program.storages)
        self.held: list[int] = []
        self.pending: list[Pending] = []
        self.flying: dict[tuple[int, str], None] = {}
        self.waiting = Waiting(())
        self.ahead: set[int] = set()

    def _update(self, index: int) -> None:
        """Begin an operator in host memory, behind the copies of what it reads."""
        op = self.program.operators[index]
        for s in op.touched:
            held = self.current[s]
            if not held.get("dram"):
                for running in self.host.using(s) if "dram" in held else ():
                    self._end_update(running)
                self._make_dram_room(s)
                self._set(s, "dram")
                self._do("store", s)
                self.pending.append(Pending(s, "dram", False))
            if s in self.again.host.at_home:
                for item in [p for p in self.pending if p.storage == s and p.into != "dram"]:
                    self._finish(item)
                for tier in [t for t in held if t != "dram"]:
                    self._detach(s, tier)
        self.held.append(self.live["device"])
        self._do("update", index)
        self.host.begin(index)

    def _end_update(self, index: int) -> None:
        """Wait for an operator in host memory; what only it needed is dropped there."""
        self._do("join", index)
        for s in self.host.end(index):
            uses = self.again.uses[s]
            if not self.program.storages[s].at_end and (not uses or uses[-1] < self.place):
                self._release(s)
            elif "device" in self.current[s] and self.homes[s] != "dram" and s not in self.ahead:
                for item in [p for p in self.pending if p.storage == s and p.into == "dram"]:
                    self._finish(item)
                if "dram" in self.current[s]:
                    self._detach(s, "dram")

    def _finish(self, item: Pending) -> None:
        """Wait for a copy and give its source's bytes back."""
        s = item.storage
        if item not in self.pending:
            return
        if item.into == "flash":
            for other in [p for p in self.pending if p.storage == s and p.into == "dram"]:
                self._finish(other)
        self.pending.remove(item)
        self.waiting.ended(s, self.place)
        self._do("wait", s, item.into)
        if item.leaves:
            self._detach(s, "device" if item.into == "dram" else "dram")
        elif item.into == "dram" and not (
            s in self.ahead or s in self.host or self.homes[s] == "dram" or self._going(s, "flash")
        ):
            self._detach(s, "dram")

    def _going(self, s: int, into: str) -> bool:
        return any(p.storage == s and p.into == into for p in self.pending)

    def _copy_in(self, s: int) -> None:
        self._make_dram_room(s)
        self._set(s, "dram")
        self._do("copy_in", s)
        self.flying[s, "dram"] = None

    def _make_dram_room(self, s: int) -> None:
        """Wait for updates, then for bytes on their way to flash, until a storage fits into DRAM, if it does.

        Only what has its size makes room for it.
        """
        sizes, touched = self.program.sizes, self.program.touched
        while not self._dram_fits(s):
            if any(sizes[x] == sizes[s] for i in self.host.running for x in touched[i]):
                self._end_update(self.host.running[0])
                continue
            going = (p for p in self.pending if p.leaves and p.into == "flash" and p.storage != s)
            item = next((p for p in going if sizes[p.storage] == sizes[s]), None)
            if item is None:
                return
            self._finish(item)

    def _release(self, s: int) -> None:
        for item in [p for p in self.pending if p.storage == s]:
            item.leaves = False
            self._finish(item)
        self._free(s)
