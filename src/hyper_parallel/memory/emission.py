"""Emission: conversion of a residency choice (gaps, recomputation) into an executable list of actions.

A position is an index in the order of the operators. A gap is a range of positions during which a storage is off the
device. A store copies a storage from the device to DRAM, a prefetch copies it back.

Emission walks forward over the order with a simulated clock. A store is issued right after the last use before the gap,
or earlier if the content is final and no other store runs. The device bytes are released at the first operator boundary
after the copy, or earlier, by waiting for the copy, if the budget needs these bytes. A prefetch is issued as late as
possible, computed backwards from the deadlines with all prefetches in series.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryActionKind, MemoryTier
from hyper_parallel.memory._in_flight import EmissionLedger, InFlightCopies
from hyper_parallel.memory.candidates import OffloadCandidates
from hyper_parallel.memory.copy_issue import Gap, ReloadQueue, issue_positions
from hyper_parallel.memory.def_use import CommsInFlight


class Emitter:
    """Emitter of one program: `emit` returns the actions, `ledger` has their bytes and simulated time.

    Args:
        candidates: Program, machine, order and recomputation.
        gaps: Gaps of the evicted storages.
        budget_bytes: Target in device bytes. An operator that would exceed it first waits for stores and collectives in
            flight that free memory; an early reload is delayed. None: no limit.
        planned: Expected device bytes at every position; emission adds the bytes of early reloads in place.
        pauses_s: Expected seconds of waiting at every position; None: no waits.
    """

    def __init__(
        self,
        candidates: OffloadCandidates,
        gaps: Sequence[Gap],
        budget_bytes: int | None,
        planned: np.ndarray,
        pauses_s: np.ndarray | None = None,
    ) -> None:
        program, machine, recomputes = candidates.program, candidates.machine, candidates.recomputes
        self.program, self.recomputes, self.order = program, recomputes, candidates.order
        self.planned, self.budget = planned, budget_bytes
        self._waited_s: list[float] = []  # total wait before each position
        starts = np.cumsum([0.0, *candidates.seconds])[:-1]
        paused = starts if pauses_s is None else starts + np.cumsum(pauses_s)
        self.reloads = ReloadQueue(issue_positions(gaps, paused, program, machine))
        # Copies to and from flash pass through a buffer of exactly their size.
        passing = {program.sizes[g.storage]: 1 for g in gaps if g.tier == "flash"}
        self.ledger = EmissionLedger(program, machine, passing)
        self.copies = InFlightCopies(program, self.ledger, gaps, candidates.writes, self.reloads)
        self.comms = CommsInFlight(program)
        # Number of tiers that a storage may be evicted to.
        self.num_host_tiers = 1 if machine.copy_out is None else 2
        for s, storage in enumerate(program.storages):
            if storage.at_start:
                self.ledger.allocate(s, self.copies.homes[s])
        self.evictions = {(g.storage, g.first): g for g in gaps if g.first >= 0}
        self.ends = self._ends()
        recomputed_s = np.zeros(len(starts))
        for position, extra in recomputes.added_seconds(program).items():
            recomputed_s[position] = extra
        # Lower bound of the seconds from the start of a position to the start of the last one.
        remaining_s = np.cumsum((recomputed_s + np.diff(starts, append=starts[-1:]))[::-1])[::-1]
        self.remaining_s: list[float] = remaining_s.tolist()
        # Next use of storages whose eviction is still in flight when their reload is due.
        self.late_reloads: dict[int, int] = {}
        self.early = candidates.early_stores(gaps)

    @property
    def waited_s(self) -> np.ndarray:
        """Seconds that the device waited for copies at every position, and at the end of the step."""
        return np.diff([*self._waited_s, self.ledger.clock.wait_s])

    def _ends(self) -> list[set[int]]:
        """Return, per position, the storages to evict, drop or release after its operator."""
        ends: list[set[int]] = [set() for _ in self.order]
        for s, position in self.evictions:
            ends[position].add(s)
        for s, (position, _) in self.recomputes.gaps.items():
            ends[position].add(s)
        for s, uses in enumerate(self.recomputes.uses):
            if uses and not self.program.storages[s].at_end:
                ends[uses[-1]].add(s)
        return ends

    def emit(self, limit_s: float = float("inf")) -> tuple[MemoryAction, ...] | None:
        """Return the actions of the whole program, or None once it is certain to take longer than `limit_s`."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_start and not storage.at_end and not self.recomputes.uses[s]:
                self.copies.release(s)
        ready = list[Gap]()
        for position, index in enumerate(self.order):
            self.copies.position = position
            self._waited_s.append(self.ledger.clock.wait_s)
            if self.ledger.clock.now_s + self.remaining_s[position] > limit_s:
                return None
            self._retire_copies(position)
            for number, gap, kind in self.reloads.due(position, self._free_bytes, self.ledger.has_dram_buffer):
                self._reload(number, gap, kind, position)
            self._operator(position, index)
            for gap in self.early[position]:
                insort(ready, gap, key=lambda g: (g.first, -self.program.sizes[g.storage]))
            if ready:
                ready = self._store_early(ready, position)
        self.copies.position = len(self.order)
        self._waited_s.append(self.ledger.clock.wait_s)
        for running in self.comms.running:
            self._join(running, len(self.order))
        while self.copies.outgoing:
            self.copies.finish(self.copies.outgoing[0])
        self._clear()
        return tuple(self.ledger.actions)

    def _clear(self) -> None:
        """Release copies outside of the home tiers that cancelled evictions have left, at the end of the step."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_end and self.copies.homes[s] in self.ledger.valid[s]:
                for tier in [t for t in self.ledger.valid[s] if t != self.copies.homes[s]]:
                    self.ledger.emit("detach", s, tier)

    # -- one operator --------------------------------------------------------------------------

    def _operator(self, position: int, index: int) -> None:
        ledger, copies = self.ledger, self.copies
        operators, valid, sizes = self.program.operators, ledger.valid, self.program.sizes
        op = operators[index]
        planned_reruns = self.recomputes.rerun.get(position, ())
        rerun = [i for i in planned_reruns if any("device" not in valid[s] for s in operators[i].allocs)]
        touched, wanted = self.program.touched[index], self.program.operands[index]
        recomputed = [s for i in rerun for s in operators[i].allocs]
        if rerun:
            operands = dict.fromkeys((*wanted, *(s for i in rerun for s in operators[i].reads)))
            wanted = tuple(s for s in operands if s not in recomputed and s not in op.allocs)
            touched = tuple(dict.fromkeys((*touched, *wanted, *recomputed)))
        if self.comms:
            for s in wanted:
                self.comms.cancel_release(s)  # else the join below would release it
            for running in self.comms.required_joins(op, wanted, recomputed):
                self._join(running, position)
        if self.budget is not None:
            need = sum([sizes[s] for s in touched if "device" not in valid[s]])
            if ledger.live["device"] + need > self.budget:
                self._make_room(need, set(touched), position)
        for s in wanted:
            if copies.outgoing or self.comms or "device" not in valid[s]:
                self._prefetch(s)
        # The operands have arrived, so their copies in other tiers may be released.
        spared = [s for i in planned_reruns if i not in rerun for s in operators[i].reads]
        if copies.incoming:
            for s in (*wanted, *spared):
                copies.await_arrival(s)
        for s in op.writes if copies.outgoing else ():
            for item in [p for p in copies.outgoing if p.storage == s]:
                copies.finish(item)
        for i in rerun:
            for s in operators[i].allocs:
                if "device" in valid[s]:  # its release waited for a collective
                    ledger.emit("detach", s, "device")
            ledger.emit("recompute", i)
        for h in self.recomputes.helpers.get(position, ()):
            if h in op.touched or "device" not in valid[h] or self._used_at(h, position):
                continue
            if not self.comms.defer_release(h, position):
                ledger.emit("detach", h, "device")
        ledger.emit("run", index)
        if op.group:
            self.comms.begin(index)
        ends = self.ends[position]
        for s in dict.fromkeys((*touched, *spared)) if spared else touched:
            if (s in ends or rerun) and "device" in valid[s]:
                self._release_or_evict(s, position, position)

    def _join(self, index: int, position: int) -> None:
        if index in self.comms.running:  # else it was joined earlier, to make room
            self.ledger.emit("join", index)
            for s, since in self.comms.join(index):
                self._release_or_evict(s, since, position)

    def _used_at(self, s: int, position: int) -> bool:
        uses = self.recomputes.uses[s]
        index = bisect_right(uses, position)
        return index > 0 and uses[index - 1] == position

    def _release_or_evict(self, s: int, position: int, now: int) -> None:
        """Evict, drop or release a storage after its last access at a position.

        `now` is the current position: later than `position` if the release was deferred.
        """
        uses = self.recomputes.uses[s]
        gap = self.evictions.get((s, position))
        dropped = s in self.recomputes.gaps and self.recomputes.gaps[s][0] == position
        dead = uses[-1] <= position and not self.program.storages[s].at_end
        if not (gap or dropped or dead) or (self.comms and self.comms.defer_release(s, position)):
            return
        if gap is not None:
            if now < gap.last or gap.last == len(self.order):
                self.copies.evict(gap)
        elif dropped:
            if now < self.recomputes.gaps[s][1]:
                self.copies.retain(s)  # the evictions behind these copies were cancelled
                self.ledger.emit("detach", s, "device")
        else:
            self.copies.release(s)

    # -- evictions and reloads -----------------------------------------------------------------

    def _store_early(self, ready: list[Gap], position: int) -> list[Gap]:
        """Start stores of storages in `ready` while no store is running; return the gaps to try again later."""
        remaining: list[Gap] = []
        for rank, gap in enumerate(ready):
            if not self.ledger.clock.idle("store"):
                return [*remaining, *ready[rank:]] if rank else ready
            s = gap.storage
            tiers = self.ledger.valid[s]
            if gap.first <= position or "device" not in tiers or tiers.get("dram"):
                continue
            busy = (s, "device") in self.copies.incoming or self.comms.is_writing(s)
            if busy or not self.ledger.fits_dram(s):
                remaining.append(gap)
                continue
            self.copies.store(s, detaches=False)
            self.copies.stored_early.add(s)
        return remaining

    def _retire_copies(self, position: int) -> None:
        """Release storages whose outgoing copies are complete, and join complete collectives that defer a release."""
        if self.comms:
            for index in self.comms.deferring():
                if self.ledger.clock.done_s[index] <= self.ledger.clock.now_s:
                    self._join(index, position)
        if not self.copies.outgoing:
            return
        clock, late = self.ledger.clock, set[MemoryTier]()
        for item in list(self.copies.outgoing):
            if clock.arrival_s[item.storage, item.destination] > clock.now_s:
                late.add(item.destination)
                if len(late) == self.num_host_tiers:
                    return  # a lane completes its copies in order
                continue
            last = self.late_reloads.get(item.storage)
            if item.detaches and item.destination == "dram" and last is not None:
                item.detaches = self._earliest_fit(item.storage, position, last) is not None
            self.copies.finish(item)

    def _reload(self, number: int, gap: Gap, kind: MemoryActionKind, position: int) -> None:
        """Issue a planned reload unless its storage is resident or its gap is over; let it sleep if it lacks memory."""
        s = gap.storage
        self.late_reloads.pop(s, None)
        if position > gap.last:
            return
        if self.comms and self.comms.cancel_release(s):
            return  # a collective still uses it, so its eviction is cancelled
        early = position < gap.last
        if "device" in self.ledger.valid[s]:
            outgoing = [p for p in self.copies.outgoing if p.storage == s and p.detaches]
            if outgoing and self.budget is not None and early:
                # It is still resident: it is evicted if the budget needs its bytes; else the eviction is cancelled.
                self.late_reloads[s] = gap.last
                self.reloads.wait_for_copy(number, s)
                return
            for item in outgoing:
                item.detaches = False
        elif kind == "copy_in":
            if "dram" in self.ledger.valid[s]:
                return
            if early and not self.ledger.fits_dram(s):
                self.reloads.wait_for_dram(number, self.program.sizes[s])
                return
            self.copies.copy_in(s)
        elif not early and self.budget is not None and self.program.sizes[s] > self._free_bytes():
            return  # the operator itself prefetches it once it fits
        elif early and not self._may_prefetch_early(number, gap, position):
            return
        else:
            self._prefetch(s)

    def _free_bytes(self) -> int:
        return 0 if self.budget is None else self.budget - self.ledger.live["device"]

    def _may_prefetch_early(self, number: int, gap: Gap, position: int) -> bool:
        """Return whether an early reload fits together with the bytes planned until its use; if not, let it sleep."""
        if self.budget is None:
            return True
        size = self.program.sizes[gap.storage]
        if self.ledger.live["device"] + size > self.budget:
            self.reloads.wait_for_bytes(number, size)
            return False
        full = self._earliest_fit(gap.storage, position, gap.last)
        if full is not None:  # planned bytes only grow
            self.reloads.retry_at(number, full)
        return full is None

    def _earliest_fit(self, s: int, position: int, last: int) -> int | None:
        """Return the first later position from which a storage fits on the device until its next use, at `last`.

        None: the storage fits from now on, and its bytes are added to the planned bytes.
        """
        assert self.budget is not None
        ahead, size = self.planned[position:last], self.program.sizes[s]
        overfull = np.flatnonzero(ahead + size > self.budget)
        if len(overfull):
            return position + int(overfull[-1]) + 1
        ahead += size  # counted for the next early reload
        return None

    def _prefetch(self, s: int) -> None:
        """Start the copy of a storage to the device; if the storage is still resident, cancel its eviction instead."""
        tiers = self.ledger.valid[s]
        if "device" in tiers:
            if self.comms:
                self.comms.cancel_release(s)
            for item in self.copies.outgoing:
                if item.storage == s:
                    item.detaches = False
            return
        self.copies.retain(s)
        if not tiers.get("dram"):
            self.copies.copy_in(s)
        self.ledger.emit("prefetch", s)
        self.copies.incoming[s, "device"] = None

    def _make_room(self, need: int, keep: set[int], position: int) -> None:
        """Wait for stores and collectives until `need` more device bytes fit the budget, or none in flight frees bytes.

        Storages in `keep` are not evicted.
        """
        assert self.budget is not None
        clock = self.ledger.clock
        while self.ledger.live["device"] + need > self.budget:
            outgoing = (p for p in self.copies.outgoing if p.detaches and p.destination == "dram")
            item = next((p for p in outgoing if p.storage not in keep), None)
            collective = next(iter(self.comms.deferring()), None)
            if collective is not None and (
                item is None or clock.done_s[collective] <= clock.arrival_s[item.storage, "dram"]
            ):
                self._join(collective, position)
            elif item is None:
                return
            else:
                self.copies.finish(item)
