"""Time of an emitted program: a compute lane, one per copy direction, one for communication, one for the host.

All lanes are serial. The compute lane issues every action in program order. What other ranks take part in starts when
it is begun and its lane is free; `join` stops the compute lane until it is done. A copy starts when it has been issued,
its lane is free and its source has arrived; `wait` stops the compute lane until a copy is done. An operator in host
memory starts when it has been issued, the host is free and all that it uses has arrived; it ends with a `join` as well.
The same clock drives the emitter, so what the emitter saw is what the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.ir import COPIES, MemoryAction, MemoryActionKind, MemoryProgram
from hyper_parallel.ir.timeline import Span, Timeline
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._talks import TalkLane

TIMELESS = frozenset[MemoryActionKind](("detach", "free"))


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
        wait_s: Seconds the compute lane stood still for copies, and for updates in host memory.
        join_s: Seconds it stood still for other ranks.
        spans: Intervals of work, recorded when asked for.
    """

    def __init__(
        self, program: MemoryProgram, machine: MemoryMachine, *, record: bool = False
    ) -> None:
        self.program = program
        self.machine = machine
        self.now_s = 0.0
        self.wait_s = 0.0
        self.join_s = 0.0
        self.spans: list[Span] | None = [] if record else None
        self._lane_free = dict.fromkeys(COPIES, 0.0)
        self._copied: dict[str, list[tuple[int, float]]] = {kind: [] for kind in COPIES}
        self._arrival: dict[tuple[int, str], float] = {}
        self._talks = TalkLane()
        self._host_free = 0.0
        self._updated: dict[int, float] = {}

    def apply(self, action: MemoryAction) -> None:
        """Advance by one action."""
        if action.kind in ("run", "recompute"):
            op = self.program.operators[action.target]
            if op.group:
                start = self._talks.begin(action.target, op, self.now_s)
                self._span("communication", op.name, start, op.talk_s, "communication")
            else:
                self._span("compute", op.name, self.now_s, op.seconds, action.kind)
            self.now_s += op.seconds
        elif action.kind == "join":
            name = self.program.operators[action.target].name
            stood_s = self._stand(self.joined_s(action.target), name)
            if action.target in self._updated:
                self.wait_s += stood_s
            else:
                self.join_s += stood_s
        elif action.kind in COPIES:
            self._copy(action)
        elif action.kind == "wait":
            name = self.program.storages[action.target].name
            self.wait_s += self._stand(self._arrival[action.target, action.tier], name)
        elif action.kind == "update":
            self._update(action.target)

    @property
    def copied(self) -> dict[str, Copied]:
        """What moved so far, by kind of copy."""
        return {
            kind: Copied(len(each), sum(n for n, _ in each), sum(s for _, s in each))
            for kind, each in self._copied.items()
        }

    def arrival_s(self, storage: int, tier: str) -> float:
        """When the newest copy of a storage into a tier is complete."""
        return self._arrival[storage, tier]

    def joined_s(self, index: int) -> float:
        """When an operator that was begun beside the compute lane is done."""
        return self._updated[index] if index in self._updated else self._talks.done_s(index)

    def _stand(self, until_s: float, name: str) -> float:
        """The compute lane stands still; for how long."""
        seconds = max(until_s - self.now_s, 0.0)
        if seconds:
            self._span("compute", f"wait {name}", self.now_s, seconds, "wait")
            self.now_s = until_s
        return seconds

    def idle(self, kind: str, within_s: float = 0.0) -> bool:
        """The lane of a kind of copy has nothing to do, now or so many seconds from now."""
        return self._lane_free[kind] <= self.now_s + within_s

    def _update(self, index: int) -> None:
        op = self.program.operators[index]
        arrived = (self._arrival.get((s, "dram"), 0.0) for s in op.touched)
        start = max(self.now_s, self._host_free, *arrived)
        seconds = self.machine.host_seconds(op)
        self._host_free = self._updated[index] = start + seconds
        for s in op.writes:
            self._arrival[s, "dram"] = start + seconds
        self._span("host", op.name, start, seconds, "update")

    def _copy(self, action: MemoryAction) -> None:
        src, dst = COPIES[action.kind]
        storage = self.program.storages[action.target]
        arrived = self._arrival.get((action.target, src), 0.0)
        start = max(self.now_s, self._lane_free[action.kind], arrived)
        seconds = self.machine.channel(action.kind).seconds(storage.num_bytes)
        self._lane_free[action.kind] = self._arrival[action.target, dst] = start + seconds
        self._copied[action.kind].append((storage.num_bytes, seconds))
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
