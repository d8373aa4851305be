"""A device that takes over from another one: the same state, another captured step, another plan, the same arena."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._device import PlannedDevice
from hyper_parallel.backends.torch.memory._hardware import Hardware
from hyper_parallel.backends.torch.memory._prepared import Held
from hyper_parallel.backends.torch.memory._streams import DeviceApi
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier
from hyper_parallel.offload import MemoryMachine


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


class SuccessorDevice(PlannedDevice):
    """Moves the state of `before` to the homes of a new plan, storage by storage, within the capacities.

    The meters go on counting, so what the way between two plans takes is measured like everything else. `before` is
    closed by it. A storage moves inside the arena as soon as nothing else lies where it belongs; when none can, one of
    them waits in DRAM, and only when no buffer of its size is free there another one is made.

    Args:
        before: An open device between two steps, with an arena that both plans fit into; its persistent storages are
            known by name.
        captured: The next step.
        plan: A plan for it.
        machine: See `PlannedDevice`.
        flash: Folder of the file tier, on the same disk as that of `before`.
    """

    def __init__(
        self,
        before: PlannedDevice,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        flash: Path | None = None,
    ) -> None:
        assert before._arena_bytes >= plan.arena_bytes
        self._before = before
        super().__init__(
            captured,
            plan,
            machine,
            copies=before.copies,
            flash=flash,
            arena_bytes=before._arena_bytes,
        )

    def _find_hardware(self, queues: DeviceApi | None) -> Hardware:
        return self._before.hardware  # its meters go on counting

    def _take_state(self) -> None:
        before = self._before
        for s in before.captured.given:
            before._leave(s)
        self._arena, before._arena, before._actions = before._arena, None, []
        ranges = self._take_arena().at_start
        self.hardware.pool.reserve(spare_buffers(before.plan, self.plan))
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
                self._failed = before._failed = True
                name = self.plan.program.storages[waiting[0].to].name
                raise TierFull(
                    f"`{name}` cannot change its tier between two steps: both ends are full",
                    got=", ".join(f"{live} bytes in {tier}" for tier, live in self.hardware.live),
                    hint="allow more DRAM or more device memory",
                )
        for s in self.captured.given:
            self._enter(s, ranges[s])
        # The bytes are here now; closing the old device must not touch the tensors that own them.
        before._closed = True
        before._owners.release()

    def _on_the_move(self) -> list[_Moving]:
        """The persistent storages where the old plan has them."""
        before = self._before
        given = before.captured.given
        known = {
            before.plan.program.storages[s].name: s for s in before.captured.state if s not in given
        }
        begins = {e.storage: e.offset_bytes for e in before.plan.addresses if e.start == 0}
        spans = before.plan.program.spans
        found = []
        for s in self.captured.state:
            old = known.pop(self.plan.program.storages[s].name, None)
            if old is None:
                continue
            tier = before.plan.homes[old]
            moving = _Moving(old, s, tier)
            if tier == "device":
                moving.base = before._on[tier][old]
                moving.begin, moving.end = begins[old], begins[old] + spans[old]
                before._leave(old)
            elif tier == "dram":
                moving.base = before._on[tier].pop(old)
            found.append(moving)
        assert not known, f"the next step does not know {sorted(known)}"
        return found

    def _move(self, moving: _Moving, waiting: list[_Moving], ranges: Held, grow: bool) -> bool:
        """One storage to its new home; False when there is no room for it yet."""
        s, now, home = moving.to, moving.tier, self.plan.homes[moving.to]
        size = self.plan.program.storages[s].num_bytes
        before = self._before
        if now == home == "flash":
            self._files.adopt(s, before._files, moving.old)
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
            base = self.hardware.in_dram(size)
            before._files.read(moving.old, base)
            before._files.drop(moving.old)
        elif through_dram:
            base = self._in_dram(moving)
        assert base is not None
        if home == "device":
            if base.data_ptr() != ranges[s].data_ptr():
                ranges[s].copy_(base)
            self._enter(s, ranges[s])
        elif home == "dram":
            self._on[home][s] = base
        else:
            self._files.take(s, size)
            self._files.write(s, base)
        moving.base = None
        return True

    def _is_free(self, moving: _Moving, waiting: list[_Moving]) -> bool:
        """Nothing lies where a storage belongs, but for itself in that very place."""
        begin = self._begins[moving.to]
        end = begin + self.plan.program.spans[moving.to]
        there = (m for m in waiting if m.tier == "device" and m.begin < end and begin < m.end)
        return all(m is moving and m.begin == begin for m in there)

    @cached_property
    def _begins(self) -> dict[int, int]:
        return {e.storage: e.offset_bytes for e in self.plan.addresses if e.start == 0}

    def _step_aside(self, moving: _Moving, grow: bool) -> bool:
        """Let a storage that blocks others wait in DRAM; False when it cannot."""
        size = self.plan.program.storages[moving.to].num_bytes
        if moving.tier != "device" or not self._has_dram(size, grow):
            return False
        moving.base, moving.tier = self._in_dram(moving), "dram"
        return True

    def _in_dram(self, moving: _Moving) -> torch.UntypedStorage:
        assert moving.base is not None
        base = self.hardware.in_dram(moving.base.nbytes())
        base.copy_(moving.base)
        return base

    def _has_dram(self, size: int, grow: bool) -> bool:
        pool = self.hardware.pool
        return pool.has_free(size) or (grow and pool.may_grow(size))

    def _has_flash(self, size: int) -> bool:
        meter, cap = self.hardware.flash, self.machine.flash_bytes
        return cap is None or meter.live_bytes + meter.rounded(size) <= cap
