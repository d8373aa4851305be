"""Use-definition chains, liveness and dependencies over storages.

Views need no rule, because the front end resolves every view to its storage. An access through any alias is an access
to the storage, and creating a view is no access.

Collectives and messages are in flight, in parallel to the compute lane, from their `run` to their `join`.
One communication lane carries them one after another, in the order in which they are begun. A collective library has a
queue per process group; groups that run at the same time share the link, and a plan is made for one link. So groups in
turn take as long as concurrent groups, and no byte is counted twice.

No plan can deadlock, whatever each rank decides about memory. All ranks begin their communication in the recorded
order, in which every collective was waited for at once. Consider the unfinished operator that finished first in the
recorded run: every wait of its ranks before its begin finished earlier, so it finishes here as well. A collective is
joined no earlier than it is begun. A message is joined where it is needed, behind everything that was begun before
that point in the recorded run (`dependencies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator
from hyper_parallel.memory.timeline import ProgramClock


class CommsInFlight:
    """Communication in flight while a program is emitted, and the releases that wait for it.

    Args:
        program: Operators and storages.
    """

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program
        self._running: dict[int, dict[int, int]] = {}  # operator -> deferred storage -> position

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        """Operators begun and not joined, in the order of their begin."""
        return list(self._running)

    def begin(self, index: int) -> None:
        """Record the begin of an operator."""
        self._running[index] = {}

    def required_joins(
        self, operator: Operator, also_read: Iterable[int] = (), recomputed: Iterable[int] = ()
    ) -> list[int]:
        """Return operators in flight that conflict with the reads, writes or recomputed storages of an operator."""
        if not self._running:
            return []
        changed = (*operator.writes, *operator.allocs)
        if operator.message and not operator.group:
            changed = operator.reads  # the buffers that were sent
        return self._conflicts({*operator.reads, *also_read}, {*changed, *recomputed})

    def _conflicts(self, reads: set[int], writes: set[int]) -> list[int]:
        """Return operators in flight that write a storage of `reads` or access a storage of `writes`."""
        result = []
        for index in self._running:
            operator = self._program.operators[index]
            results = (*operator.writes, *operator.allocs)
            if not writes.isdisjoint(operator.touched) or not reads.isdisjoint(results):
                result.append(index)
        return result

    def is_writing(self, storage: int) -> bool:
        """Return whether other ranks are still writing a storage."""
        return bool(self._running) and bool(self._conflicts({storage}, set()))

    def defer_release(self, storage: int, position: int) -> bool:
        """Defer the release of a storage after a position to its last user in flight; return False when it has none."""
        users = [i for i in self._running if storage in self._program.touched[i]]
        for index in users[-1:]:  # the last one to finish
            for releases in self._running.values():
                releases.pop(storage, None)
            self._running[index][storage] = position
        return bool(users)

    def cancel_release(self, storage: int) -> bool:
        """Cancel the deferred release of a storage; return False when there is none."""
        deferred = [h for h in self._running.values() if storage in h]
        for releases in deferred:
            del releases[storage]
        return bool(deferred)

    def deferring(self) -> list[int]:
        """Return collectives with deferred releases, in the order of their begin.

        Messages are left out, because their peer may be late.
        """
        return [i for i, h in self._running.items() if h and not self._program.operators[i].message]

    def join(self, index: int) -> list[tuple[int, int]]:
        """Record the join of an operator; return its deferred releases as (storage, position)."""
        return list(self._running.pop(index).items())


def plain_actions(
    program: MemoryProgram, order: Sequence[int], last_use: Sequence[int]
) -> list[MemoryAction]:
    """Return a program that runs every operator once, frees every storage after its last use, and moves none.

    A collective is joined before the first use of its results, or once it completes if a `free` is deferred until then.

    Args:
        program: Operators and storages.
        order: Order of the operators.
        last_use: Position after which each storage is freed; -1: never.
    """
    actions: list[MemoryAction] = []
    comms, clock = CommsInFlight(program), ProgramClock(program)

    def emit(action: MemoryAction) -> None:
        actions.append(action)
        clock.apply(action)

    def release(s: int, position: int) -> None:
        if last_use[s] == position and not comms.defer_release(s, position):
            actions.append(MemoryAction("free", s))

    def join(index: int) -> None:
        emit(MemoryAction("join", index))
        for s, position in comms.join(index):
            release(s, position)

    for position, index in enumerate(order):
        operator = program.operators[index]
        if comms:
            for running in comms.deferring():
                if clock.done_s(running) <= clock.now_s:
                    join(running)
            for running in comms.required_joins(operator):
                join(running)
        emit(MemoryAction("run", index))
        if operator.group:
            comms.begin(index)
        for s in program.touched[index]:
            release(s, position)
    for running in comms.running:
        join(running)
    return actions


@dataclass(frozen=True)
class UseDef:
    """Accesses of every storage, as positions in an order.

    Attributes:
        order: Operator index at each position.
        uses: Positions that access each storage, ascending.
        writes: Positions that change each storage after it was allocated, ascending.
        producer: Operator that allocates each storage, or -1 when it exists from the start.
    """

    order: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]


def use_definitions(program: MemoryProgram, order: Sequence[int]) -> UseDef:
    """Return every storage's accesses in an order."""
    uses: list[list[int]] = [[] for _ in program.storages]
    writes: list[list[int]] = [[] for _ in program.storages]
    producer = [-1] * len(program.storages)
    for position, index in enumerate(order):
        op = program.operators[index]
        for s in program.touched[index]:
            uses[s].append(position)
        for s in op.writes:
            writes[s].append(position)
        for s in op.allocs:
            producer[s] = index
    return UseDef(tuple(order), tuple(map(tuple, uses)), tuple(map(tuple, writes)), tuple(producer))


def live_bytes(program: MemoryProgram, chains: UseDef) -> np.ndarray:
    """Return the device bytes of every position while no storage moves."""
    change = np.zeros(len(chains.order) + 1, np.int64)
    for s, storage in enumerate(program.storages):
        uses = chains.uses[s]
        if uses or storage.persistent:
            change[0 if storage.at_start else uses[0]] += program.sizes[s]
            if not storage.at_end:
                change[uses[-1] + 1] -= program.sizes[s]
    return np.cumsum(change[:-1])


def dependencies(program: MemoryProgram) -> list[set[int]]:
    """Return, per operator, the operators that must run before it, judged in the recorded order.

    Dependencies are true (read after write), anti (write after read) and output (write after write) dependencies.
    Operators that draw random numbers, check a branch or communicate also keep their mutual order. An operator that
    needs a message waits for another rank. It stays behind everything that was sent before it, so no ranks wait in a
    circle.
    """
    before: list[set[int]] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_ordered, last_collective, last_communication = -1, -1, -1
    messages: set[int] = set()
    for index, op in enumerate(program.operators):
        deps: set[int] = set()
        if last_collective >= 0 and not messages.isdisjoint(op.touched):
            deps.add(last_collective)
        for s in op.reads:
            if s in writer:
                deps.add(writer[s])
        changed = (*op.writes, *op.allocs)
        for s in changed:
            deps.update(readers.get(s, ()))
            if s in writer:
                deps.add(writer[s])
        for s in changed:
            writer[s] = index
            readers[s] = []
        for s in op.reads:
            readers.setdefault(s, []).append(index)
        if op.group or op.message:
            if last_communication >= 0:
                deps.add(last_communication)
            last_communication = index
        elif op.ordered:
            if last_ordered >= 0:
                deps.add(last_ordered)
            last_ordered = index
        if op.group:
            last_collective = index
        if op.message:
            messages.update(op.writes)
        deps.discard(index)
        before.append(deps)
    return before


def identity_actions(program: MemoryProgram, order: Sequence[int]) -> tuple[MemoryAction, ...]:
    """Return the program without any copy: every operator once, every storage freed right after its last use."""
    chains = use_definitions(program, order)
    keep = [s.at_end for s in program.storages]
    unused = [
        MemoryAction("free", s)
        for s, storage in enumerate(program.storages)
        if storage.at_start and not storage.at_end and not chains.uses[s]
    ]
    last = [-1 if k or not uses else uses[-1] for k, uses in zip(keep, chains.uses, strict=True)]
    return (*unused, *plain_actions(program, order, last))


def working_set_bytes(program: MemoryProgram) -> int:
    """Return the largest sum of one operator's operands and results, a lower bound of every plan's peak."""
    return max((sum(program.sizes[s] for s in op.touched) for op in program.operators), default=0)
