"""Task graph of a memory plan for the event simulator: an account of times and bytes that is independent of the clock.

Every action is one task on the compute lane, which issues the actions in program order. An operator that runs there
takes its seconds, every other action none. The other lanes are serial and work in the order of issue; a copy also waits
for the task that fills its source. A `wait` or `join` on the compute lane waits for the task it names.
"""

from hyper_parallel.ir import (
    COPIES,
    MEMORY_TIERS,
    OF_OPERATORS,
    MemoryAction,
    MemoryPlan,
    MemoryTier,
    Task,
    TaskGraph,
)
from hyper_parallel.memory import MemoryMachine

_WAIT, _ISSUE = "wait", "issue"  # kinds of tasks without seconds of their own


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
            self._arrival[target, destination] = self._append(kind, storage.name, seconds, "copy", deps)

    def _compute(self, name: str, seconds: float, kind: str, action: MemoryAction, deps: tuple[int, ...] = ()) -> None:
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
