"""Transition of a state from one plan to another: the same storages under another captured step, in the same arena.

The transition is planned from both plans alone and then executed as planned, so its use of host memory is known before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.backends.torch.memory.arena_state import ArenaState
from hyper_parallel.backends.torch.memory.prepared_plan import StorageBytes
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier


@dataclass(slots=True)
class _PendingMove:
    """Storage that has not reached its new home.

    Attributes:
        old: Number in the old step.
        new: Number in the new step.
        size: Bytes.
        tier: Current tier.
        home: Home tier of the new plan.
        old_range: Current range in the arena; empty outside of it.
        new_range: Range in the arena under the new plan; empty outside of it.
    """

    old: int
    new: int
    size: int
    tier: MemoryTier
    home: MemoryTier
    old_range: range
    new_range: range


@dataclass(frozen=True, slots=True)
class Relocation:
    """Move of one storage to its new home, or temporarily into host memory.

    Attributes:
        old: Number in the old step.
        new: Number in the new step.
        tier: Source tier.
        target: Target tier.
        is_final: True if the target is the new home.
    """

    old: int
    new: int
    tier: MemoryTier
    target: MemoryTier
    is_final: bool


class RelocationPlan:
    """Ordered moves of the storages between two plans.

    A storage moves inside the arena as soon as its new range is free. When no storage can move, one is evicted to DRAM
    temporarily. Another buffer is allocated there only when no buffer of its size is free.

    Args:
        before: The old plan, between two steps; its persistent storages are matched by name.
        after: The new plan.
        dram_buffers: Number of existing DRAM buffers by size in bytes.
        flash_bytes: Capacity of the file tier; None: unlimited.
        input_storages: Storages of the old plan that the caller keeps.

    Attributes:
        moves: Moves in order.
        buffers: Number of required DRAM buffers by size in bytes; at least `dram_buffers`.

    Raises:
        TierFull: HP403 when a storage cannot change its tier because both ends are full.
    """

    def __init__(
        self,
        before: MemoryPlan,
        after: MemoryPlan,
        dram_buffers: Mapping[int, int],
        flash_bytes: int | None = None,
        input_storages: Collection[int] = (),
    ) -> None:
        self.moves: list[Relocation] = []
        self.buffers = Counter(dram_buffers)
        self._flash_room = flash_bytes
        waiting = list(_pending_moves(before, after, input_storages))
        self._free = Counter(dram_buffers)
        self._free.subtract(Counter(m.size for m in waiting if m.tier == "dram"))
        if self._flash_room is not None:
            self._flash_room -= sum(m.size for m in waiting if m.tier == "flash")
        # A pass moves every storage that can move. A pass without any move evicts one storage to a free DRAM buffer. If
        # there is none, the next pass may allocate one buffer (`grow`).
        grow = False
        while waiting:
            num_waiting = len(waiting)
            for pending in list(waiting):
                if self._move(pending, waiting, grow):
                    waiting.remove(pending)
            if len(waiting) < num_waiting or any(self._evict_temporarily(m, grow) for m in waiting):
                grow = False
            elif not grow:
                grow = True
            else:
                raise TierFull(
                    f"`{after.program.storages[waiting[0].new].name}` cannot change its tier between two steps: "
                    "both ends are full",
                    hint="allow more DRAM or more device memory",
                )

    def _move(self, pending: _PendingMove, waiting: list[_PendingMove], grow: bool) -> bool:
        """Move one storage to its new home; return False when it does not fit yet.

        Args:
            pending: The storage.
            waiting: All storages that have not moved, `pending` included.
            grow: Whether to allocate a DRAM buffer if none of the size is free.
        """
        tier, home, size = pending.tier, pending.home, pending.size
        if home == "device" and any(
            _overlap(m.old_range, pending.new_range)
            for m in waiting
            if m.tier == "device" and not (m is pending and m.old_range == m.new_range)
        ):
            return False
        # Every change of tier passes through a DRAM buffer; a storage in DRAM already has one.
        needs_buffer = tier not in (home, "dram")
        flash_room = self._flash_room
        if home == "flash" != tier and flash_room is not None and flash_room < size:
            return False
        if needs_buffer and not self._reserve_buffer(size, grow):
            return False
        if flash_room is not None:
            self._flash_room = flash_room + size * ((tier == "flash") - (home == "flash"))
        if home != "dram" and (needs_buffer or tier == "dram"):
            self._free[size] += 1
        self.moves.append(Relocation(pending.old, pending.new, tier, home, True))
        return True

    def _evict_temporarily(self, pending: _PendingMove, grow: bool) -> bool:
        """Evict a blocking storage to DRAM temporarily; return False when that is impossible."""
        if pending.tier != "device" or not self._reserve_buffer(pending.size, grow):
            return False
        self.moves.append(Relocation(pending.old, pending.new, "device", "dram", False))
        pending.tier = "dram"
        return True

    def _reserve_buffer(self, size: int, grow: bool) -> bool:
        if self._free[size] <= 0:
            if not grow:
                return False
            self.buffers[size] += 1
            self._free[size] += 1
        self._free[size] -= 1
        return True


def _pending_moves(
    before: MemoryPlan, after: MemoryPlan, input_storages: Collection[int]
) -> Iterator[_PendingMove]:
    """Yield the persistent storages in their place under the old plan."""
    old = {
        storage.name: s
        for s, storage in enumerate(before.program.storages)
        if storage.persistent and s not in input_storages
    }
    offsets = [
        {e.storage: e.offset_bytes for e in p.addresses if e.start == 0} for p in (before, after)
    ]
    for new, storage in enumerate(after.program.storages):
        s = old.get(storage.name)
        if s is None or not storage.persistent:
            continue
        ranges = [
            range(offset[x], offset[x] + plan.program.spans[x]) if x in offset else range(0)
            for plan, offset, x in ((before, offsets[0], s), (after, offsets[1], new))
        ]
        size = before.program.sizes[s]
        yield _PendingMove(s, new, size, before.homes[s], after.homes[new], *ranges)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def transfer_state(before: ArenaState, after: ArenaState) -> None:
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
    input_storages, pool = before.captured.input_storages, after.hardware.pool
    try:
        plan = RelocationPlan(
            before.plan, after.plan, pool.buffers, after.machine.flash_bytes, input_storages
        )
        pool.reserve(plan.buffers)
    except TierFull:
        after.failed = before.failed = True
        raise
    contents = {
        s: before.storages[tier][s] for tier in ("device", "dram") for s in before.storages[tier]
    }
    for s in before.storages["device"].copy():
        before.leave(s)
    before.storages["dram"].clear()
    after.arena, before.arena, before.actions = before.arena, None, []
    ranges = after.take_arena().at_start
    for move in plan.moves:
        _relocate(move, contents, ranges, before, after)
    assert not contents.keys() - set(input_storages), (
        "the next step does not know some of the state"
    )
    contents.clear()
    for s in after.captured.input_storages:
        after.enter(s, ranges[s])
    # `after` owns the bytes now; closing the old device must not change the owner tensors.
    before.closed = True
    before.owners.restore_tensors()


def _relocate(
    move: Relocation,
    contents: StorageBytes,
    ranges: StorageBytes,
    before: ArenaState,
    after: ArenaState,
) -> None:
    """Execute one move.

    Args:
        move: The move.
        contents: Bytes by old number of the storages on the device and in DRAM that have not reached their new home.
        ranges: Ranges in the arena by new number.
        before: State under the old plan.
        after: State under the new plan.
    """
    base = contents.pop(move.old, None)
    size = after.plan.program.storages[move.new].num_bytes
    if move.tier == move.target == "flash":
        after.files.adopt(move.new, before.files, move.old)
        return
    if move.tier == "flash":
        base = after.hardware.in_dram(size)
        before.files.read(move.old, base)
        before.files.drop(move.old)
    assert base is not None
    if move.tier == "device" and move.target != "device":
        copy = after.hardware.in_dram(size)
        base = copy.copy_(base)
    if not move.is_final:
        contents[move.old] = base
    elif move.target == "device":
        if base.data_ptr() != ranges[move.new].data_ptr():
            ranges[move.new].copy_(base)
        after.enter(move.new, ranges[move.new])
    elif move.target == "dram":
        after.storages["dram"][move.new] = base
    else:
        after.files.take(move.new, size)
        after.files.write(move.new, base)
