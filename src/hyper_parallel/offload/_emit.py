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

from hyper_parallel.ir import (
    MEMORY_TIERS,
    MemoryAction,
    MemoryActionKind,
    MemoryProgram,
    MemoryTier,
)
from hyper_parallel.offload._issue import Gap, Pending, early_stores, issue_positions
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._recompute import Recomputes
from hyper_parallel.offload._simulate import Clock


class Emitter:
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
        n = len(program.storages)
        self.planned = planned  # bytes per position as selected
        self.back = back or {}  # (storage, end of gap) -> where `planned` counts it again
        self.program, self.order, self.again = program, order, recomputes
        self.budget = budget_bytes
        self.clock = Clock(program, machine)
        self.actions: list[MemoryAction] = []
        self.live: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.held: list[int] = []  # device bytes while each position runs
        self.homes: list[MemoryTier] = ["device"] * n
        for gap in gaps:
            if gap.first < 0:
                self.homes[gap.storage] = gap.tier
        # Per storage: tier -> content is newest.
        self.current: list[dict[MemoryTier, bool]] = [{} for _ in range(n)]
        for s, storage in enumerate(program.storages):
            if storage.at_start:
                self._set(s, self.homes[s])
        self.leave = {(g.storage, g.first): g for g in gaps if g.first >= 0}
        self.leaving: dict[int, list[int]] = {}
        for g in gaps:
            self.leaving.setdefault(g.storage, []).append(g.first)
        seconds = [program.operators[i].seconds for i in order]
        starts = np.cumsum([0.0, *seconds])[:-1]
        self.left_s = float(starts[-1]) - starts if len(starts) else starts
        self.events = issue_positions(gaps, starts, program, machine, window)
        self.pending: list[Pending] = []
        self.due: set[int] = set()  # reload is due, but there is no room yet
        self.flying: dict[tuple[int, str], None] = {}  # copies towards the device not waited for
        self.writes: list[list[int]] = [[] for _ in range(n)]
        for position, index in enumerate(order):
            for s in program.operators[index].writes:
                self.writes[s].append(position)
        self.early = early_stores(gaps, program, len(order), recomputes, self.writes)
        # A store lane takes what leaves next when it is idle, or would be during the next operator.
        self.eager_s = [*seconds[1:], 0.0] if eager else [0.0] * len(seconds)
        self.ahead: set[int] = set()  # stored before they leave: the copy stays until then

    def emit(self, limit_s: float = float("inf")) -> tuple[MemoryAction, ...] | None:
        """The whole program, or None as soon as it must take longer than the limit."""
        for s, storage in enumerate(self.program.storages):
            if storage.at_start and not storage.at_end and not self.again.uses[s]:
                self._release(s)
        waiting: list[tuple[int, Gap, MemoryActionKind]] = []
        queue, ready = 0, list[Gap]()
        for position, index in enumerate(self.order):
            if self.clock.now_s + self.left_s[position] > limit_s:
                return None
            self._retire()
            while queue < len(self.events) and self.events[queue][0] <= position:
                waiting.append(self.events[queue])
                queue += 1
            waiting = [event for event in waiting if not self._reload(event, position)]
            self._operator(position, index)
            for gap in self.early[position]:
                insort(ready, gap, key=lambda g: (g.first, -self.program.sizes[g.storage]))
            ready = self._store_early(ready, position)
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
        op = self.program.operators[index]
        rerun = [
            i
            for i in self.again.rerun.get(position, ())
            if any("device" not in self.current[s] for s in self.program.operators[i].allocs)
        ]
        wanted = dict.fromkeys((*op.reads, *op.writes))
        for i in rerun:
            wanted.update(dict.fromkeys(self.program.operators[i].reads))
        fresh = {*op.allocs, *(s for i in rerun for s in self.program.operators[i].allocs)}
        wanted = {s: None for s in wanted if s not in fresh}
        if self.budget is not None:
            sizes = self.program.sizes
            operands = {*wanted, *fresh}
            need = sum(sizes[s] for s in operands if "device" not in self.current[s])
            self._make_room(need, operands)
        for s in wanted:
            self._bring(s)
        for s in wanted:
            self._arrive(s, position)
        for s in op.writes:
            for item in [p for p in self.pending if p.storage == s]:
                self._finish(item)
        for i in rerun:
            for s in self.program.operators[i].allocs:
                self._set(s, "device")
            self._do("recompute", i)
        helpers = [h for h in self.again.helpers.get(position, ()) if h not in op.touched]
        for h in helpers:
            if "device" in self.current[h] and not self._used_at(h, position):
                self._detach(h, "device")
        for s in op.allocs:
            self._set(s, "device")
        for s in op.writes:
            for tier in self.current[s]:
                self.current[s][tier] = tier == "device"
        self.held.append(self.live["device"])
        self._do("run", index)
        touched = self.program.touched[index]
        if rerun:
            touched = tuple(dict.fromkeys((*touched, *wanted, *fresh)))
        for s in touched:
            if "device" in self.current[s]:
                self._after(s, position)

    def _used_at(self, s: int, position: int) -> bool:
        uses = self.again.uses[s]
        at = bisect_right(uses, position)
        return at > 0 and uses[at - 1] == position

    def _after(self, s: int, position: int) -> None:
        """What happens to a storage once an operator is done with it."""
        uses = self.again.uses[s]
        gap = self.leave.get((s, position))
        if gap is not None:
            self._depart(gap)
        elif s in self.again.gaps and self.again.gaps[s][0] == position:
            self._detach(s, "device")
        elif uses[-1] <= position and not self.program.storages[s].at_end:
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
                return [*left, *(g for g in ready[at:] if g.first > position)]
            s = gap.storage
            held = self.current[s]
            if gap.first <= position or "device" not in held or held.get("dram"):
                continue
            if (s, "device") in self.flying or not self._dram_fits(s):
                left.append(gap)
                continue
            self._set(s, "dram")
            self._do("store", s)
            self.pending.append(Pending(s, "dram", False))
            self.ahead.add(s)
        return left

    def _retire(self) -> None:
        """Detach what has been copied by now."""
        for item in list(self.pending):
            if self.clock.arrival_s(item.storage, item.into) <= self.clock.now_s:
                if item.storage in self.due:
                    item.leaves = False
                self._finish(item)

    def _finish(self, item: Pending) -> None:
        """Wait for a copy and give its source's bytes back."""
        s = item.storage
        if item not in self.pending:
            return
        if item.into == "flash":
            for other in [p for p in self.pending if p.storage == s and p.into == "dram"]:
                self._finish(other)
        self.pending.remove(item)
        self._do("wait", s, item.into)
        if item.leaves:
            self._detach(s, "device" if item.into == "dram" else "dram")
        elif item.into == "dram" and not (
            s in self.ahead or self.homes[s] == "dram" or self._going(s, "flash")
        ):
            self._detach(s, "dram")

    def _going(self, s: int, into: str) -> bool:
        return any(p.storage == s and p.into == into for p in self.pending)

    def _reload(self, event: tuple[int, Gap, MemoryActionKind], position: int) -> bool:
        """Issue a planned reload; False when it must be tried again later for lack of room."""
        _, gap, kind = event
        s = gap.storage
        self.due.discard(s)
        if position > gap.last:
            return True
        if "device" in self.current[s]:
            going = [p for p in self.pending if p.storage == s and p.leaves]
            if going and self.budget is not None and position < gap.last:
                # It has not left yet. If the budget needs the room it still goes, else its leave is called off.
                self.due.add(s)
                return False
            for item in going:
                item.leaves = False
            return True
        if kind == "copy_in":
            if "dram" not in self.current[s]:
                if position < gap.last and not self._dram_fits(s):
                    return False
                self._copy_in(s)
            return True
        if position < gap.last and not self._has_room(s, gap, position):
            return False
        self._bring(s)
        return True

    def _has_room(self, s: int, gap: Gap, position: int) -> bool:
        """An early reload must not take bytes that an operator before its use needs."""
        if self.budget is None:
            return True
        size = self.program.sizes[s]
        if self.live["device"] + size > self.budget:
            return False
        counted = self.back.get((s, gap.last), gap.last)
        if self.planned is None or position >= counted:
            return True
        ahead = self.planned[position:counted]
        if int(ahead.max()) + size > self.budget:
            return False
        ahead += size  # the next early reload sees this one
        return True

    def _bring(self, s: int) -> None:
        """Start the copy to the device unless the bytes are there or on their way."""
        held = self.current[s]
        if "device" in held:
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
        if "dram" in self.current[s] and home != "dram" and not clean:
            self._detach(s, "dram")
        if "flash" in self.current[s] and home != "flash" and not clean:
            self._detach(s, "flash")

    def _make_room(self, need: int, keep: set[int]) -> None:
        """Wait for running stores until `need` more bytes fit under the budget."""
        if self.budget is None:
            return
        while self.live["device"] + need > self.budget:
            item = next(
                (
                    p
                    for p in self.pending
                    if p.leaves and p.into == "dram" and p.storage not in keep
                ),
                None,
            )
            if item is None:
                return
            self._finish(item)

    def _copy_in(self, s: int) -> None:
        self._make_dram_room(s)
        self._set(s, "dram")
        self._do("copy_in", s)
        self.flying[s, "dram"] = None

    def _dram_fits(self, s: int) -> bool:
        cap = self.clock.machine.dram_bytes
        return (
            cap is None
            or "dram" in self.current[s]
            or self.live["dram"] + self.program.sizes[s] <= cap
        )

    def _make_dram_room(self, s: int) -> None:
        """Wait for bytes on their way to flash until a storage fits into DRAM; replay refuses it when none are."""
        while not self._dram_fits(s):
            going = (p for p in self.pending if p.leaves and p.into == "flash" and p.storage != s)
            item = next(going, None)
            if item is None:
                return
            self._finish(item)

    # -- bookkeeping ---------------------------------------------------------------------------

    def _set(self, s: int, tier: MemoryTier) -> None:
        if tier not in self.current[s]:
            self.live[tier] += self.program.sizes[s]
            self.peaks[tier] = max(self.peaks[tier], self.live[tier])
        self.current[s][tier] = True

    def _detach(self, s: int, tier: MemoryTier) -> None:
        del self.current[s][tier]
        self.live[tier] -= self.program.sizes[s]
        self._do("detach", s, tier)

    def _release(self, s: int) -> None:
        for item in [p for p in self.pending if p.storage == s]:
            item.leaves = False
            self._finish(item)
        for tier in self.current[s]:
            self.live[tier] -= self.program.sizes[s]
        self.current[s] = {}
        self._do("free", s)

    def _do(self, kind: MemoryActionKind, target: int, tier: MemoryTier = "device") -> None:
        action = MemoryAction(kind, target, tier)
        self.actions.append(action)
        self.clock.apply(action)
