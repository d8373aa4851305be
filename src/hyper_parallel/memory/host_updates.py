"""Optimizer updates in host memory: eligible operators, sets worth a try, consequences, and updates in flight.

An update on the device needs its state there: parameter, moments and master weights are copied in and out. In host
memory they stay in DRAM; only the gradient is stored, and only results that the device uses are prefetched. The host
works in parallel to the compute lane, on one operator after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from hyper_parallel.ir import Choice, MemoryProgram, Operator, Storage
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.def_use import dependencies
from hyper_parallel.memory.memory_machine import Channel, MemoryMachine


@dataclass(frozen=True)
class HostUpdates:
    """Operators of one order that run in host memory, and their consequences.

    Attributes:
        operators: Operator indices.
        dram_state: Storages with their home in DRAM, with the ascending positions at which they change there.
        last_read: Position of the last of these operators that uses each storage.
        gaps: Gaps that follow from these updates, whatever else is chosen.
    """

    operators: frozenset[int] = frozenset()
    dram_state: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    last_read: Mapping[int, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()

    @classmethod
    def from_operators(
        cls,
        program: MemoryProgram,
        order: Sequence[int],
        operators: Collection[int],
        uses: Sequence[Sequence[int]],
    ) -> HostUpdates:
        """Return the consequences of running some operators in host memory.

        Args:
            program: All operators.
            order: Order of the operators.
            operators: Operators in host memory.
            uses: Positions at which each storage is used on the device.
        """
        dram_state: dict[int, list[int]] = {}
        last_read: dict[int, int] = {}
        for position, index in enumerate(order):
            if index in operators:
                for s in program.operators[index].touched:
                    last_read[s] = position
                for s in persistent_operands(program, index):
                    changed = dram_state.setdefault(s, [])
                    if s in program.operators[index].writes:
                        changed.append(position)
        gaps: list[Gap] = []
        n = len(order)
        for s, position in last_read.items():
            device_uses, storage = list(uses[s]), program.storages[s]
            if s in dram_state:
                # A change in host memory makes the device's copy stale between two uses.
                ends = [(-1, device_uses[0]), (device_uses[-1], n)] if device_uses else [(-1, n)]
                stale = [
                    (a, b)
                    for a, b in pairwise(device_uses)
                    if any(a < position < b for position in dram_state[s])
                ]
                gaps += [Gap(s, a, b, "dram") for a, b in (*ends, *stale)]
            elif not storage.at_end and not storage.at_start and device_uses[-1] < position:
                gaps.append(Gap(s, device_uses[-1], n, "dram"))
        fixed = {s: tuple(positions) for s, positions in dram_state.items()}
        return cls(frozenset(operators), fixed, last_read, tuple(gaps))

    def seconds(self, program: MemoryProgram, order: Sequence[int]) -> list[float]:
        """Return the seconds of every position on the compute lane."""
        hosted = self.operators
        return [0.0 if i in hosted else program.operators[i].seconds for i in order]

    def device_writes(self, program: MemoryProgram, order: Sequence[int]) -> dict[int, list[int]]:
        """Return, per storage, the positions that change it on the device."""
        result: dict[int, list[int]] = {}
        for position, index in enumerate(order):
            if index not in self.operators:
                for s in program.operators[index].writes:
                    result.setdefault(s, []).append(position)
        return result

    def earliest_reload(self, gap: Gap) -> int:
        """Return the first position at which a gap's storage may be reloaded, after its last change in host memory."""
        host_writes = [p for p in self.dram_state.get(gap.storage, ()) if gap.first < p < gap.last]
        return max(host_writes, default=gap.first) + 1


def hostable_operators(program: MemoryProgram) -> frozenset[int]:
    """Return the operators that may run in host memory.

    An eligible operator updates optimizer state, allocates no storage and has no fixed order. Its state is changed by
    eligible operators only. Its other written storages have no later use elsewhere (fused optimizers may scale
    gradients in place).
    """
    storages = program.storages
    allocated = {s for op in program.operators for s in op.allocs}

    def may(op: Operator) -> bool:
        return (
            op.phase == "optimizer"
            and not op.allocs
            and not op.ordered
            and not op.group
            and any(storages[s].kind == "optimizer" for s in op.writes)
            and all(
                storages[s].persistent or (s in allocated and not storages[s].at_end)
                for s in op.writes
            )
            and all(s in allocated or storages[s].persistent for s in op.reads)
        )

    return closed_under_conflicts(program, {i for i, op in enumerate(program.operators) if may(op)})


def closed_under_conflicts(program: MemoryProgram, operators: set[int]) -> frozenset[int]:
    """Return the largest subset whose members share no written storage with an operator on the device."""
    members = set(operators)
    while True:
        device_written: set[int] = set()
        last_use: dict[int, int] = {}
        for i, op in enumerate(program.operators):
            if i not in members:
                device_written.update(op.writes)
                last_use.update(dict.fromkeys(op.touched, i))
        conflicting = {
            i
            for i in members
            if any(s in device_written for s in persistent_operands(program, i))
            or any(
                last_use.get(s, -1) > i
                for s in program.operators[i].writes
                if not program.storages[s].persistent
            )
        }
        if not conflicting:
            return frozenset(members)
        members -= conflicting


def persistent_operands(program: MemoryProgram, index: int) -> list[int]:
    """Return the storages of an operator that outlive the step, inputs of the step excluded."""
    storages = program.storages
    return [
        s
        for s in program.operators[index].touched
        if storages[s].persistent and storages[s].kind != "input"
    ]


def device_part(program: MemoryProgram, machine: MemoryMachine) -> MemoryProgram:
    """Return the program without the work that may leave the device.

    Bounds of this program hold for every plan of the whole one. Operators that may run in host memory take no time, and
    neither use nor change bytes on the device.
    """
    if machine.host is None:
        return program
    idle = {
        i: Operator(program.operators[i].name, phase=program.operators[i].phase)
        for i in hostable_operators(program)
    }
    return replace(
        program, operators=tuple(idle.get(i, op) for i, op in enumerate(program.operators))
    )


class UpdatesInFlight:
    """Operators in host memory that were begun while a program is emitted, and the storages they keep in DRAM.

    Args:
        program: All operators.
        host: Operators in host memory.
    """

    def __init__(self, program: MemoryProgram, host: HostUpdates) -> None:
        self._program, self._host = program, host
        self._num_users: dict[int, int] = {}  # storage -> number of operators that still use it
        for index in host.operators:
            for s in program.operators[index].touched:
                self._num_users[s] = self._num_users.get(s, 0) + 1
        self.running: list[int] = []

    def __contains__(self, storage: object) -> bool:
        """Return whether an operator in host memory uses a storage now or later."""
        return storage in self._num_users

    def begin(self, index: int) -> None:
        """Record the begin of an operator."""
        self.running.append(index)

    def users(self, storage: int) -> list[int]:
        """Return operators in flight that use a storage."""
        return [i for i in self.running if storage in self._program.touched[i]]

    def join(self, index: int) -> list[int]:
        """Record the join of an operator; return its operands without a later use in host memory."""
        self.running.remove(index)
        done = []
        for s in self._program.touched[index]:
            self._num_users[s] -= 1
            if not self._num_users[s]:
                del self._num_users[s]
                if s not in self._host.dram_state:
                    done.append(s)
        return done


def host_update_sets(
    program: MemoryProgram, machine: MemoryMachine, order: Sequence[int], slack_s: float
) -> list[tuple[str, frozenset[int]]]:
    """Return labelled sets of updates in host memory that are worth a search: none, two that end in time, all."""
    hostable = hostable_operators(program) if machine.host is not None else frozenset()
    if not hostable:
        return [("", frozenset())]
    result = {
        frozenset[int](): "",
        hostable: ", all updates on the host",
        _updates_in_time(program, machine, order, hostable, slack_s, at_use=False): (
            ", updates that the link and the host carry"
        ),
        _updates_in_time(program, machine, order, hostable, slack_s, at_use=True): (
            ", updates that nothing waits for"
        ),
    }
    return sorted(((name, chosen) for chosen, name in result.items()), key=lambda x: len(x[1]))


def _updates_in_time(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    hostable: frozenset[int],
    slack_s: float,
    *,
    at_use: bool,
) -> frozenset[int]:
    """Return the updates that fit, one by one in the order of their gradients, into the idle time of the lanes.

    An update has to end before the compute lane has run everything else. Its gradient is stored behind the gradients of
    the updates before it, and its results return within a step.

    Args:
        program: All operators.
        machine: Channels and host.
        order: Order of the operators.
        hostable: Updates that may run in host memory.
        slack_s: Seconds by which the step may become longer.
        at_use: Results return for their first use, and no update makes the step longer.
    """
    storages = program.storages
    end_s, now_s = program.seconds + slack_s, 0.0
    due_s: dict[int, float] = {}
    for index in order:
        if index not in hostable:
            for s in program.operators[index].touched:
                due_s.setdefault(s, now_s + slack_s if at_use else end_s)
            now_s += program.operators[index].seconds
    computed_s = now_s
    seen: set[int] = set()  # storages used on the device after a position
    later: dict[int, set[int]] = {}  # results that the device reads in the same step
    for index in reversed(order):
        if index in hostable:
            later[index] = seen.intersection(persistent_operands(program, index))
        else:
            seen.update(program.operators[index].touched)
    now_s = sent_s = host_s = 0.0  # compute time; times at which the lanes are free
    reloads: list[tuple[float, float]] = []  # (due, seconds)
    chosen: set[int] = set()
    for index in order:
        op = program.operators[index]
        if index not in hostable:
            now_s += op.seconds
            continue
        gradients = [s for s in op.touched if not storages[s].persistent]
        results = [s for s in persistent_operands(program, index) if s in due_s]
        sent = max(sent_s, now_s) + sum(_seconds(machine.store, storages[s]) for s in gradients)
        done = max(host_s, sent) + machine.host_seconds(op)
        reload_s = sum(
            _seconds(machine.prefetch, storages[s]) for s in results if s in later[index]
        )
        returns = [(due_s[s], _seconds(machine.prefetch, storages[s])) for s in results]
        if done + reload_s <= (computed_s if at_use else end_s) and _meets_deadlines(
            merged := sorted([*reloads, *returns])
        ):
            sent_s, host_s, reloads = sent, done, merged
            chosen.add(index)
    return closed_under_conflicts(program, chosen)


def _meets_deadlines(reloads: list[tuple[float, float]]) -> bool:
    """Return whether a serial lane that begins with the step keeps all deadlines, sorted ascending."""
    return all(
        end_s <= due_s
        for (due_s, _), end_s in zip(reloads, accumulate(s for _, s in reloads), strict=True)
    )


def defer_host_readers(
    program: MemoryProgram, machine: MemoryMachine, order: tuple[int, ...], hosted: frozenset[int]
) -> tuple[int, ...]:
    """Return the order in which readers of host results wait while the device runs other operators.

    Only optimizer operators without FLOPs are deferred (the copy of a master weight), with the operators that depend on
    them. They run as soon as their operands arrive, or when another operator needs them.
    """
    if not hosted:
        return order
    before = dependencies(program)
    operators, storages = program.operators, program.storages
    now_s = sent_s = host_s = back_s = 0.0
    done_s: dict[int, float] = {}  # by update
    deferred: dict[int, float] = {}  # deferred operator -> arrival of its operands
    result: list[int] = []

    def run(index: int) -> None:
        nonlocal now_s
        for reader in [w for w in deferred if w in before[index]]:
            if reader in deferred:
                run(reader)
        now_s = max(now_s, deferred.pop(index, 0.0)) + operators[index].seconds
        result.append(index)

    for index in order:
        operator = operators[index]
        for reader in [w for w, ready_s in deferred.items() if ready_s <= now_s]:
            if reader in deferred and before[reader].isdisjoint(deferred):
                run(reader)
        if index in hosted:
            gradients = [s for s in operator.touched if not storages[s].persistent]
            sent_s = max(sent_s, now_s) + sum(
                _seconds(machine.store, storages[s]) for s in gradients
            )
            host_s = done_s[index] = max(host_s, sent_s) + machine.host_seconds(operator)
            result.append(index)
            continue
        updates = [i for i in before[index] if i in done_s]
        light = operator.phase == "optimizer" and not (operator.flops or operator.ordered)
        if light and (updates or not before[index].isdisjoint(deferred)):
            changed = {s for i in updates for s in persistent_operands(program, i)}
            for s in changed.intersection(operator.reads):
                back_s = max(back_s, *(done_s[i] for i in updates)) + _seconds(
                    machine.prefetch, storages[s]
                )
            deferred[index] = back_s
            continue
        run(index)
    for index in list(deferred):
        if index in deferred:
            run(index)
    return tuple(result)


def _seconds(channel: Channel, storage: Storage) -> float:
    return channel.seconds(storage.num_bytes)


def update_choices(program: MemoryProgram, host: HostUpdates) -> list[Choice]:
    """Return the choices of a plan that stand for updates in host memory."""
    return [
        Choice(s, "update", positions[0], positions[-1], "dram", "changed in host memory")
        for s, positions in sorted(host.dram_state.items())
        if positions and program.sizes[s]
    ]


def host_statement(program: MemoryProgram, machine: MemoryMachine, host: HostUpdates) -> str:
    """Return the sentence of a plan's statement about updates in host memory."""
    seconds = sum(machine.host_seconds(program.operators[i]) for i in host.operators)
    state = sum(program.sizes[s] for s in host.dram_state)
    num_hostable = len(hostable_operators(program))
    return (
        f"update on host: {len(host.operators)} of {num_hostable} optimizer operators, on "
        f"{state} bytes that stay in host memory, {seconds:.6g} s beside the compute lane; "
        "another processor may round differently"
    )
