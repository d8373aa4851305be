"""Time of an emitted program: one compute lane and one serial lane per copy direction.

The compute lane issues every action in program order. A copy starts when it has been issued, its lane is free and its
source has arrived; `wait` stops the compute lane until a copy is done. The same clock drives the emitter, so what the
emitter saw is what the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.ir import COPIES, MemoryAction, MemoryProgram
from hyper_parallel.ir.timeline import Span, Timeline
from hyper_parallel.offload._machine import MemoryMachine


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies of one kind: their number, their bytes, and the seconds their lane was busy."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def bytes_s(self, latency_s: float) -> float | None:
        """Bytes per second after the latency of every copy; None when that cannot be told."""
        moving = self.seconds - self.count * latency_s
        return self.num_bytes / moving if self.num_bytes and moving > 0 else None


class Clock:
    """Virtual time of one step.

    Attributes:
        now_s: Time on the compute lane.
        wait_s: Seconds the compute lane stood still.
        copied: What moved so far, by kind of copy.
        spans: Intervals of work, recorded when asked for.
    """

    def __init__(
        self, program: MemoryProgram, machine: MemoryMachine, *, record: bool = False
    ) -> None:
        self.program = program
        self.machine = machine
        self.now_s = 0.0
        self.wait_s = 0.0
        self.copied = dict.fromkeys(COPIES, Copied())
        self.spans: list[Span] | None = [] if record else None
        self._lane_free = dict.fromkeys(COPIES, 0.0)
        self._arrival: dict[tuple[int, str], float] = {}

    def apply(self, action: MemoryAction) -> None:
        """Advance by one action."""
        if action.kind in ("run", "recompute"):
            op = self.program.operators[action.target]
            self._span("compute", op.name, self.now_s, op.seconds, action.kind)
            self.now_s += op.seconds
        elif action.kind in COPIES:
            self._copy(action)
        elif action.kind == "wait":
            arrival = self._arrival[action.target, action.tier]
            if arrival > self.now_s:
                name = self.program.storages[action.target].name
                self._span("compute", f"wait {name}", self.now_s, arrival - self.now_s, "wait")
                self.wait_s += arrival - self.now_s
                self.now_s = arrival

    def arrival_s(self, storage: int, tier: str) -> float:
        """When the newest copy of a storage into a tier is complete."""
        return self._arrival[storage, tier]

    def idle(self, kind: str, within_s: float = 0.0) -> bool:
        """The lane of a kind of copy has nothing to do, now or so many seconds from now."""
        return self._lane_free[kind] <= self.now_s + within_s

    def _copy(self, action: MemoryAction) -> None:
        src, dst = COPIES[action.kind]
        storage = self.program.storages[action.target]
        start = max(
            self.now_s,
            self._lane_free[action.kind],
            self._arrival.get((action.target, src), 0.0),
        )
        seconds = self.machine.channel(action.kind).seconds(storage.num_bytes)
        self._lane_free[action.kind] = self._arrival[action.target, dst] = start + seconds
        before = self.copied[action.kind]
        self.copied[action.kind] = Copied(
            before.count + 1, before.num_bytes + storage.num_bytes, before.seconds + seconds
        )
        self._span(action.kind, storage.name, start, seconds, "copy")

    def _span(self, lane: str, name: str, start_s: float, seconds: float, category: str) -> None:
        if self.spans is not None:
            self.spans.append(Span(lane, name, start_s, seconds, category))


def simulate(
    program: MemoryProgram, actions: Iterable[MemoryAction], machine: MemoryMachine
) -> Timeline:
    """Timeline of an emitted program; its end includes copies that outlast the compute lane."""
    clock = Clock(program, machine, record=True)
    for action in actions:
        clock.apply(action)
    return Timeline("simulated", tuple(clock.spans or ()))
