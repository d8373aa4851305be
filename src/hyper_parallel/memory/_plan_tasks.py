"""A memory plan as a task graph, ready for `ir.simulate`: lanes for computing, each copy direction, ranks and host.

Every action is one task on the compute lane, which issues them in program order: an operator that runs there takes its
seconds, everything else none. Beside it are serial lanes that take their work in the order of issue. A copy also waits
for what fills its source. What other ranks take part in is on `communication`, an update in host memory, which waits
for all that it uses, on `host`. A `wait` or `join` on the compute lane waits for the task it names. Bytes change where
an action is issued: the counters are the bytes taken in every tier.
"""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.ir import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    MemoryAction,
    MemoryPlan,
    MemoryTier,
    Task,
    TaskGraph,
    Timeline,
    simulate,
)
from hyper_parallel.memory.memory_machine import MemoryMachine

_WAIT, _ISSUE = "wait", "issue"  # kinds of tasks without seconds of their own


def predicted_timeline(plan: MemoryPlan, machine: MemoryMachine) -> Timeline:
    """The step of a plan: spans of all lanes, the compute lane's waits among them, and bytes in each tier.

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
    """The task graph of a plan; its n-th task on the lane `compute` is action n."""
    builder = _PlanGraph(plan, machine)
    for action in plan.actions:
        builder.add(action)
    return TaskGraph(tuple(builder.tasks), initial_bytes=builder.initial_bytes)


class _PlanGraph:
    """Adds the tasks of one action after another, remembering which task made what."""

    def __init__(self, plan: MemoryPlan, machine: MemoryMachine) -> None:
        self._program, self._machine = plan.program, machine
        self.tasks: list[Task] = []
        self._issued: tuple[int, ...] = ()  # the compute lane's last task
        self._arrival: dict[tuple[int, str], int] = {}  # storage, tier -> task that filled it
        self._done: dict[int, int] = {}  # operator -> its task beside the compute lane
        self._held: list[set[MemoryTier]] = [
            {home} if storage.at_start else set()
            for storage, home in zip(plan.program.storages, plan.homes, strict=True)
        ]
        self.initial_bytes: dict[str, int] = dict.fromkeys(MEMORY_TIERS, 0)
        for size, tiers in zip(plan.program.sizes, self._held, strict=True):
            for tier in tiers:
                self.initial_bytes[tier] += size

    def add(self, action: MemoryAction) -> None:
        """Add the compute lane's task of an action, and the one it starts on another lane."""
        kind, target, before = action.kind, action.target, self._issued
        if kind in OF_OPERATORS:
            operator = self._program.operators[target]
            name = operator.name
            if kind == "join":
                self._compute(f"wait {name}", 0.0, _WAIT, action, (self._done[target],))
            elif kind == "update":
                self._compute(name, 0.0, _ISSUE, action)
                filled = ((s, "dram") for s in operator.touched)
                deps = (*before, *(self._arrival[at] for at in filled if at in self._arrival))
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
        """The compute lane's task; it carries the bytes that the action takes and gives back."""
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
        nanoseconds = round(seconds * 1e9)
        self.tasks.append(Task(name, lane, nanoseconds, kind, deps, at_start=at_start))
        return len(self.tasks) - 1

    def _bytes(self, action: MemoryAction) -> tuple[tuple[str, int], ...]:
        """Change in bytes of every tier where an action is issued."""
        kind, target, sizes = action.kind, action.target, self._program.sizes
        if kind in OF_OPERATORS:
            made = self._program.operators[target].allocs if kind in ("run", "recompute") else ()
            taken = sum(sizes[s] for s in made if "device" not in self._held[s])
            for s in made:
                self._held[s].add("device")
            return (("device", taken),) if taken else ()
        held = self._held[target]
        if kind in COPIES and (tier := COPIES[kind][1]) not in held:
            held.add(tier)
            return ((tier, sizes[target]),)
        if kind not in ("detach", "free"):
            return ()
        left = held & {action.tier} if kind == "detach" else set(held)
        held -= left
        return tuple((tier, -sizes[target]) for tier in sorted(left))
