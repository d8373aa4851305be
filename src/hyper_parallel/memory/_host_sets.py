"""Which optimizer updates are worth trying in host memory, and the order of the device's operators around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hyper_parallel.ir import MemoryProgram, Storage
from hyper_parallel.memory.def_use import dependencies
from hyper_parallel.memory.host_updates import hostable, state_of, together
from hyper_parallel.memory.memory_machine import Channel, MemoryMachine


def host_sets(
    program: MemoryProgram, machine: MemoryMachine, order: Sequence[int], slack_s: float
) -> list[tuple[str, frozenset[int]]]:
    """Sets of updates in host memory that are worth trying: none, two that end in time, all."""
    every = hostable(program) if machine.host is not None else frozenset()
    if not every:
        return [("", frozenset())]
    result = {
        frozenset[int](): "",
        every: ", all updates on the host",
        _ending_before(program, machine, order, every, slack_s, at_use=False): (
            ", updates that the link and the host carry"
        ),
        _ending_before(program, machine, order, every, slack_s, at_use=True): (
            ", updates that nothing waits for"
        ),
    }
    return sorted(((name, chosen) for chosen, name in result.items()), key=lambda x: len(x[1]))


def _ending_before(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    every: frozenset[int],
    slack_s: float,
    *,
    at_use: bool,
) -> frozenset[int]:
    """Updates in the order in which their gradients appear, each one that fits into what the lanes have left.

    It has to end before the compute lane has run everything else, with its gradient sent behind those of the ones
    before it; and its results come back within a step.

    Args:
        program: All operators.
        machine: Its channels and its host.
        order: Order of the operators.
        every: Updates that may run in host memory.
        slack_s: Seconds by which the step may become longer.
        at_use: The results come back for their first use, and nothing makes the step longer.
    """
    storages = program.storages
    end_s, now_s = program.seconds + slack_s, 0.0
    due_s: dict[int, float] = {}
    for index in order:
        if index not in every:
            for s in program.operators[index].touched:
                due_s.setdefault(s, now_s + slack_s if at_use else end_s)
            now_s += program.operators[index].seconds
    computed_s = now_s
    seen: set[int] = set()  # used on the device behind a position
    later: dict[int, set[int]] = {}  # what the device needs of an update in the same step
    for index in reversed(order):
        if index in every:
            later[index] = seen.intersection(state_of(program, index))
        else:
            seen.update(program.operators[index].touched)
    now_s = sent_s = host_s = 0.0  # of compute; when the lanes are free
    reloads: list[tuple[float, float]] = []  # (due, seconds)
    chosen: set[int] = set()
    for index in order:
        op = program.operators[index]
        if index not in every:
            now_s += op.seconds
            continue
        gradients = [s for s in op.touched if not storages[s].persistent]
        results = [s for s in state_of(program, index) if s in due_s]
        sent = max(sent_s, now_s) + sum(_seconds(machine.store, storages[s]) for s in gradients)
        done = max(host_s, sent) + machine.host_seconds(op)
        reload_s = sum(
            _seconds(machine.prefetch, storages[s]) for s in results if s in later[index]
        )
        back = [(due_s[s], _seconds(machine.prefetch, storages[s])) for s in results]
        if done + reload_s <= (computed_s if at_use else end_s) and _meets_deadlines(
            merged := sorted([*reloads, *back])
        ):
            sent_s, host_s, reloads = sent, done, merged
            chosen.add(index)
    return together(program, chosen)


def _meets_deadlines(reloads: list[tuple[float, float]]) -> bool:
    """A serial lane that begins with the step keeps all deadlines, given in ascending order."""
    return all(
        end_s <= due_s
        for (due_s, _), end_s in zip(reloads, accumulate(s for _, s in reloads), strict=True)
    )


def defer_host_readers(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: tuple[int, ...],
    hosted: frozenset[int],
) -> tuple[int, ...]:
    """The order in which the device does other work until what it needs of the host is back.

    Only operators of the optimizer that are no computation are put off (a weight that is copied from its master), and
    what they hold back; they run as soon as their operands are there, or when somebody needs them.
    """
    if not hosted:
        return order
    before = dependencies(program)
    operators, storages = program.operators, program.storages
    now_s = sent_s = host_s = back_s = 0.0
    done_s: dict[int, float] = {}  # updates
    deferred: dict[int, float] = {}  # operators that are put off -> when their operands are there
    result: list[int] = []

    def run(index: int) -> None:
        nonlocal now_s
        for other in [w for w in deferred if w in before[index]]:
            if other in deferred:
                run(other)
        now_s = max(now_s, deferred.pop(index, 0.0)) + operators[index].seconds
        result.append(index)

    for index in order:
        operator = operators[index]
        for other in [w for w, ready_s in deferred.items() if ready_s <= now_s]:
            if other in deferred and before[other].isdisjoint(deferred):
                run(other)
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
            changed = {s for i in updates for s in state_of(program, i)}
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
