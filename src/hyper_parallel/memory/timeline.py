"""Times of the actions of a memory plan, as a task graph for `sim.simulate` and as a clock, and figures of a timeline.

Every action is one task on the compute lane, which issues the actions in program order. An operator that runs there
takes its seconds, every other action none. The other lanes are serial and work in the order of issue; a copy also
waits for the task that fills its source. Collectives are on `communication`. A `wait` or `join` on the compute
lane waits for the task it names. Bytes change where an action is issued: the counters are the bytes allocated in every
tier.

Emission asks for the time at which an action would end, thousands of times per plan, so it cannot build and simulate a
task graph. `ProgramClock` applies the same rules one action at a time, and a test holds both to the same times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hyper_parallel.ir import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    Counter,
    MemoryAction,
    MemoryPlan,
    MemoryProgram,
    MemoryTier,
    Span,
    StorageKind,
    Task,
    TaskGraph,
    Timeline,
)
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.sim import Schedule, simulate

_WAIT, _ISSUE = "wait", "issue"  # kinds of tasks without seconds of their own


def predicted_timeline(plan: MemoryPlan, machine: MemoryMachine) -> Timeline:
    """Return the timeline of a plan's step: spans of all lanes, waits of the compute lane, and bytes of every tier.

    Its end includes copies that outlast the compute lane.
    """
    timeline = simulate(plan_tasks(plan, machine))
    spans, free_s = [], 0.0
    for span in timeline.spans:
        if span.lane == "compute":
            waited_s, begin_s, free_s = span.start_s - free_s, free_s, span.end_s
            if span.category == _WAIT and waited_s > 0:
                spans.append(replace(span, start_s=begin_s, duration_s=waited_s))
            if span.category in (_WAIT, _ISSUE):
                continue
        spans.append(span)
    return Timeline("simulated", tuple(spans), timeline.counters)


def plan_tasks(plan: MemoryPlan, machine: MemoryMachine) -> TaskGraph:
    """Return the task graph of a plan; task n on the lane `compute` is action n."""
    builder = _PlanGraph(plan, machine)
    for action in plan.actions:
        builder.add(action)
    return TaskGraph(tuple(builder.tasks), initial_bytes=builder.initial_bytes)


class _PlanGraph:
    """Builder of a task graph from actions; it remembers the task that filled each storage."""

    def __init__(self, plan: MemoryPlan, machine: MemoryMachine) -> None:
        self._program, self._machine = plan.program, machine
        self.tasks: list[Task] = []
        self._issued: tuple[int, ...] = ()  # the compute lane's last task
        self._arrival: dict[tuple[int, str], int] = {}  # storage, tier -> task that filled it
        self._done: dict[int, int] = {}  # operator -> its task outside the compute lane
        self._resident: list[set[MemoryTier]] = [
            {home} if storage.at_start else set()
            for storage, home in zip(plan.program.storages, plan.homes, strict=True)
        ]
        self.initial_bytes: dict[str, int] = dict.fromkeys(MEMORY_TIERS, 0)
        for size, tiers in zip(plan.program.sizes, self._resident, strict=True):
            for tier in tiers:
                self.initial_bytes[tier] += size

    def add(self, action: MemoryAction) -> None:
        """Add the compute lane's task of an action, and the task it starts on another lane."""
        kind, target, before = action.kind, action.target, self._issued
        if kind in OF_OPERATORS:
            operator = self._program.operators[target]
            name = operator.name
            if kind == "join":
                self._compute(f"wait {name}", 0.0, _WAIT, action, (self._done[target],))
            elif operator.group:
                self._compute(name, operator.seconds, _ISSUE, action)
                comm = "communication"
                self._done[target] = self._append(comm, name, operator.comm_s, comm, before)
            else:
                self._compute(name, operator.seconds, kind, action)
            return
        storage = self._program.storages[target]
        if kind == "wait":
            arrival = self._arrival[target, action.tier]
            self._compute(f"wait {storage.name}", 0.0, _WAIT, action, (arrival,))
            return
        self._compute(storage.name, 0.0, _ISSUE, action)
        if kind in COPIES:
            source, destination = COPIES[kind]
            filled_by = self._arrival.get((target, source))
            deps = before if filled_by is None else (*before, filled_by)
            seconds = self._machine.channel(kind).seconds(storage.num_bytes)
            self._arrival[target, destination] = self._append(
                kind, storage.name, seconds, "copy", deps
            )

    def _compute(
        self, name: str, seconds: float, kind: str, action: MemoryAction, deps: tuple[int, ...] = ()
    ) -> None:
        """Add a task of the compute lane; it carries the change in bytes of the action."""
        task = self._append("compute", name, seconds, kind, deps, self._bytes(action))
        self._issued = (task,)

    def _append(
        self,
        lane: str,
        name: str,
        seconds: float,
        kind: str,
        deps: tuple[int, ...],
        at_start: tuple[tuple[str, int], ...] = (),
    ) -> int:
        """Add a task and return its index."""
        nanoseconds = round(seconds * 1e9)
        self.tasks.append(Task(name, lane, nanoseconds, kind, deps, at_start=at_start))
        return len(self.tasks) - 1

    def _bytes(self, action: MemoryAction) -> tuple[tuple[str, int], ...]:
        """Return the change in bytes of every tier where an action is issued."""
        kind, target, sizes = action.kind, action.target, self._program.sizes
        if kind in OF_OPERATORS:
            results = self._program.operators[target].allocs if kind in ("run", "recompute") else ()
            allocated = sum(sizes[s] for s in results if "device" not in self._resident[s])
            for s in results:
                self._resident[s].add("device")
            return (("device", allocated),) if allocated else ()
        tiers = self._resident[target]
        if kind in COPIES and (tier := COPIES[kind][1]) not in tiers:
            tiers.add(tier)
            return ((tier, sizes[target]),)
        if kind not in ("detach", "free"):
            return ()
        released = tiers & {action.tier} if kind == "detach" else set(tiers)
        tiers -= released
        return tuple((tier, -sizes[target]) for tier in sorted(released))


def peak_by_kind(plan: MemoryPlan) -> dict[StorageKind, int]:
    """Return the device bytes at the peak by kind of storage, largest first."""
    peak_action = plan.replayed.peak_action
    result: dict[StorageKind, int] = {}
    for stay in plan.replayed.residency:
        if stay.start <= peak_action < stay.stop:
            kind = plan.program.storages[stay.storage].kind
            result[kind] = result.get(kind, 0) + plan.program.sizes[stay.storage]
    return dict(sorted(result.items(), key=lambda item: -item[1]))


def summarise(timeline: Timeline, plan: MemoryPlan) -> Timeline:
    """Return a timeline of a plan that is short enough to draw.

    Neighboring operators of one phase become one span; copies are named after the kind of their storage; counters keep
    only changes.
    """
    operators = plan.program.operators
    runs = iter(
        [
            a
            for a in plan.actions
            if a.kind in ("run", "recompute") and not operators[a.target].group
        ]
    )
    copies = {kind: iter([a for a in plan.actions if a.kind == kind]) for kind in COPIES}
    spans: list[Span] = []
    last: Span | None = None
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
            operator = operators[next(runs).target]
            name = "recompute" if span.category == "recompute" else operator.phase
        is_adjacent = (
            last is not None and last.name == name and last.end_s >= span.start_s * (1 - 1e-9)
        )
        if last is not None and is_adjacent:
            last = replace(last, duration_s=span.end_s - last.start_s)
            spans[-1 - next(i for i, x in enumerate(reversed(spans)) if x.lane == "compute")] = last
        else:
            last = Span("compute", name, span.start_s, span.duration_s, name)
            spans.append(last)
    samples: list[Counter] = []
    level: dict[str, float] = {}
    for sample in timeline.counters:
        if level.get(sample.lane) != sample.value:
            level[sample.lane] = sample.value
            samples.append(sample)
    return Timeline(timeline.kind, tuple(spans), tuple(samples))


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
        machine: Channels; None: no action copies.

    Attributes:
        wait_s: Seconds the compute lane waited for copies.
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
            self.join_s += self.stand_until(self._done_s[target])

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
