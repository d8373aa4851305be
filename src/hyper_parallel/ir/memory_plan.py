"""Memory plans, and their replay, which checks every action and counts bytes.

A `MemoryPlan` is a memory program (see `memory`) in its chosen order, with residency actions and static addresses.
`replay` applies the actions of a plan and tracks the tiers and the content version of every storage. It returns peaks,
copied bytes and live ranges, and raises an error for an illegal action, such as a read of absent or stale content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir.memory import (
    COPIES,
    OF_OPERATORS,
    Choice,
    Extent,
    MemoryAction,
    MemoryProgram,
    MemoryTier,
    Operator,
    Residency,
    Storage,
    slab_bytes,
)


@dataclass(frozen=True)
class Replay:
    """Peaks, copied bytes and live ranges of a replayed memory plan.

    Attributes:
        peak_bytes: Dict from tier to its peak bytes over the step.
        peak_action: Index of the action at which device memory has its peak.
        profile: Device bytes during every action.
        copied_bytes: Dict from kind of copy to copied bytes (requested, not rounded).
        residency: Live ranges of storages on the device, by ascending end, without addresses.
        recompute_seconds: Seconds of recomputation on the compute lane.
        host_buffers: Dict from rounded size in bytes to the maximum number of host buffers in use.
    """

    peak_bytes: dict[str, int]
    peak_action: int
    profile: tuple[int, ...]
    copied_bytes: dict[str, int]
    residency: tuple[Extent, ...]
    recompute_seconds: float
    host_buffers: dict[int, int]


class _Walk(Residency):
    """Residency that checks every action before it applies it, and records the live ranges on the device."""

    def __init__(self, program: MemoryProgram) -> None:
        super().__init__(program)
        self.program = program
        self.at = 0  # first action during which a change of allocated bytes counts
        self.in_flight: list[set[str]] = [set() for _ in program.storages]  # destinations
        self.version = [0] * len(program.storages)
        self.seen: dict[int, tuple[int, ...]] = {}  # versions that each operator's first run read
        self.since: dict[int, int] = {}
        self.extents: list[Extent] = []
        self.communicating: dict[int, None] = {}  # operators begun and not joined

    def allocate(self, s: int, tier: MemoryTier) -> None:
        if tier == "device":
            self.since.setdefault(s, self.at)
        super().allocate(s, tier)

    def drop(self, s: int, tier: MemoryTier) -> None:
        super().drop(s, tier)
        if tier == "device":
            self.extents.append(Extent(s, self.since.pop(s), self.at))

    def is_copying(self, storage: int, tier: str) -> bool:
        """Return whether a copy of a storage from or to `tier` may be in flight."""
        return any(tier == to or "dram" in (tier, to) for to in self.in_flight[storage])

    def is_being_filled(self, storage: int) -> bool:
        """Return whether a collective in flight may still write a storage."""
        operators = (self.program.operators[i] for i in self.communicating)
        return any(storage in (*op.writes, *op.allocs) for op in operators)

    def is_in_use(self, storage: int) -> bool:
        """Return whether a collective in flight may still read or write a storage."""
        return any(storage in self.program.touched[i] for i in self.communicating)

    def illegal(self, at: int, action: MemoryAction, why: str) -> MemoryPlanInvalid:
        names: tuple[Operator, ...] | tuple[Storage, ...]
        names = self.program.operators if action.kind in OF_OPERATORS else self.program.storages
        name = names[action.target].name if action.target < len(names) else "?"
        return MemoryPlanInvalid(
            f"an action of the memory plan is illegal: {why}",
            where=f"action {at}: {action.kind} {action.target} ({name}) {action.tier}",
            hint="plan again; a plan edited by hand must keep every operand on the device while it is used",
        )

    def name(self, storage: int) -> str:
        return f"`{self.program.storages[storage].name}`"

    def run(self, at: int, action: MemoryAction) -> None:
        op, is_recompute = self.program.operators[action.target], action.kind == "recompute"
        if is_recompute != (action.target in self.seen):
            raise self.illegal(at, action, "the operator never ran" if is_recompute else "the operator ran before")
        for s in self.program.touched[action.target]:
            if s in op.allocs:
                if "device" in self.valid[s]:
                    raise self.illegal(at, action, f"the result {self.name(s)} already exists")
            elif not self.valid[s].get("device") or "device" in self.in_flight[s]:
                raise self.illegal(at, action, f"{self.name(s)} is not on the device")
            if self.communicating and (self.is_in_use(s) if s in op.writes else self.is_being_filled(s)):
                raise self.illegal(at, action, f"{self.name(s)} is in use by a collective in flight")
        inputs = tuple(self.version[s] for s in op.reads if s not in op.allocs)
        if is_recompute and (not op.repeatable or op.writes or inputs != self.seen[action.target]):
            raise self.illegal(at, action, "the operator cannot be recomputed with the same result")
        self.seen[action.target] = inputs
        for s in op.writes:
            if self.is_copying(s, "device"):
                raise self.illegal(at, action, f"{self.name(s)} is written while it is copied")
            self.version[s] += 1
        self.apply(action)
        if op.group:
            self.communicating[action.target] = None

    def join(self, at: int, action: MemoryAction) -> None:
        if self.communicating.pop(action.target, 0) is not None:
            raise self.illegal(at, action, "the collective was not started, or is already joined")

    def copy(self, at: int, action: MemoryAction) -> None:
        s, (source, to) = action.target, COPIES[action.kind]
        # The source may still be the destination of another copy: lanes run in issue order, and the second copy waits.
        if not self.valid[s].get(source):
            raise self.illegal(at, action, f"the storage has no current content in {source}")
        if self.valid[s].get(to):
            raise self.illegal(at, action, f"the current content is already in {to}")
        if to in self.in_flight[s]:
            raise self.illegal(at, action, f"another copy of the storage into {to} is in flight")
        if source == "device" and self.is_being_filled(s):
            raise self.illegal(at, action, "the storage is in use by a collective in flight")
        self.apply(action)
        self.in_flight[s].add(to)

    def wait(self, at: int, action: MemoryAction) -> None:
        if action.tier not in self.in_flight[action.target]:
            raise self.illegal(at, action, "no copy of the storage into this tier is in flight")
        self.in_flight[action.target].remove(action.tier)

    def release(self, at: int, action: MemoryAction) -> None:
        s = action.target
        for tier in self.valid[s] if action.kind == "free" else [action.tier]:
            if tier not in self.valid[s]:
                raise self.illegal(at, action, f"the storage has no bytes in {tier}")
            if self.is_copying(s, tier):
                raise self.illegal(at, action, f"a copy of the storage from or to {tier} may be in flight")
            if tier == "device" and self.is_in_use(s):
                raise self.illegal(at, action, "the storage is in use by a collective in flight")
        self.at = at + 1
        self.apply(action)

    def check_end(self, homes: tuple[MemoryTier, ...]) -> None:
        operators = self.program.operators
        for index, op in enumerate(operators):
            if index not in self.seen:
                raise MemoryPlanInvalid(f"operator {index} ({op.name}) never runs")
        for index in self.communicating:
            name = operators[index].name
            raise MemoryPlanInvalid(
                f"no action joins the collective `{name}`, so the step could end before it completes"
            )
        for s, storage in enumerate(self.program.storages):
            home = homes[s] if storage.persistent else "device"
            want = {home: True} if storage.at_end else {}
            if self.valid[s] != want or self.in_flight[s]:
                raise MemoryPlanInvalid(
                    f"at the end of the step, {self.name(s)} is in a wrong memory tier, outdated or still being copied",
                    got=f"tiers (True: up to date) {self.valid[s]}, copies in flight to {sorted(self.in_flight[s])}",
                    allowed=f"tiers (True: up to date) {want}",
                )


def replay(program: MemoryProgram, homes: tuple[MemoryTier, ...], actions: Iterable[MemoryAction]) -> Replay:
    """Apply all actions of a memory plan, check each of them, and return peaks and live ranges.

    Bytes are allocated and released in the order of the actions, so the result does not depend on copy speed.

    Args:
        program: Storages and operators of the step.
        homes: Tier of every persistent storage between steps.
        actions: Actions in order.

    Checks:
        * operands are on the device with their latest content;
        * no storage is released or written while a copy or a collective uses it;
        * every collective is joined, and its results are not read before;
        * every operator has one `run`, and its recomputations read the same contents;
        * at the end, every storage with `at_end` has its latest content in its home tier, and no other bytes exist.

    Raises:
        MemoryPlanInvalid: HP404 for the first failed check.
    """
    walk = _Walk(program)
    for index, storage in enumerate(program.storages):
        if storage.at_start:
            walk.allocate(index, homes[index] if storage.persistent else "device")
    steps = {
        **dict.fromkeys(("run", "recompute"), walk.run),
        **dict.fromkeys(COPIES, walk.copy),
        "join": walk.join,
        "wait": walk.wait,
    }
    profile: list[int] = []
    copied = dict.fromkeys(COPIES, 0)
    recompute_s = 0.0
    best, best_at = walk.live["device"], 0
    for at, action in enumerate(actions):
        releases, walk.at = action.kind in ("detach", "free"), at
        if not releases:
            steps[action.kind](at, action)
        if action.kind == "recompute":
            recompute_s += program.operators[action.target].seconds
        elif action.kind in COPIES:
            copied[action.kind] += program.storages[action.target].num_bytes
        profile.append(walk.live["device"])
        if walk.live["device"] > best:
            best, best_at = walk.live["device"], at
        if releases:
            walk.release(at, action)  # the bytes still count during the action
    walk.check_end(homes)
    walk.at = len(profile)
    for index in list(walk.since):
        walk.drop(index, "device")
    return Replay(
        dict[str, int](walk.peaks.items()),
        best_at,
        tuple(profile),
        copied,
        tuple(walk.extents),
        recompute_s,
        dict(walk.buffers.most),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Memory program in a chosen order, with residency actions and static device addresses.

    Attributes:
        program: Storages and operators of the step.
        homes: Tier of every persistent storage between steps; `device` for all others.
        actions: Actions in order.
        seconds: Simulated seconds of the step, copies included.
        choices: Decisions to offload, recompute or stream a storage, one per storage and interval between two uses.
        statement: Sentences about decisions and rejected alternatives, with reasons.
        addresses: Live ranges of storages on the device, with their offsets in the arena.
        arena_bytes: Bytes of the arena, the one device allocation that contains all addresses.
    """

    program: MemoryProgram
    homes: tuple[MemoryTier, ...]
    actions: tuple[MemoryAction, ...]
    seconds: float
    choices: tuple[Choice, ...] = ()
    statement: tuple[str, ...] = ()
    addresses: tuple[Extent, ...] = ()
    arena_bytes: int = 0

    @cached_property
    def replayed(self) -> Replay:
        """Result of `replay`; reading it raises MemoryPlanInvalid (HP404) if an action is illegal."""
        return replay(self.program, self.homes, self.actions)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Dict from tier to its peak bytes, without arena fragmentation and staging; errors as for `replayed`."""
        return self.replayed.peak_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes of the plan: the arena plus the staging buffers."""
        return self.arena_bytes + self.program.staging_bytes

    @cached_property
    def dram_bytes(self) -> int:
        """Pinned host bytes: slabs for the maximum number of buffers of each size in use; errors as for `replayed`."""
        return slab_bytes(self.replayed.host_buffers)
