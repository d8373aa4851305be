"""Memory plans, and their replay, which checks every action and counts bytes.

`replay` walks the actions of a plan with the tier and content version of every storage. It raises for an action that
reads absent or stale content, or breaks another rule, and returns peaks, copied bytes and live ranges. A `MemoryPlan`
is a program in its chosen order, with residency actions and static addresses: a JSON document. Its peaks come from a
replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir.memory import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    Choice,
    Extent,
    HostBuffers,
    MemoryAction,
    MemoryProgram,
    MemoryTier,
    Operator,
    Storage,
    slab_bytes,
)
from hyper_parallel.received import Limits, parse_json
from hyper_parallel.serde import decode, encode, write_text
from hyper_parallel.units import MiB


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Attributes:
        peak_bytes: Peak of every tier over the step.
        peak_action: Index of the action at the device's peak.
        profile: Device bytes during every action.
        copied_bytes: Bytes moved by each kind of copy (requested, not rounded).
        residency: Every live range on the device, without addresses.
        recompute_seconds: Compute seconds of recomputed operators.
        host_buffers: For every rounded size, the maximum of host buffers in use.
    """

    peak_bytes: dict[str, int]
    peak_action: int
    profile: tuple[int, ...]
    copied_bytes: dict[str, int]
    residency: tuple[Extent, ...]
    recompute_seconds: float
    host_buffers: dict[int, int]


class _Walk:
    """State of a replay: which tier holds which content of every storage."""

    def __init__(self, program: MemoryProgram) -> None:
        self.program = program
        self.held: list[dict[str, int]] = [{} for _ in program.storages]  # tier: content version
        # destination: version
        self.in_flight: list[dict[str, int]] = [{} for _ in program.storages]
        self.version = [0] * len(program.storages)
        self.seen: dict[int, tuple[int, ...]] = {}  # versions that an operator read first
        self.live: dict[str, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.peak: dict[str, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.buffers = HostBuffers()
        self.since: dict[int, int] = {}
        self.stays: list[Extent] = []
        self.communicating: dict[int, None] = {}  # operators begun and not joined

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

    def copied(self, storage: int, tier: str) -> bool:
        """Return whether a copy into or out of `tier` may be running; one end of every copy is host memory."""
        return any(tier == to or "dram" in (tier, to) for to in self.in_flight[storage])

    def filled(self, storage: int) -> bool:
        """Return whether other ranks may still write a storage in a collective."""
        operators = (self.program.operators[i] for i in self.communicating)
        return any(storage in (*op.writes, *op.allocs) for op in operators)

    def used(self, storage: int) -> bool:
        """Return whether collectives in flight still read or write a storage."""
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
            raise self.illegal(at, action, "never ran" if is_recompute else "it ran before")
        for s in self.program.touched[action.target]:
            if s in op.allocs:
                if "device" in self.held[s]:
                    raise self.illegal(at, action, f"its result {self.name(s)} already exists")
            elif self.held[s].get("device") != self.version[s] or "device" in self.in_flight[s]:
                raise self.illegal(at, action, f"{self.name(s)} is not on the device")
            if self.communicating and (self.used(s) if s in op.writes else self.filled(s)):
                raise self.illegal(at, action, f"{self.name(s)} is in use by other ranks")
        inputs = tuple(self.version[s] for s in op.reads if s not in op.allocs)
        if is_recompute and (not op.repeatable or op.writes or inputs != self.seen[action.target]):
            raise self.illegal(at, action, "running it again would not give the same result")
        self.seen[action.target] = inputs
        for s in op.writes:
            if self.copied(s, "device"):
                raise self.illegal(at, action, f"{self.name(s)} is written while it is copied")
            self.version[s] += 1
            self.held[s]["device"] = self.version[s]
        for s in op.allocs:
            self.take(s, "device", self.version[s], at)
        if op.group:
            self.communicating[action.target] = None

    def join(self, at: int, action: MemoryAction) -> None:
        if self.communicating.pop(action.target, 0) is not None:
            raise self.illegal(at, action, "it was not begun, or has ended")

    def copy(self, at: int, action: MemoryAction) -> None:
        s, (source, to) = action.target, COPIES[action.kind]
        version = self.held[s].get(source)
        # A copy may follow another one that fills its source: lanes run in issue order, the second waits for the first.
        if version is None or version != self.version[s]:
            raise self.illegal(at, action, f"no current content in {source}")
        if self.held[s].get(to) == version:
            raise self.illegal(at, action, f"the content is already in {to}")
        if to in self.in_flight[s]:
            raise self.illegal(at, action, f"another copy into {to} is running")
        if source == "device" and self.filled(s):
            raise self.illegal(at, action, "it is in use by other ranks")
        self.take(s, to, version, at)
        self.in_flight[s][to] = version

    def wait(self, at: int, action: MemoryAction) -> None:
        if self.in_flight[action.target].pop(action.tier, None) is None:
            raise self.illegal(at, action, "there is no such copy to wait for")

    def release(self, at: int, action: MemoryAction) -> None:
        s = action.target
        for tier in list(self.held[s]) if action.kind == "free" else [action.tier]:
            if tier not in self.held[s]:
                raise self.illegal(at, action, f"it holds no bytes in {tier}")
            if self.copied(s, tier):
                raise self.illegal(at, action, f"a copy of it in {tier} is still running")
            if tier == "device" and self.used(s):
                raise self.illegal(at, action, "it is in use by other ranks")
            self.drop(s, tier, at + 1)

    def check_end(self, homes: tuple[MemoryTier, ...]) -> None:
        operators = self.program.operators
        for index, op in enumerate(operators):
            if index not in self.seen:
                raise MemoryPlanInvalid(f"operator {index} ({op.name}) never runs")
        for index in self.communicating:
            name = operators[index].name
            raise MemoryPlanInvalid(
                f"`{name}` is never joined, so the step could end before it has"
            )
        for s, storage in enumerate(self.program.storages):
            home = homes[s] if storage.persistent else "device"
            want = {home: self.version[s]} if storage.at_end else {}
            if self.held[s] != want or self.in_flight[s]:
                raise MemoryPlanInvalid(
                    f"{self.name(s)} ends the step in the wrong place",
                    got=f"{self.held[s]}, copies running: {self.in_flight[s]}",
                    allowed=str(want),
                )


def replay(
    program: MemoryProgram, homes: tuple[MemoryTier, ...], actions: Iterable[MemoryAction]
) -> Replay:
    """Walk the actions and check each of them.

    Bytes are allocated in program order: a copy allocates its destination when issued, `detach` and `free` release
    bytes, and the results of an operator are allocated before it runs. The profile does not depend on copy speed.

    Checks:
        * operands are on the device with their latest content;
        * nothing is released or written under a running copy, or before the `join` of a collective;
        * the results of a collective are not read before its `join`;
        * a recomputed operator reads the contents of its first run;
        * every operator runs once;
        * persistent storages end in their home tier with their latest content.

    Raises:
        MemoryPlanInvalid: HP404, naming the first illegal action.
    """
    walk = _Walk(program)
    for index, storage in enumerate(program.storages):
        if storage.at_start:
            walk.take(index, homes[index] if storage.persistent else "device", 0, 0)
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
        releases = action.kind in ("detach", "free")
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
            walk.release(at, action)  # the bytes are still taken during the action
    walk.check_end(homes)
    for index in list(walk.since):
        walk.drop(index, "device", len(profile))
    return Replay(
        walk.peak,
        best_at,
        tuple(profile),
        copied,
        tuple(walk.stays),
        recompute_s,
        dict(walk.buffers.most),
    )


_LIMITS: Final = Limits(256 * MiB, num_elements=20_000_000)
"""Limits of the file of a plan, enough for about a million actions."""


@dataclass(frozen=True)
class MemoryPlan:
    """Program in a chosen order, with residency actions and static device addresses.

    Attributes:
        program: The operators.
        homes: Tier of every persistent storage between steps; `device` for all others.
        actions: The emitted program.
        seconds: Simulated seconds of the step, copies included.
        choices: Decisions, one entry per offloaded or recomputed gap.
        statement: Explanation by the planner: beneficial, useless and illegal decisions, with reasons.
        addresses: Every live range on the device with its offset in the arena.
        arena_bytes: Size of the arena.
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
        """The plan walked once; raises HP404 when an action is illegal."""
        return replay(self.program, self.homes, self.actions)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes per tier, by replay; on the device those of the storages that live at the same time."""
        return self.replayed.peak_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes of the plan: the arena and the staging buffers of results."""
        return self.arena_bytes + self.program.staging_bytes

    @cached_property
    def dram_bytes(self) -> int:
        """Host bytes of the plan: slabs for the maximum of concurrent buffers of every size."""
        return slab_bytes(self.replayed.host_buffers)

    def to_json(self) -> str:
        """Return the plan as one JSON document; equal plans give equal text."""
        return json.dumps(encode(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> MemoryPlan:
        """Read a plan back and replay it, so a damaged one is refused.

        Raises:
            MemoryPlanInvalid: HP404 when the text is not a plan or its actions are illegal.
        """
        try:
            plan = decode(MemoryPlan, parse_json(text, _LIMITS))
        except ValueError as error:
            raise MemoryPlanInvalid("the memory plan cannot be read", got=str(error)) from error
        _ = plan.replayed
        return plan

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        write_text(path, self.to_json() + "\n")
