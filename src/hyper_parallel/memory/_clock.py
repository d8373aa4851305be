"""Translator of memory actions to `sim.Schedule`: `simulate(plan_tasks(...))` one action at a time.

Emission asks for the time at which an action would end, thousands of times per plan, so it cannot build and simulate a
task graph. `_timeline.py` has the same rules as a task graph, and a test holds both to the same times.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.ir import COPIES, MemoryAction, MemoryProgram
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.sim import Schedule


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies of one kind: their number, their bytes, and the seconds their lane was busy."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def bytes_s(self, latency_s: float) -> float | None:
        """Return bytes per second after the latency of every copy; None when that cannot be derived."""
        moving = self.seconds - self.count * latency_s
        return self.num_bytes / moving if self.num_bytes and moving > 0 else None


class ProgramClock:
    """Virtual time of one step.

    Args:
        program: Program that the actions refer to.
        machine: Channels and host; None: no action copies.

    Attributes:
        wait_s: Seconds the compute lane waited for copies and for updates in host memory.
        join_s: Seconds the compute lane waited for other ranks.
    """

    def __init__(self, program: MemoryProgram, machine: MemoryMachine | None = None) -> None:
        self._program = program
        self._machine = machine
        self._schedule = Schedule()
        self._free = self._schedule.free
        self.wait_s = 0.0
        self.join_s = 0.0
        self._copied: dict[str, list[tuple[int, float]]] = {kind: [] for kind in COPIES}
        self._arrival_s: dict[tuple[int, str], float] = {}
        self._done_s: dict[int, float] = {}  # operators begun outside the compute lane

    @property
    def now_s(self) -> float:
        """Time on the compute lane."""
        return self._free["compute"]  # type: ignore[no-any-return]

    def apply(self, action: MemoryAction) -> None:
        """Advance by one action."""
        kind, target = action.kind, action.target
        if kind in ("run", "recompute"):
            operator = self._program.operators[target]
            if operator.group:
                self._done_s[target] = self._append("communication", operator.comm_s)
            self._schedule.append("compute", operator.seconds)
        elif kind in COPIES:
            self._copy(kind, target)
        elif kind == "wait":
            self.wait_s += self.stand_until(self._arrival_s[target, action.tier])
        elif kind == "join":
            stood_s = self.stand_until(self._done_s[target])
            if self._program.operators[target].group:
                self.join_s += stood_s
            else:
                self.wait_s += stood_s
        elif kind == "update":
            self._update(target)

    @property
    def copied(self) -> dict[str, Copied]:
        """Copies so far, by kind."""
        return {
            kind: Copied(len(each), sum(n for n, _ in each), sum(s for _, s in each))
            for kind, each in self._copied.items()
        }

    def arrival_s(self, storage: int, tier: str) -> float:
        """Return the time at which the newest copy of a storage into a tier is complete."""
        return self._arrival_s[storage, tier]

    def done_s(self, index: int) -> float:
        """Return the time at which an operator outside the compute lane ends."""
        return self._done_s[index]

    def stand_until(self, time_s: float) -> float:
        """Advance the compute lane to a time and return the seconds that it waited."""
        return float(self._schedule.hold("compute", time_s))

    def idle(self, kind: str) -> bool:
        """Return whether the lane of a kind of copy is idle now."""
        return bool(self._free[kind] <= self._free["compute"])

    def _append(self, lane: str, seconds: float, *ready_s: float) -> float:
        """Append work that the compute lane issues now, and return its end."""
        self._schedule.append(lane, seconds, (self._free["compute"], *ready_s))
        return self._free[lane]  # type: ignore[no-any-return]

    def _update(self, index: int) -> None:
        assert self._machine is not None, "an update needs a host"
        operator = self._program.operators[index]
        arrived = (self._arrival_s.get((s, "dram"), 0.0) for s in operator.touched)
        end = self._append("host", self._machine.host_seconds(operator), *arrived)
        self._done_s[index] = end
        for s in operator.writes:
            self._arrival_s[s, "dram"] = end

    def _copy(self, kind: str, target: int) -> None:
        assert self._machine is not None, "a copy needs a channel"
        source, destination = COPIES[kind]
        num_bytes = self._program.storages[target].num_bytes
        arrived = self._arrival_s.get((target, source), 0.0)
        seconds = self._machine.channel(kind).seconds(num_bytes)
        self._arrival_s[target, destination] = self._append(kind, seconds, arrived)
        self._copied[kind].append((num_bytes, seconds))


def clocked(
    program: MemoryProgram, machine: MemoryMachine | None, actions: tuple[MemoryAction, ...]
) -> ProgramClock:
    """Return the clock after these actions."""
    clock = ProgramClock(program, machine)
    for action in actions:
        clock.apply(action)
    return clock
