"""Timeline of a memory plan: its task graph for `sim.simulate`, and the figures drawn from it.

Every action is one task on the compute lane, which issues the actions in program order. An operator that runs there
takes its seconds, every other action none. The other lanes are serial and work in the order of issue; a copy also
waits for the task that fills its source. Collectives are on `communication`. An update in host memory is on `host` and
waits for all its operands. A `wait` or `join` on the compute lane waits for the task it names. Bytes change where an
action is issued: the counters are the bytes allocated in every tier.
"""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.ir import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    Counter,
    MemoryAction,
    MemoryPlan,
    MemoryTier,
    Span,
    StorageKind,
    Task,
    TaskGraph,
    Timeline,
)
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.sim import simulate

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
            elif kind == "update":
                self._compute(name, 0.0, _ISSUE, action)
                filled = ((s, "dram") for s in operator.touched)
                deps = (*before, *(self._arrival[key] for key in filled if key in self._arrival))
                task = self._append("host", name, self._machine.host_seconds(operator), kind, deps)
                self._done[target] = task
                self._arrival.update(((s, "dram"), task) for s in operator.writes)
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
        if span.lane == "host":
            spans.append(replace(span, name="update", category="host"))
            continue
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
