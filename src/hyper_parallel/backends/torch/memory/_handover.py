"""The way of a state from one plan to another: the same storages under another captured step, in the same arena."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from hyper_parallel.backends.torch.memory._held_state import HeldState
from hyper_parallel.backends.torch.memory._prepared import Held
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier


@dataclass(slots=True)
class _Moving:
    """A storage on its way.

    Attributes:
        old: Its number in the old step.
        to: Its number in the new one.
        tier: Where it is now.
        begin: Where it begins in the arena, when it is there.
        end: Where it ends there.
        base: Its bytes; None: in a file.
    """

    old: int
    to: int
    tier: MemoryTier
    begin: int = 0
    end: int = 0
    base: torch.UntypedStorage | None = None


def spare_buffers(before: MemoryPlan, after: MemoryPlan) -> Counter[int]:
    """DRAM buffers that the way between two plans takes: by size, how many must exist.

    Where state leaves the device and every buffer of its size is in use, one more is needed: what has the others may be
    on its way to the place that is to be left.
    """
    made = Counter(before.replayed.host_buffers) | Counter(after.replayed.host_buffers)
    program, homes = before.program, after.homes
    to = {x.name: home for x, home in zip(after.program.storages, homes, strict=True)}
    state = [s for s, storage in enumerate(program.storages) if storage.persistent]
    used = Counter(program.sizes[s] for s in state if before.homes[s] == "dram")
    leaving = (s for s in state if before.homes[s] == "device")
    sizes = {program.sizes[s] for s in leaving if to.get(program.storages[s].name) == "dram"}
    return Counter({size: made[size] + 1 for size in sizes if used[size] >= made[size]})


def hand_over(before: HeldState, after: HeldState) -> None:
    """Move a state to the homes of a new plan, storage by storage, within the capacities.

    The meters go on counting, so what the way between two plans takes is measured like everything else. A storage moves
    inside the arena as soon as nothing else lies where it belongs; when none can, one of them waits in DRAM, and only
    when no buffer of its size is free there another one is made.

    Args:
        before: Between two steps, with an arena that both plans fit into; its persistent storages are known by name. It
            is closed.
        after: Under the new plan, without any bytes yet.

    Raises:
        TierFull: HP403 when a storage cannot change its tier because both ends are full; both can only be closed.
    """
    assert before.arena_bytes >= after.plan.arena_bytes
    after.arena_bytes = before.arena_bytes
    _Handover(before, after).run()


class _Handover:
    def __init__(self, before: HeldState, after: HeldState) -> None:
        self._before, self._after = before, after

    def run(self) -> None:
        """Move everything."""
        before, after = self._before, self._after
        for s in before.captured.given:
            before.leave(s)
        after.arena, before.arena, before.actions = before.arena, None, []
        ranges = after.take_arena().at_start
        after.hardware.pool.reserve(spare_buffers(before.plan, after.plan))
        waiting = self._on_the_move()
        grow = False
        while waiting:
            stuck = len(waiting)
            for moving in list(waiting):
                if self._move(moving, waiting, ranges, grow):
                    waiting.remove(moving)
            if len(waiting) < stuck or any(self._step_aside(m, grow) for m in waiting):
                grow = False
            elif not grow:
                grow = True
            else:
                after.failed = before.failed = True
                name = after.plan.program.storages[waiting[0].to].name
                raise TierFull(
                    f"`{name}` cannot change its tier between two steps: both ends are full",
                    got=", ".join(f"{live} bytes in {tier}" for tier, live in after.hardware.live),
                    hint="allow more DRAM or more device memory",
                )
        for s in after.captured.given:
            after.enter(s, ranges[s])
        # The bytes are here now; closing the old device must not touch the tensors that own them.
        before.closed = True
        before.owners.release()

    def _on_the_move(self) -> list[_Moving]:
        """The persistent storages where the old plan has them."""
        before = self._before
        given = before.captured.given
        known = {
            before.plan.program.storages[s].name: s for s in before.captured.state if s not in given
        }
        begins = {e.storage: e.offset_bytes for e in before.plan.addresses if e.start == 0}
        spans = before.plan.program.spans
        moving_storages = []
        for s in self._after.captured.state:
            old = known.pop(self._after.plan.program.storages[s].name, None)
            if old is None:
                continue
            tier = before.plan.homes[old]
            moving = _Moving(old, s, tier)
            if tier == "device":
                moving.base = before.on[tier][old]
                moving.begin, moving.end = begins[old], begins[old] + spans[old]
                before.leave(old)
            elif tier == "dram":
                moving.base = before.on[tier].pop(old)
            moving_storages.append(moving)
        assert not known, f"the next step does not know {sorted(known)}"
        return moving_storages

    def _move(self, moving: _Moving, waiting: list[_Moving], ranges: Held, grow: bool) -> bool:
        """One storage to its new home; False when there is no room for it yet."""
        s, now, home = moving.to, moving.tier, self._after.plan.homes[moving.to]
        size = self._after.plan.program.storages[s].num_bytes
        before = self._before
        if now == home == "flash":
            self._after.files.adopt(s, before.files, moving.old)
            return True
        if home == "device" and not self._is_free(moving, waiting):
            return False
        through_dram = (home == "dram" and now != "dram") or (now, home) == ("device", "flash")
        if (through_dram or now == "flash") and not self._has_dram(size, grow):
            return False
        if home == "flash" and not self._has_flash(size):
            return False
        base = moving.base
        if now == "flash":
            base = self._after.hardware.in_dram(size)
            before.files.read(moving.old, base)
            before.files.drop(moving.old)
        elif through_dram:
            base = self._in_dram(moving)
        assert base is not None
        if home == "device":
            if base.data_ptr() != ranges[s].data_ptr():
                ranges[s].copy_(base)
            self._after.enter(s, ranges[s])
        elif home == "dram":
            self._after.on[home][s] = base
        else:
            self._after.files.take(s, size)
            self._after.files.write(s, base)
        moving.base = None
        return True

    def _is_free(self, moving: _Moving, waiting: list[_Moving]) -> bool:
        """Nothing lies where a storage belongs, but for itself in that very place."""
        begin = self._begins[moving.to]
        end = begin + self._after.plan.program.spans[moving.to]
        there = (m for m in waiting if m.tier == "device" and m.begin < end and begin < m.end)
        return all(m is moving and m.begin == begin for m in there)

    @cached_property
    def _begins(self) -> dict[int, int]:
        return {e.storage: e.offset_bytes for e in self._after.plan.addresses if e.start == 0}

    def _step_aside(self, moving: _Moving, grow: bool) -> bool:
        """Let a storage that blocks others wait in DRAM; False when it cannot."""
        size = self._after.plan.program.storages[moving.to].num_bytes
        if moving.tier != "device" or not self._has_dram(size, grow):
            return False
        moving.base, moving.tier = self._in_dram(moving), "dram"
        return True

    def _in_dram(self, moving: _Moving) -> torch.UntypedStorage:
        assert moving.base is not None
        base = self._after.hardware.in_dram(moving.base.nbytes())
        base.copy_(moving.base)
        return base

    def _has_dram(self, size: int, grow: bool) -> bool:
        pool = self._after.hardware.pool
        return pool.has_free(size) or (grow and pool.may_grow(size))

    def _has_flash(self, size: int) -> bool:
        meter, cap = self._after.hardware.flash, self._after.machine.flash_bytes
        return cap is None or meter.live_bytes + meter.rounded(size) <= cap
