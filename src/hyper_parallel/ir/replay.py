"""Replay: walk the actions of an emitted program, check each of them, and measure what they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir.host_buffers import HostBuffers
from hyper_parallel.ir.memory import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    Extent,
    MemoryAction,
    MemoryProgram,
    MemoryTier,
    Operator,
    Storage,
)


@dataclass(frozen=True)
class Replay:
    """What walking the actions of a plan gives.

    Attributes:
        peak_bytes: Peak of every tier over the step.
        peak_action: MemoryAction at which the device's peak occurs.
        profile: Device bytes taken during every action.
        copied_bytes: Bytes moved by each kind of copy (requested, not rounded).
        residency: Every stay on the device, without addresses.
        recompute_seconds: Compute seconds spent on running operators again.
        host_buffers: For every rounded size, the most DRAM buffers that are in use at the same time.
    """

    peak_bytes: dict[str, int]
    peak_action: int
    profile: tuple[int, ...]
    copied_bytes: dict[str, int]
    residency: tuple[Extent, ...]
    recompute_seconds: float
    host_buffers: dict[int, int]


@dataclass
class _Walk:
    """State of a replay: which tier holds which content of every storage."""

    program: MemoryProgram
    held: list[dict[str, int]]  # per storage: tier -> content version there
    in_flight: list[dict[str, int]]  # per storage: destination tier -> version being copied
    version: list[int]
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    buffers: HostBuffers = field(default_factory=HostBuffers)
    since: dict[int, int] = field(default_factory=dict)
    communicating: dict[int, None] = field(default_factory=dict)  # operators begun and not joined
    updating: dict[int, None] = field(default_factory=dict)  # begun in host memory, not joined
    stays: list[Extent] = field(default_factory=list)

    def take(self, storage: int, tier: str, version: int, at: int) -> None:
        if tier not in self.held[storage]:
            self.live[tier] += self.program.sizes[storage]
            self.peak[tier] = max(self.peak[tier], self.live[tier])
            if tier == "device":
                self.since[storage] = at
            elif tier == "dram":
                self.buffers.take(self.program.sizes[storage])
        self.held[storage][tier] = version

    def drop(self, storage: int, tier: str, at: int) -> None:
        del self.held[storage][tier]
        self.live[tier] -= self.program.sizes[storage]
        if tier == "device":
            self.stays.append(Extent(storage, self.since.pop(storage), at))
        elif tier == "dram":
            self.buffers.give(self.program.sizes[storage])

    def busy(self, storage: int, tier: str) -> bool:
        """A copy into or out of `tier` is still running."""
        return any(tier in (dst, _source(dst, tier)) for dst in self.in_flight[storage])

    def filled(self, storage: int) -> bool:
        """Other ranks are still writing it."""
        operators = self.program.operators
        return any(
            storage in (*operators[i].writes, *operators[i].allocs) for i in self.communicating
        )

    def sent(self, storage: int) -> bool:
        """Other ranks are still reading or writing it."""
        return any(storage in self.program.touched[i] for i in self.communicating)

    def updated(self, storage: int) -> bool:
        """An operator in host memory still reads or writes it there."""
        return any(storage in self.program.touched[i] for i in self.updating)


def _source(destination: str, tier: str) -> str:
    """The other end of the copy into `destination` that could involve `tier`."""
    if destination == "dram":
        return tier if tier in ("device", "flash") else "dram"
    return "dram"


def replay(
    program: MemoryProgram, homes: tuple[MemoryTier, ...], actions: Iterable[MemoryAction]
) -> Replay:
    """Walk the actions and check every one of them.

    Bytes are taken in program order: a copy takes its destination when it is issued, `detach` and `free` give bytes
    back, an operator's results are taken before it runs. So the profile does not depend on how fast copies are.

    Checked: operands are on the device with their newest content, those of an operator in host memory in DRAM or on the
    way there; nothing is dropped, written or freed under a running copy, nor under an operator that other ranks take
    part in, or that runs in host memory, before its `join`, and what the former makes is not read before; a recomputed
    operator sees the same contents as its first run; every operator runs once; persistent storages end at home with
    their newest content.

    Raises:
        MemoryPlanInvalid: HP404, naming the first illegal action.
    """
    n = len(program.storages)
    walk = _Walk(program, [{} for _ in range(n)], [{} for _ in range(n)], [0] * n)
    for index, storage in enumerate(program.storages):
        if storage.at_start:
            walk.take(index, homes[index] if storage.persistent else "device", 0, 0)
    seen: dict[int, tuple[int, ...]] = {}
    profile: list[int] = []
    copied = dict.fromkeys(COPIES, 0)
    recompute_s = 0.0
    best, best_at = walk.live["device"], 0
    for at, action in enumerate(actions):
        if action.kind in ("run", "recompute"):
            _step_operator(walk, action, at, seen)
            if action.kind == "recompute":
                recompute_s += program.operators[action.target].seconds
        elif action.kind == "update":
            _step_update(walk, action, at, seen)
        elif action.kind == "join":
            begun = walk.updating if action.target in walk.updating else walk.communicating
            if begun.pop(action.target, 0) is not None:
                raise _illegal(walk, at, action, "it was not begun, or has ended")
        elif action.kind in COPIES:
            _step_copy(walk, action, at)
            copied[action.kind] += program.storages[action.target].num_bytes
        profile.append(walk.live["device"])
        if walk.live["device"] > best:
            best, best_at = walk.live["device"], at
        if action.kind in ("wait", "detach", "free"):
            _step_release(walk, action, at)
    _check_end(walk, homes, seen)
    end = len(profile)
    for index in list(walk.since):
        walk.drop(index, "device", end)
    return Replay(
        walk.peak,
        best_at,
        tuple(profile),
        copied,
        tuple(walk.stays),
        recompute_s,
        dict(walk.buffers.most),
    )


def _illegal(walk: _Walk, at: int, action: MemoryAction, why: str) -> MemoryPlanInvalid:
    names: tuple[Operator, ...] | tuple[Storage, ...]
    names = walk.program.operators if action.kind in OF_OPERATORS else walk.program.storages
    name = names[action.target].name if action.target < len(names) else "?"
    return MemoryPlanInvalid(
        f"an action of the memory plan is illegal: {why}",
        where=f"action {at}: {action.kind} {action.target} ({name}) {action.tier}",
        hint="plan again; a plan edited by hand must keep every operand on the device while it is used",
    )


def _step_operator(
    walk: _Walk, action: MemoryAction, at: int, seen: dict[int, tuple[int, ...]]
) -> None:
    op = walk.program.operators[action.target]
    if (action.kind == "recompute") != (action.target in seen):
        raise _illegal(walk, at, action, "it ran before" if action.kind == "run" else "never ran")
    fresh = set(op.allocs)
    for s in walk.program.touched[action.target]:
        if s in fresh:
            if walk.held[s].get("device") is not None:
                raise _illegal(walk, at, action, f"its result `{_name(walk, s)}` already exists")
        elif walk.held[s].get("device") != walk.version[s] or "device" in walk.in_flight[s]:
            raise _illegal(walk, at, action, f"`{_name(walk, s)}` is not on the device")
        if walk.communicating and (walk.sent(s) if s in op.writes else walk.filled(s)):
            raise _illegal(walk, at, action, f"`{_name(walk, s)}` is in use by other ranks")
    inputs = tuple(walk.version[s] for s in op.reads if s not in fresh)
    if action.kind == "recompute":
        if not op.repeatable or op.writes or inputs != seen[action.target]:
            raise _illegal(walk, at, action, "running it again would not give the same result")
    else:
        seen[action.target] = inputs
        for s in op.writes:
            if walk.busy(s, "device"):
                raise _illegal(
                    walk, at, action, f"`{_name(walk, s)}` is written while it is copied"
                )
            walk.version[s] += 1
            walk.held[s]["device"] = walk.version[s]
    for s in op.allocs:
        walk.take(s, "device", walk.version[s], at)
    if op.group:
        walk.communicating[action.target] = None


def _step_update(
    walk: _Walk, action: MemoryAction, at: int, seen: dict[int, tuple[int, ...]]
) -> None:
    op = walk.program.operators[action.target]
    if action.target in seen:
        raise _illegal(walk, at, action, "it ran before")
    if op.allocs:
        raise _illegal(walk, at, action, "its results come to life on the device")
    for s in op.touched:
        # On its way counts: the operator starts when what fills its operands is done.
        if walk.held[s].get("dram") != walk.version[s]:
            raise _illegal(walk, at, action, f"`{_name(walk, s)}` is not in dram")
        if s in op.writes and any(dst != "dram" for dst in walk.in_flight[s]):
            raise _illegal(walk, at, action, f"`{_name(walk, s)}` is written while it is copied")
    seen[action.target] = tuple(walk.version[s] for s in op.reads)
    for s in op.writes:
        walk.version[s] += 1
        walk.held[s]["dram"] = walk.version[s]
    walk.updating[action.target] = None


def _step_copy(walk: _Walk, action: MemoryAction, at: int) -> None:
    s = action.target
    src, dst = COPIES[action.kind]
    version = walk.held[s].get(src)
    # A copy may follow another one that fills its source: lanes run in issue order and the second waits for the first.
    if version is None or version != walk.version[s]:
        raise _illegal(walk, at, action, f"no current content in {src}")
    if walk.held[s].get(dst) == version:
        raise _illegal(walk, at, action, f"the content is already in {dst}")
    if dst in walk.in_flight[s]:
        raise _illegal(walk, at, action, f"another copy into {dst} is running")
    if dst == "dram" and walk.updated(s):
        raise _illegal(walk, at, action, "an operator in host memory uses it")
    if src == "device" and walk.communicating and walk.filled(s):
        raise _illegal(walk, at, action, "it is in use by other ranks")
    walk.take(s, dst, version, at)
    walk.in_flight[s][dst] = version


def _step_release(walk: _Walk, action: MemoryAction, at: int) -> None:
    s = action.target
    if action.kind == "wait":
        if walk.in_flight[s].pop(action.tier, None) is None:
            raise _illegal(walk, at, action, "there is no such copy to wait for")
        return
    tiers = list(walk.held[s]) if action.kind == "free" else [action.tier]
    for tier in tiers:
        if tier not in walk.held[s]:
            raise _illegal(walk, at, action, f"it holds no bytes in {tier}")
        if walk.busy(s, tier):
            raise _illegal(walk, at, action, f"a copy of it in {tier} is still running")
        if tier == "dram" and walk.updated(s):
            raise _illegal(walk, at, action, "an operator in host memory uses it")
        if tier == "device" and walk.communicating and walk.sent(s):
            raise _illegal(walk, at, action, "it is in use by other ranks")
        walk.drop(s, tier, at + 1)


def _check_end(
    walk: _Walk, homes: tuple[MemoryTier, ...], seen: dict[int, tuple[int, ...]]
) -> None:
    if len(seen) != len(walk.program.operators):
        missing = next(i for i in range(len(walk.program.operators)) if i not in seen)
        raise MemoryPlanInvalid(
            f"operator {missing} ({walk.program.operators[missing].name}) never runs"
        )
    for index in (*walk.communicating, *walk.updating):
        name = walk.program.operators[index].name
        raise MemoryPlanInvalid(f"`{name}` is never joined, so the step could end before it has")
    for s, storage in enumerate(walk.program.storages):
        home = homes[s] if storage.persistent else "device"
        want = {home: walk.version[s]} if storage.at_end else {}
        if walk.held[s] != want or walk.in_flight[s]:
            raise MemoryPlanInvalid(
                f"`{storage.name}` ends the step in the wrong place",
                got=f"{walk.held[s]}, copies running: {walk.in_flight[s]}",
                allowed=str(want),
            )


def _name(walk: _Walk, storage: int) -> str:
    return walk.program.storages[storage].name
