"""Transition of a state from one plan to another: the same storages under another captured step, in the same arena.

The transition is planned from both plans alone and then executed as planned, so its use of host memory is known before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.backends.torch.memory.arena_state import HeldState
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier


@dataclass(slots=True)
class _Moving:
    """Storage that has not reached its new home.

    Attributes:
        old: Number in the old step.
        to: Number in the new step.
        size: Bytes.
        tier: Current tier.
        home: Home tier of the new plan.
        old_range: Current range in the arena; empty outside of it.
        new_range: Range in the arena under the new plan; empty outside of it.
    """

    old: int
    to: int
    size: int
    tier: MemoryTier
    home: MemoryTier
    old_range: range
    new_range: range


@dataclass(frozen=True, slots=True)
class Move:
    """Move of one storage to its new home, or temporarily into host memory.

    Attributes:
        old: Number in the old step.
        to: Number in the new step.
        tier: Source tier.
        into: Target tier.
        ends: True if the target is the new home.
    """

    old: int
    to: int
    tier: MemoryTier
    into: MemoryTier
    ends: bool


class Way:
    """Ordered moves of the storages between two plans.

    A storage moves inside the arena as soon as its new range is free. When no storage can move, one is evicted to DRAM
    temporarily. Another buffer is allocated there only when no buffer of its size is free.

    Args:
        before: The old plan, between two steps; its persistent storages are matched by name.
        after: The new plan.
        made: Number of existing DRAM buffers by size.
        flash_bytes: Capacity of the file tier; None: unlimited.
        given: Storages of the old plan that the caller keeps.

    Attributes:
        moves: Moves in order.
        buffers: Number of required DRAM buffers by size.

    Raises:
        TierFull: HP403 when a storage cannot change its tier because both ends are full.
    """

    def __init__(
        self,
        before: MemoryPlan,
        after: MemoryPlan,
        made: Mapping[int, int],
        flash_bytes: int | None = None,
        given: Collection[int] = (),
    ) -> None:
        self.moves: list[Move] = []
        self.buffers = Counter(made)
        self._flash_room = flash_bytes
        waiting = list(_on_the_move(before, after, given))
        self._free = Counter(made)
        self._free.subtract(Counter(m.size for m in waiting if m.tier == "dram"))
        if self._flash_room is not None:
            self._flash_room -= sum(m.size for m in waiting if m.tier == "flash")
        grow = False
        while waiting:
            stuck = len(waiting)
            for moving in list(waiting):
                if self._move(moving, waiting, grow):
                    waiting.remove(moving)
            if len(waiting) < stuck or any(self._step_aside(m, grow) for m in waiting):
                grow = False
            elif not grow:
                grow = True
            else:
                raise TierFull(
                    f"`{after.program.storages[waiting[0].to].name}` cannot change its tier between two steps: "
                    "both ends are full",
                    hint="allow more DRAM or more device memory",
                )

    def _move(self, moving: _Moving, waiting: list[_Moving], grow: bool) -> bool:
        """Move one storage to its new home; return False when it does not fit yet."""
        now, home, size = moving.tier, moving.home, moving.size
        if home == "device" and any(
            _overlap(m.old_range, moving.new_range)
            for m in waiting
            if m.tier == "device" and not (m is moving and m.old_range == m.new_range)
        ):
            return False
        # The move needs a DRAM buffer unless the storage has one already or does not change its tier.
        passes = now != home and (home != "device" or now == "flash") and now != "dram"
        room = self._flash_room
        if home == "flash" != now and room is not None and room < size:
            return False
        if passes and not self._take(size, grow):
            return False
        if room is not None:
            self._flash_room = room + size * ((now == "flash") - (home == "flash"))
        if home != "dram" and (passes or now == "dram"):
            self._free[size] += 1
        self.moves.append(Move(moving.old, moving.to, now, home, True))
        return True

    def _step_aside(self, moving: _Moving, grow: bool) -> bool:
        """Evict a blocking storage to DRAM temporarily; return False when that is impossible."""
        if moving.tier != "device" or not self._take(moving.size, grow):
            return False
        self.moves.append(Move(moving.old, moving.to, "device", "dram", False))
        moving.tier = "dram"
        return True

    def _take(self, size: int, grow: bool) -> bool:
        if self._free[size] <= 0:
            if not grow:
                return False
            self.buffers[size] += 1
            self._free[size] += 1
        self._free[size] -= 1
        return True


def _on_the_move(
    before: MemoryPlan, after: MemoryPlan, given: Collection[int]
) -> Iterator[_Moving]:
    """Yield the persistent storages in their place under the old plan."""
    old = {
        storage.name: s
        for s, storage in enumerate(before.program.storages)
        if storage.persistent and s not in given
    }
    begins = [
        {e.storage: e.offset_bytes for e in p.addresses if e.start == 0} for p in (before, after)
    ]
    for to, storage in enumerate(after.program.storages):
        s = old.get(storage.name)
        if s is None or not storage.persistent:
            continue
        ranges = [
            range(begin[x], begin[x] + plan.program.spans[x]) if x in begin else range(0)
            for plan, begin, x in ((before, begins[0], s), (after, begins[1], to))
        ]
        size = before.program.sizes[s]
        yield _Moving(s, to, size, before.homes[s], after.homes[to], *ranges)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def hand_over(before: HeldState, after: HeldState) -> None:
    """Move a state to the home tiers of a new plan, storage by storage, within the capacities.

    The meters continue to count, so the memory of the transition is measured.

    Args:
        before: State between two steps, with an arena that fits both plans. It is closed.
        after: State under the new plan, still without bytes.

    Raises:
        TierFull: HP403 when a storage cannot change its tier, or host memory does not fit the DRAM buffers. Both states
            can then only be closed.
    """
    assert before.arena_bytes >= after.plan.arena_bytes
    after.arena_bytes = before.arena_bytes
    given, pool = before.captured.given, after.hardware.pool
    try:
        way = Way(before.plan, after.plan, pool.made, after.machine.flash_bytes, given)
        pool.reserve(way.buffers)
    except TierFull:
        after.failed = before.failed = True
        raise
    held = {s: before.on[tier][s] for tier in ("device", "dram") for s in before.on[tier]}
    for s in before.on["device"].copy():
        before.leave(s)
    before.on["dram"].clear()
    after.arena, before.arena, before.actions = before.arena, None, []
    ranges = after.take_arena().at_start
    for move in way.moves:
        base = held.pop(move.old, None)
        size = after.plan.program.storages[move.to].num_bytes
        if move.tier == move.into == "flash":
            after.files.adopt(move.to, before.files, move.old)
            continue
        if move.tier == "flash":
            base = after.hardware.in_dram(size)
            before.files.read(move.old, base)
            before.files.drop(move.old)
        assert base is not None
        if move.tier == "device" and move.into != "device":
            copy = after.hardware.in_dram(size)
            base = copy.copy_(base)
        if not move.ends:
            held[move.old] = base
        elif move.into == "device":
            if base.data_ptr() != ranges[move.to].data_ptr():
                ranges[move.to].copy_(base)
            after.enter(move.to, ranges[move.to])
        elif move.into == "dram":
            after.on["dram"][move.to] = base
        else:
            after.files.take(move.to, size)
            after.files.write(move.to, base)
        del base
    assert not held.keys() - set(given), "the next step does not know some of the state"
    held.clear()
    for s in after.captured.given:
        after.enter(s, ranges[s])
    # `after` owns the bytes now; closing the old device must not change the owner tensors.
    before.closed = True
    before.owners.release()
