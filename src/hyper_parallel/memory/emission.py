"""Emission: turn chosen gaps into an executable program.

A forward walk over the order with the simulator's own clock. A store is issued right after the last use, or before it
when its content is final and the lane stands idle; its device bytes are detached at the first operator boundary at
which the copy is done, earlier (by waiting) when the budget needs them. A prefetch is issued as late as its serial
channel allows, computed backwards from the deadlines.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryActionKind, MemoryProgram, MemoryTier
from hyper_parallel.memory._comms import CommsInFlight
from hyper_parallel.memory._emission_ledger import EmissionLedger
from hyper_parallel.memory._in_flight import InFlightCopies
from hyper_parallel.memory.copy_issue import Gap, early_stores, issue_positions
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes
from hyper_parallel.memory.reload_queue import ReloadQueue


class Emitter:
    """One emission; `emit` gives the actions, `ledger` what they take.

    Attributes:
        held: Device bytes while each position runs.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: Sequence[int],
        gaps: Sequence[Gap],
        recomputes: Recomputes,
        budget_bytes: int | None,
        planned: np.ndarray | None = None,
        pauses_s: np.ndarray | None = None,
        on_demand: bool = False,
    ) -> None:
        self.program, self.recomputes, self.order = program, recomputes, order
        gaps = [*recomputes.host.gaps, *gaps]
        self.planned = np.zeros(0, np.int64) if planned is None else planned
        self.budget = budget_bytes
        self.held: list[int] = []
        self._waited_s: list[float] = []  # before each position
        seconds = recomputes.host.seconds(program, order)
        starts = np.cumsum([0.0, *seconds])[:-1]
        paused = starts if pauses_s is None else starts + np.cumsum(pauses_s)
        due = issue_positions(gaps, paused, program, machine, recomputes.host.ready)
        self.reloads = ReloadQueue(() if on_demand else due)
        # Buffers of other sizes do not help what is on its way to or from flash.
        passing = {program.sizes[g.storage]: 1 for g in gaps if g.tier == "flash"}
        self.ledger = EmissionLedger(program, machine, passing)
        self.copies = InFlightCopies(program, self.ledger, recomputes, gaps, self.reloads)
        self.copies.arrived = lambda s: self._arrive(s, self.copies.place)
        self.comms = CommsInFlight(program)
        self.tiers = 1 if machine.copy_out is None else 2  # that something may leave for
        for s, storage in enumerate(program.storages):
            if storage.at_start:
                self.ledger.take(s, self.copies.homes[s])
        self.leave = {(g.storage, g.first): g for g in gaps if g.first >= 0}
        self.leaves_of: dict[int, list[int]] = {}
        for g in gaps:
            self.leaves_of.setdefault(g.storage, []).append(g.first)
        self.ends = self._ends()
        recomputed_s = np.zeros(len(starts))
        for position, extra in recomputes.least_s(program).items():
            recomputed_s[position] = extra
        # At least so long from the start of a position to that of the last one.
        left = np.cumsum((recomputed_s + np.diff(starts, append=starts[-1:]))[::-1])[::-1]
        self.left_s: list[float] = left.tolist()
        self.due: dict[int, int] = {}  # next use of what still leaves when its reload is due
        written = recomputes.host.device_writes(program, order)
        self.writes = [written.get(s, []) for s in range(len(program.storages))]
        self.early = early_stores(gaps, program, len(order), recomputes, self.writes)

    @property
    def waited_s(self) -> np.ndarray:
        """Seconds that computing waited for copies at every position, and at the end."""
        return np.diff([*self._waited_s, self.ledger.clock.wait_s])

    def _ends(self) -> list[set[int]]:
        """Per position, what leaves or is over once the operator there is done."""
        ends: list[set[int]] = [set() for _ in self.order]
        for s, position in self.leave:
            ends[position].add(s)
        for s, (position, _) in self.recomputes.gaps.items():
            ends[position].add(s)
        for s, uses in enumerate(self.recomputes.uses):
            if uses and not self.program.storages[s].at_end:
                ends[uses[-1]].add(s)
        return ends

    def emit(self, limit_s: float = float("inf")) -> tuple[MemoryAction, ...] | None:
        """The whole program, or None as soon as it must take longer than the limit."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_start and not storage.at_end and not self.recomputes.uses[s]:
                self.copies.release(s)
        ready = list[Gap]()
        for position, index in enumerate(self.order):
            self.copies.place = position
            self._waited_s.append(self.ledger.clock.wait_s)
            if self.ledger.clock.now_s + self.left_s[position] > limit_s:
                return None
            self._retire(position)
            for number, gap, kind in self.reloads.at(
                position, self._free_bytes, self.ledger.has_dram
            ):
                self._reload(number, gap, kind, position)
            if index in self.recomputes.host.operators:
                for running in self.comms.before(self.program.operators[index]):
                    self._join(running, position)
                self.copies.update(index)
                self.held.append(self.ledger.live["device"])
            else:
                self._operator(position, index)
            for gap in self.early[position]:
                insort(ready, gap, key=lambda g: (g.first, -self.program.sizes[g.storage]))
            if ready:
                ready = self._store_early(ready, position)
        self.copies.place = len(self.order)
        self._waited_s.append(self.ledger.clock.wait_s)
        for running in (*self.comms.running, *self.copies.updates.running):
            self._join(running, len(self.order))
        while self.copies.leaving:
            self.copies.finish(self.copies.leaving[0])
        self._clear()
        return tuple(self.ledger.actions)

    def _clear(self) -> None:
        """Drop the copies of what stays, which a leave that was called off may have left in another tier."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_end and self.copies.homes[s] in self.ledger.current[s]:
                for tier in [t for t in self.ledger.current[s] if t != self.copies.homes[s]]:
                    self.ledger.detach(s, tier)

    # -- one operator --------------------------------------------------------------------------

    def _operator(self, position: int, index: int) -> None:
        ledger, copies = self.ledger, self.copies
        operators, current, sizes = self.program.operators, ledger.current, self.program.sizes
        op = operators[index]
        meant = self.recomputes.rerun.get(position, ())
        rerun = [i for i in meant if any("device" not in current[s] for s in operators[i].allocs)]
        touched, wanted = self.program.touched[index], self.program.operands[index]
        remade = [s for i in rerun for s in operators[i].allocs]
        if rerun:
            read = dict.fromkeys((*wanted, *(s for i in rerun for s in operators[i].reads)))
            wanted = tuple(s for s in read if s not in remade and s not in op.allocs)
            touched = tuple(dict.fromkeys((*touched, *wanted, *remade)))
        if self.comms:
            for s in wanted:
                self.comms.keep(s)  # else it would go where other ranks are waited for
            for running in self.comms.before(op, wanted, remade):
                self._join(running, position)
        if self.budget is not None:
            need = sum([sizes[s] for s in touched if "device" not in current[s]])
            if ledger.live["device"] + need > self.budget:
                self._free_up(need, set(touched), position)
        for s in wanted:
            if copies.leaving or self.comms or "device" not in current[s]:
                self._bring(s)
        # What was to be read is waited for: its bytes may go now.
        spared = [s for i in meant if i not in rerun for s in operators[i].reads]
        if copies.arriving:
            for s in (*wanted, *spared):
                self._arrive(s, position)
        for s in op.writes if copies.leaving else ():
            for item in [p for p in copies.leaving if p.storage == s]:
                copies.finish(item)
        for i in rerun:
            for s in operators[i].allocs:
                if "device" in current[s]:  # other ranks used it until now
                    ledger.detach(s, "device")
                ledger.take(s, "device")
            ledger.emit("recompute", i)
        for h in self.recomputes.helpers.get(position, ()):
            if h in op.touched or "device" not in current[h] or self._used_at(h, position):
                continue
            if not self.comms.hold(h, position):
                ledger.detach(h, "device")
        for s in op.allocs:
            ledger.take(s, "device")
        for s in op.writes:
            for tier in current[s]:
                current[s][tier] = tier == "device"
        self.held.append(ledger.live["device"])
        ledger.emit("run", index)
        if op.group:
            self.comms.begin(index)
        ends = self.ends[position]
        for s in dict.fromkeys((*touched, *spared)) if spared else touched:
            if (s in ends or rerun) and "device" in current[s]:
                self._after(s, position, position)

    def _join(self, index: int, position: int) -> None:
        """Wait for other ranks or the host before a position; then happens what was postponed until now."""
        if index in self.copies.updates.running:
            self.copies.end_update(index)
        elif index in self.comms.running:  # else it ended with another one, for room
            self.ledger.emit("join", index)
            for s, since in self.comms.end(index):
                self._after(s, since, position)

    def _used_at(self, s: int, position: int) -> bool:
        uses = self.recomputes.uses[s]
        at = bisect_right(uses, position)
        return at > 0 and uses[at - 1] == position

    def _after(self, s: int, position: int, now: int) -> None:
        """What happens to a storage once the operator at a position is done with it, which may be later."""
        uses = self.recomputes.uses[s]
        gap = self.leave.get((s, position))
        dropped = s in self.recomputes.gaps and self.recomputes.gaps[s][0] == position
        over = uses[-1] <= position and not self.program.storages[s].at_end
        if not (gap or dropped or over) or (self.comms and self.comms.hold(s, position)):
            return
        if gap is not None:
            if now < gap.last or gap.last == len(self.order):
                self.copies.depart(gap)
        elif dropped:
            if now < self.recomputes.gaps[s][1]:
                for item in [p for p in self.copies.leaving if p.storage == s]:
                    item.leaves = False  # of an earlier leave, which was called off
                    self.copies.finish(item)
                self.ledger.detach(s, "device")
        elif s in self.copies.updates:
            self.copies.depart(Gap(s, position, len(self.order), "dram"))
        else:
            self.copies.release(s)

    # -- leaving and coming back ---------------------------------------------------------------

    def _store_early(self, ready: list[Gap], position: int) -> list[Gap]:
        """Use a store lane that stands idle for what leaves next; the rest of the list."""
        left: list[Gap] = []
        for at, gap in enumerate(ready):
            if not self.ledger.clock.idle("store"):
                return [*left, *ready[at:]] if at else ready
            s = gap.storage
            held = self.ledger.current[s]
            if gap.first <= position or "device" not in held or held.get("dram"):
                continue
            busy = (s, "device") in self.copies.arriving or self.comms.fills(s)
            if busy or not self.ledger.dram_fits(s):
                left.append(gap)
                continue
            self.copies.store(s, leaves=False)
            self.copies.ahead.add(s)
        return left

    def _retire(self, position: int) -> None:
        """Detach what has been copied by now, and what other ranks or the host are done with."""
        if self.comms or self.copies.updates.running:
            for index in (*self.comms.holding(), *self.copies.updates.running):
                if self.ledger.clock.done_s(index) <= self.ledger.clock.now_s:
                    self._join(index, position)
        if not self.copies.leaving:
            return
        late = set[MemoryTier]()
        for item in list(self.copies.leaving):
            if self.ledger.clock.arrival_s(item.storage, item.into) <= self.ledger.clock.now_s:
                if item.leaves and item.into == "dram" and item.storage in self.due:
                    last = self.due[item.storage]
                    item.leaves = self._full_until(item.storage, position, last) is not None
                self.copies.finish(item)
            elif (
                not self.recomputes.host.operators
            ):  # else content may be newer than the copy of it
                late.add(item.into)
                if len(late) == self.tiers:
                    return  # a lane ends its copies in order

    def _reload(self, number: int, gap: Gap, kind: MemoryActionKind, position: int) -> None:
        """Issue a planned reload, or try it again later for lack of room."""
        s = gap.storage
        self.due.pop(s, None)
        if position > gap.last:
            return
        if self.comms and self.comms.keep(s):
            return  # other ranks still use it: its leave is called off
        early = position < gap.last
        if "device" in self.ledger.current[s]:
            going = [p for p in self.copies.leaving if p.storage == s and p.leaves]
            if going and self.budget is not None and early:
                # It has not left yet. If the budget needs the room it still goes, else its leave is called off.
                self.due[s] = gap.last
                self.reloads.for_copy(number, s)
                return
            for item in going:
                item.leaves = False
        elif kind == "copy_in":
            if "dram" in self.ledger.current[s]:
                return
            if early and not self.ledger.dram_fits(s):
                self.reloads.for_dram(number, self.program.sizes[s])
                return
            self.copies.copy_in(s)
        elif not early and self.budget is not None and self.program.sizes[s] > self._free_bytes():
            return  # the operator brings it once there is room
        elif early and not self._may_come_early(number, gap, position):
            return
        elif early and any(
            self.ledger.clock.done_s(i) > self.ledger.clock.now_s
            for i in self.copies.updates.using(s)
        ):
            self.reloads.until(number, position + 1)  # the copies behind it need not stand in line
        else:
            self._bring(s)

    def _free_bytes(self) -> int:
        """Bytes that may still be taken on the device."""
        return 0 if self.budget is None else self.budget - self.ledger.live["device"]

    def _may_come_early(self, number: int, gap: Gap, position: int) -> bool:
        """An early reload must not take bytes that an operator before its use needs; else it waits for them."""
        if self.budget is None:
            return True
        size = self.program.sizes[gap.storage]
        if self.ledger.live["device"] + size > self.budget:
            self.reloads.for_bytes(number, size)
            return False
        full = self._full_until(gap.storage, position, gap.last)
        if full is not None:  # what is planned only grows
            self.reloads.until(number, full)
        return full is None

    def _full_until(self, s: int, position: int, last: int) -> int | None:
        """Where there is room for a storage up to its use; None: from now on, and it is planned for."""
        assert self.budget is not None
        ahead, size = self.planned[position:last], self.program.sizes[s]
        over = np.flatnonzero(ahead + size > self.budget)
        if len(over):
            return position + int(over[-1]) + 1
        ahead += size  # the next early reload sees this one
        return None

    def _bring(self, s: int) -> None:
        """Start the copy to the device unless the bytes are there or on their way."""
        held = self.ledger.current[s]
        if "device" in held:
            if self.comms:
                self.comms.keep(s)
            for item in self.copies.leaving:
                if item.storage == s:
                    item.leaves = False
            return
        for item in [p for p in self.copies.leaving if p.storage == s]:
            item.leaves = False
            self.copies.finish(item)
        if not held.get("dram"):
            self.copies.copy_in(s)
        self.ledger.take(s, "device")
        self.ledger.emit("prefetch", s)
        self.copies.arriving[s, "device"] = None

    def _arrive(self, s: int, position: int) -> None:
        """Wait for the copy to the device, then drop host copies that nothing will use."""
        if (s, "device") not in self.copies.arriving:
            return
        for tier in ("dram", "device"):
            if (s, tier) in self.copies.arriving:
                del self.copies.arriving[s, tier]
                self.ledger.emit("wait", s, "dram" if tier == "dram" else "device")
        later = [p for p in self.leaves_of.get(s, ()) if p >= position]
        clean = later and not any(position <= w <= later[0] for w in self.writes[s])
        home = self.copies.homes[s]
        if (
            "dram" in self.ledger.current[s]
            and home != "dram"
            and not clean
            and s not in self.copies.updates
        ):
            self.ledger.detach(s, "dram")
        if "flash" in self.ledger.current[s] and home != "flash" and not clean:
            self.ledger.detach(s, "flash")

    def _free_up(self, need: int, keep: set[int], position: int) -> None:
        """Wait for running stores and other ranks until `need` more bytes fit under the budget."""
        if self.budget is None:
            return
        while self.ledger.live["device"] + need > self.budget:
            going = (p for p in self.copies.leaving if p.leaves and p.into == "dram")
            item = next((p for p in going if p.storage not in keep), None)
            other = next(iter(self.comms.holding()), None)
            if other is not None and (
                item is None
                or self.ledger.clock.done_s(other)
                <= self.ledger.clock.arrival_s(item.storage, "dram")
            ):
                self._join(other, position)
            elif item is None:
                return
            else:
                self.copies.finish(item)
