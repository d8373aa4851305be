"""Simulated times of the actions of a memory plan, the timeline of a plan, and its summary.

A lane is a serial queue of work: one for computation, one per copy direction, one for communication. The compute lane
issues the actions in program order. An operator on the compute lane takes its seconds, every other action takes no
time. The other lanes work in the order of issue; a copy also waits for the copy that fills its source. A `wait` or
`join` blocks the compute lane until the named copy or collective ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hyper_parallel.ir import (
    COPIES,
    Counter,
    MemoryAction,
    MemoryPlan,
    MemoryProgram,
    Residency,
    Span,
    StorageKind,
    Timeline,
)
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.sim import Schedule


def predicted_timeline(plan: MemoryPlan, machine: MemoryMachine) -> Timeline:
    """Return the timeline of a plan's step: spans on all lanes, waits of the compute lane, and bytes in every tier.

    Bytes change when an action is issued. The end of the timeline includes copies that outlast the compute lane.
    """
    program, residency = plan.program, Residency(plan.program)
    for s, storage in enumerate(program.storages):
        if storage.at_start:
            residency.allocate(s, plan.homes[s])
    spans = list[Span]()
    counters = [Counter(tier, 0.0, live) for tier, live in residency.live.items()]
    clock = ProgramClock(program, machine)
    for action in plan.actions:
        begin_s, before = clock.now_s, dict(residency.live)
        residency.apply(action)
        counters += [Counter(tier, begin_s, live) for tier, live in residency.live.items() if live != before[tier]]
        clock.apply(action)
        span = _span(program, machine, clock, action, begin_s)
        if span is not None:
            spans.append(span)
    return Timeline("simulated", tuple(spans), tuple(counters))


def _span(
    program: MemoryProgram, machine: MemoryMachine, clock: ProgramClock, action: MemoryAction, begin_s: float
) -> Span | None:
    """Return the span of an action that `clock` has just applied, issued at `begin_s`; None if no span is shown."""
    kind, target = action.kind, action.target
    if kind in COPIES:
        storage, destination = program.storages[target], COPIES[kind][1]
        seconds = machine.channel(kind).seconds(storage.num_bytes)
        end_s = clock.arrival_s[target, destination]
        return Span(kind, storage.name, end_s - seconds, seconds, "copy")
    if kind in ("wait", "join"):
        waited_s = clock.now_s - begin_s
        names = program.storages if kind == "wait" else program.operators
        name = f"wait {names[target].name}"
        return Span("compute", name, begin_s, waited_s, "wait") if waited_s > 0 else None
    if kind not in ("run", "recompute"):
        return None
    operator = program.operators[target]
    if not operator.group:
        return Span("compute", operator.name, begin_s, operator.seconds, kind)
    begin_s = clock.done_s[target] - operator.comm_s
    return Span("communication", operator.name, begin_s, operator.comm_s, "communication")


def peak_by_kind(plan: MemoryPlan) -> dict[StorageKind, int]:
    """Return a dict from kind of storage to its device bytes at the peak, largest first."""
    peak_action = plan.replayed.peak_action
    result: dict[StorageKind, int] = {}
    for stay in plan.replayed.residency:
        if stay.start <= peak_action < stay.stop:
            kind = plan.program.storages[stay.storage].kind
            result[kind] = result.get(kind, 0) + plan.program.sizes[stay.storage]
    return dict(sorted(result.items(), key=lambda item: -item[1]))


def summarise(timeline: Timeline, plan: MemoryPlan) -> Timeline:
    """Return a shorter timeline of a plan, for a chart.

    Consecutive operators of one phase are merged, copies are named by storage kind, and samples of counters that repeat
    the previous value are omitted.
    """
    operators = plan.program.operators
    runs = iter(
        operators[a.target] for a in plan.actions if a.kind in ("run", "recompute") and not operators[a.target].group
    )
    copies = {kind: iter([a for a in plan.actions if a.kind == kind]) for kind in COPIES}
    spans: list[Span] = []
    last = -1  # index in `spans` of the newest span of the compute lane
    for span in timeline.spans:
        if span.lane == "communication":
            spans.append(replace(span, name=span.name.rpartition(".")[2].strip("_")))
            continue
        if span.lane != "compute":
            kind = plan.program.storages[next(copies[span.lane]).target].kind
            spans.append(replace(span, name=kind, category=span.lane))
            continue
        name = "wait"
        if span.category != "wait":
            phase = next(runs).phase
            name = "recompute" if span.category == "recompute" else phase
        before = spans[last] if last >= 0 else None
        if before and before.name == name and before.end_s >= span.start_s * (1 - 1e-9):
            spans[last] = replace(before, duration_s=span.end_s - before.start_s)
        else:
            last = len(spans)
            spans.append(Span("compute", name, span.start_s, span.duration_s, name))
    samples: list[Counter] = []
    level: dict[str, float] = {}
    for sample in timeline.counters:
        if level.get(sample.lane) != sample.value:
            level[sample.lane] = sample.value
            samples.append(sample)
    return Timeline(timeline.kind, tuple(spans), tuple(samples))


@dataclass(frozen=True, slots=True)
class Copied:
    """Totals of one kind of copy: number, bytes, and seconds for which the lane was busy."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def plus(self, num_bytes: int, seconds: float) -> Copied:
        """Return the totals with one more copy."""
        return Copied(self.count + 1, self.num_bytes + num_bytes, self.seconds + seconds)

    def bytes_s(self, latency_s: float) -> float | None:
        """Return the bandwidth in bytes/s without latencies; None without bytes, or if latencies take all seconds."""
        moving = self.seconds - self.count * latency_s
        return self.num_bytes / moving if self.num_bytes and moving > 0 else None


class ProgramClock:
    """Simulated clock of one step, advanced action by action.

    `machine` has the channels of the copies; None is allowed if no action is a copy.

    Attributes:
        wait_s: Seconds that the compute lane waited for copies.
        join_s: Seconds that the compute lane waited for collectives and messages.
        copied: Dict from kind of copy to the totals of the copies so far.
        arrival_s: Dict from (storage, tier) to the time at which the latest copy into the tier is complete.
        done_s: Dict from operator on the communication lane to the time at which it ends.
    """

    def __init__(self, program: MemoryProgram, machine: MemoryMachine | None = None) -> None:
        self._program = program
        self._machine = machine
        self._schedule = Schedule()
        self._free = self._schedule.free
        self.wait_s = 0.0
        self.join_s = 0.0
        self.copied = dict.fromkeys(COPIES, Copied())
        self.arrival_s: dict[tuple[int, str], float] = {}
        self.done_s: dict[int, float] = {}

    @property
    def now_s(self) -> float:
        """Current time on the compute lane in seconds."""
        return self._free["compute"]  # type: ignore[no-any-return]

    def apply(self, action: MemoryAction) -> None:
        """Advance the clock by one action."""
        kind, target = action.kind, action.target
        if kind in ("run", "recompute"):
            operator = self._program.operators[target]
            if operator.group:
                self.done_s[target] = self._append("communication", operator.comm_s)
            self._schedule.append("compute", operator.seconds)
        elif kind in COPIES:
            self._copy(kind, target)
        elif kind == "wait":
            self.wait_s += self.wait_until(self.arrival_s[target, action.tier])
        elif kind == "join":
            self.join_s += self.wait_until(self.done_s[target])

    def wait_until(self, time_s: float) -> float:
        """Let the compute lane wait until a time, and return the seconds that it waited; 0 if the time has passed."""
        return float(self._schedule.hold("compute", time_s))

    def idle(self, kind: str) -> bool:
        """Return whether the lane of a kind of copy, such as `store`, is idle now."""
        return bool(self._free[kind] <= self._free["compute"])

    def _append(self, lane: str, seconds: float, *ready_s: float) -> float:
        self._schedule.append(lane, seconds, (self._free["compute"], *ready_s))
        return self._free[lane]  # type: ignore[no-any-return]

    def _copy(self, kind: str, target: int) -> None:
        assert self._machine is not None, "a copy needs a channel"
        source, destination = COPIES[kind]
        num_bytes = self._program.storages[target].num_bytes
        arrived = self.arrival_s.get((target, source), 0.0)
        seconds = self._machine.channel(kind).seconds(num_bytes)
        self.arrival_s[target, destination] = self._append(kind, seconds, arrived)
        self.copied[kind] = self.copied[kind].plus(num_bytes, seconds)


def clocked(program: MemoryProgram, machine: MemoryMachine | None, actions: tuple[MemoryAction, ...]) -> ProgramClock:
    """Return a clock advanced by all of `actions`."""
    clock = ProgramClock(program, machine)
    for action in actions:
        clock.apply(action)
    return clock
