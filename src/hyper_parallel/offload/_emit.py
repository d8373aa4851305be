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
from hyper_parallel.offload._issue import Gap, Pending, early_stores, issue_positions
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._recompute import Recomputes
from hyper_parallel.offload._talks import Talks
from hyper_parallel.offload._underway import Underway
from hyper_parallel.offload._waiting import Waiting


class Emitter(Underway):
    """One emission; `emit` gives the actions, `clock` the time."""

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: Sequence[int],
        gaps: Sequence[Gap],
        recomputes: Recomputes,
        budget_bytes: int | None,
        planned: np.ndarray | None = None,
        back: dict[tuple[int, int], int] | None = None,
        window: float | None = None,
        eager: bool = False,
    ) -> None:
        super().__init__(program, machine, recomputes)
        n = len(program.storages)
        gaps = [*recomputes.host.gaps, *gaps]
        self.planned = np.zeros(0, np.int64) if planned is None else planned
        self.back = back or {}  # (storage, end of gap) -> where `planned` counts it again
        self.order = order
        self.budget = budget_bytes
        self.talks = Talks(program)
        self.tiers = 1 if machine.copy_out is None else 2  # that something may leave for
        for gap in gaps:
            if gap.first < 0:
                self.homes[gap.storage] = gap.tier
        for s, storage in enumerate(program.storages):
            if storage.at_start:
                self._set(s, self.homes[s])
        self.leave = {(g.storage, g.first): g for g in gaps if g.first >= 0}
        self.leaving: dict[int, list[int]] = {}
        for g in gaps:
            self.leaving.setdefault(g.storage, []).append(g.first)
        self.ends = self._ends()
        seconds = recomputes.host.seconds(program, order)
        starts = np.cumsum([0.0, *seconds])[:-1]
        again = np.zeros(len(starts))
        for position, extra in recomputes.least_s(program).items():
            again[position] = extra
        # At least so long from the start of a position to that of the last one.
        left = np.cumsum((again + np.diff(starts, append=starts[-1:]))[::-1])[::-1]
        self.left_s: list[float] = left.tolist()
        self.waiting = Waiting(
            issue_positions(gaps, starts, program, machine, window, recomputes.host.ready)
        )
        self.due: set[int] = set()  # reload is due, but there is no room yet
        written = recomputes.host.device_writes(program, order)
        self.writes = [written.get(s, []) for s in range(n)]
        self.early = early_stores(gaps, program, len(order), recomputes, self.writes)
        # A store lane takes what leaves next when it is idle, or would be during the next operator.
        self.eager_s = [*seconds[1:], 0.0] if eager else [0.0] * len(seconds)

    def _ends(self) -> list[set[int]]:
        """Per position, what leaves or is over once the operator there is done."""
        ends: list[set[int]] = [set() for _ in self.order]
        for s, position in self.leave:
            ends[position].add(s)
        for s, (position, _) in self.again.gaps.items():
            ends[position].add(s)
        for s, uses in enumerate(self.again.uses):
            if uses and not self.program.storages[s].at_end:
                ends[uses[-1]].add(s)
        return ends

    def emit(self, limit_s: float = float("inf")) -> tuple[MemoryAction, ...] | None:
        """The whole program, or None as soon as it must take longer than the limit."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_start and not storage.at_end and not self.again.uses[s]:
                self._release(s)
        ready = list[Gap]()
        for position, index in enumerate(self.order):
            self.place = position
            if self.clock.now_s + self.left_s[position] > limit_s:
                return None
            self._retire(position)
            for number, gap, kind in self.waiting.at(position, self._room):
                self._reload(number, gap, kind, position)
            if index in self.again.host.operators:
                for running in self.talks.before(self.program.operators[index]):
                    self._join(running, position)
                self._update(index)
            else:
                self._operator(position, index)
            for gap in self.early[position]:
                insort(ready, gap, key=lambda g: (g.first, -self.program.sizes[g.storage]))
            if ready:
                ready = self._store_early(ready, position)
        self.place = len(self.order)
        for running in (*self.talks.running, *self.host.running):
            self._join(running, len(self.order))
        while self.pending:
            self._finish(self.pending[0])
        self._clear()
        return tuple(self.actions)

    def _clear(self) -> None:
        """Drop the copies of what stays, which a leave that was called off may have left in another tier."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_end and self.homes[s] in self.current[s]:
                for tier in [t for t in self.current[s] if t != self.homes[s]]:
                    self._detach(s, tier)

    # -- one operator --------------------------------------------------------------------------

    def _operator(self, position: int, index: int) -> None:
        operators, current, sizes = self.program.operators, self.current, self.program.sizes
        op = operators[index]
        rerun = [
            i
            for i in self.again.rerun.get(position, ())
            if any("device" not in current[s] for s in operators[i].allocs)
        ]
        touched, wanted = self.program.touched[index], self.program.operands[index]
        again = [s for i in rerun for s in operators[i].allocs]
        if rerun:
            read = dict.fromkeys((*wanted, *(s for i in rerun for s in operators[i].reads)))
            wanted = tuple(s for s in read if s not in again and s not in op.allocs)
            touched = tuple(dict.fromkeys((*touched, *wanted, *again)))
        if self.talks:
            for s in wanted:
                self.talks.keep(s)  # else it would go where other ranks are waited for
            for running in self.talks.before(op, wanted, again):
                self._join(running, position)
        if self.budget is not None:
            need = sum([sizes[s] for s in touched if "device" not in current[s]])
            if self.live["device"] + need > self.budget:
                self._make_room(need, set(touched), position)
        for s in wanted:
            if self.pending or self.talks or "device" not in current[s]:
                self._bring(s)
        if self.flying:
            for s in wanted:
                self._arrive(s, position)
        for s in op.writes if self.pending else ():
            for item in [p for p in self.pending if p.storage == s]:
                self._finish(item)
        for i in rerun:
            for s in operators[i].allocs:
                if "device" in current[s]:  # other ranks used it until now
                    self._detach(s, "device")
                self._set(s, "device")
            self._do("recompute", i)
        for h in self.again.helpers.get(position, ()):
            if h in op.touched or "device" not in current[h] or self._used_at(h, position):
                continue
            if not self.talks.hold(h, position):
                self._detach(h, "device")
        for s in op.allocs:
            self._set(s, "device")
        for s in op.writes:
            for tier in current[s]:
                current[s][tier] = tier == "device"
        self.held.append(self.live["device"])
        self._do("run", index)
        if op.group:
            self.talks.begin(index)
        ends = self.ends[position]
        for s in touched:
            if (s in ends or rerun) and "device" in current[s]:
                self._after(s, position, position)

    def _join(self, index: int, position: int) -> None:
        """Wait for other ranks or the host before a position; then happens what was put off until now."""
        if index in self.host.running:
            self._end_update(index)
        elif index in self.talks.running:  # else it ended with another one, for room
            self._do("join", index)
            for s, since in self.talks.end(index):
                self._after(s, since, position)

    def _used_at(self, s: int, position: int) -> bool:
        uses = self.again.uses[s]
        at = bisect_right(uses, position)
        return at > 0 and uses[at - 1] == position

    def _after(self, s: int, position: int, now: int) -> None:
        """What happens to a storage once the operator at a position is done with it, which may be later."""
        uses = self.again.uses[s]
        gap = self.leave.get((s, position))
        dropped = s in self.again.gaps and self.again.gaps[s][0] == position
        over = uses[-1] <= position and not self.program.storages[s].at_end
        if not (gap or dropped or over) or (self.talks and self.talks.hold(s, position)):
            return
        if gap is not None:
            if now < gap.last or gap.last == len(self.order):
                self._depart(gap)
        elif dropped:
            if now < self.again.gaps[s][1]:
                self._detach(s, "device")
        elif s in self.host:
            self._depart(Gap(s, position, len(self.order), "dram"))
        else:
            self._release(s)

    # -- leaving and coming back ---------------------------------------------------------------

    def _depart(self, gap: Gap) -> None:
        s = gap.storage
        self.ahead.discard(s)
        held = self.current[s]
        # A copy of an earlier leave may still run: it carries the same content (a write would have waited for it).
        going = {p.into: p for p in self.pending if p.storage == s}
        if gap.tier == "flash" and held.get("flash") and "flash" not in going:
            for item in going.values():
                item.leaves = False
                self._finish(item)
            self._detach(s, "device")
            if "dram" in held:
                self._detach(s, "dram")
            return
        if "dram" in going:
            going["dram"].leaves = True
        elif held.get("dram"):
            self._detach(s, "device")
        else:
            self._make_dram_room(s)
            self._set(s, "dram")
            self._do("store", s)
            self.pending.append(Pending(s, "dram", True))
        if gap.tier == "flash":
            if "flash" in going:
                going["flash"].leaves = True
            else:
                self._set(s, "flash")
                self._do("copy_out", s)
                self.pending.append(Pending(s, "flash", True))

    def _store_early(self, ready: list[Gap], position: int) -> list[Gap]:
        """Use a store lane that stands idle for what leaves next; the rest of the list."""
        left: list[Gap] = []
        for at, gap in enumerate(ready):
            if not self.clock.idle("store", self.eager_s[position]):
                return [*left, *ready[at:]] if at else ready
            s = gap.storage
            held = self.current[s]
            if gap.first <= position or "device" not in held or held.get("dram"):
                continue
            busy = (s, "device") in self.flying or self.talks.fills(s)
            if busy or not self._dram_fits(s):
                left.append(gap)
                continue
            self._set(s, "dram")
            self._do("store", s)
            self.pending.append(Pending(s, "dram", False))
            self.ahead.add(s)
        return left

    def _retire(self, position: int) -> None:
        """Detach what has been copied by now, and what other ranks or the host are done with."""
        if self.talks or self.host.running:
            for index in (*self.talks.holding(), *self.host.running):
                if self.clock.joined_s(index) <= self.clock.now_s:
                    self._join(index, position)
        if not self.pending:
            return
        late = set[MemoryTier]()
        for item in list(self.pending):
            if self.clock.arrival_s(item.storage, item.into) <= self.clock.now_s:
                item.leaves = item.leaves and item.storage not in self.due
                self._finish(item)
            elif not self.again.host.operators:  # else content may be newer than the copy of it
                late.add(item.into)
                if len(late) == self.tiers:
                    return  # a lane ends its copies in order

    def _reload(self, number: int, gap: Gap, kind: MemoryActionKind, position: int) -> None:
        """Issue a planned reload, or try it again later for lack of room."""
        s = gap.storage
        self.due.discard(s)
        if position > gap.last:
            return
        if self.talks and self.talks.keep(s):
            return  # other ranks still use it: its leave is called off
        early = position < gap.last
        if "device" in self.current[s]:
            going = [p for p in self.pending if p.storage == s and p.leaves]
            if going and self.budget is not None and early:
                # It has not left yet. If the budget needs the room it still goes, else its leave is called off.
                self.due.add(s)
                self.waiting.for_copy(number, s)
                return
            for item in going:
                item.leaves = False
        elif kind == "copy_in":
            if "dram" in self.current[s]:
                return
            if early and not self._dram_fits(s):
                self.waiting.until(number, position + 1)
                return
            self._copy_in(s)
        elif early and not self._has_room(number, gap, position):
            return
        elif early and any(self.clock.joined_s(i) > self.clock.now_s for i in self.host.using(s)):
            self.waiting.until(number, position + 1)  # the copies behind it need not stand in line
        else:
            self._bring(s)

    def _room(self) -> int:
        """Bytes that may still be taken on the device."""
        return 0 if self.budget is None else self.budget - self.live["device"]

    def _has_room(self, number: int, gap: Gap, position: int) -> bool:
        """An early reload must not take bytes that an operator before its use needs; else it waits for them."""
        if self.budget is None:
            return True
        size = self.program.sizes[gap.storage]
        if self.live["device"] + size > self.budget:
            self.waiting.for_room(number, size)
            return False
        ahead = self.planned[position : self.back.get((gap.storage, gap.last), gap.last)]
        over = np.flatnonzero(ahead + size > self.budget)
        if len(over):  # what is planned only grows
            self.waiting.until(number, position + int(over[-1]) + 1)
            return False
        ahead += size  # the next early reload sees this one
        return True

    def _bring(self, s: int) -> None:
        """Start the copy to the device unless the bytes are there or on their way."""
        held = self.current[s]
        if "device" in held:
            if self.talks:
                self.talks.keep(s)
            for item in self.pending:
                if item.storage == s:
                    item.leaves = False
            return
        for item in [p for p in self.pending if p.storage == s]:
            item.leaves = False
            self._finish(item)
        if not held.get("dram"):
            self._copy_in(s)
        self._set(s, "device")
        self._do("prefetch", s)
        self.flying[s, "device"] = None

    def _arrive(self, s: int, position: int) -> None:
        """Wait for the copy to the device, then drop host copies that nothing will use."""
        if (s, "device") not in self.flying:
            return
        for tier in ("dram", "device"):
            if (s, tier) in self.flying:
                del self.flying[s, tier]
                self._do("wait", s, "dram" if tier == "dram" else "device")
        again = [p for p in self.leaving.get(s, ()) if p >= position]
        clean = again and not any(position <= w <= again[0] for w in self.writes[s])
        home = self.homes[s]
        if "dram" in self.current[s] and home != "dram" and not clean and s not in self.host:
            self._detach(s, "dram")
        if "flash" in self.current[s] and home != "flash" and not clean:
            self._detach(s, "flash")

    def _make_room(self, need: int, keep: set[int], position: int) -> None:
        """Wait for running stores and other ranks until `need` more bytes fit under the budget."""
        if self.budget is None:
            return
        while self.live["device"] + need > self.budget:
            going = (p for p in self.pending if p.leaves and p.into == "dram")
            item = next((p for p in going if p.storage not in keep), None)
            other = next(iter(self.talks.holding()), None)
            if other is not None and (
                item is None
                or self.clock.joined_s(other) <= self.clock.arrival_s(item.storage, "dram")
            ):
                self._join(other, position)
            elif item is None:
                return
            else:
                self._finish(item)
