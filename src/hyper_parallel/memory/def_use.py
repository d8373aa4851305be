"""Use-definition chains, liveness and dependencies over storages.

Views need no special rule, because the capture resolves every view to its storage. An access through any alias is an
access to the storage, and creating a view is no access.

Collectives and messages (point-to-point sends and receives) overlap computation from their action `run` to their action
`join`, which waits for them. The model runs them one after another, in the order in which they begin: process groups
have separate queues, but share the link.

Ranks cannot deadlock, whatever each rank decides about memory. All ranks begin their communication in the recorded
order. Before an operator, a rank waits only for operators that finished before it in the recorded run, in which every
collective was waited for immediately. A message is joined where an operator needs it, after the communication that
began before this operator in the recorded run (see `dependencies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator
from hyper_parallel.memory.timeline import ProgramClock


class CommsInFlight:
    """Collectives and messages in flight during emission, and releases of storages that must wait for their joins."""

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program
        self._running: dict[int, dict[int, int]] = {}  # operator -> deferred storage -> position

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        """Operators that have begun and are not joined, in the order in which they began."""
        return list(self._running)

    def begin(self, index: int) -> None:
        """Record that an operator has begun."""
        self._running[index] = {}

    def required_joins(
        self, operator: Operator, also_read: Iterable[int] = (), recomputed: Iterable[int] = ()
    ) -> list[int]:
        """Return the operators in flight that must be joined before an operator may run.

        `also_read` and `recomputed` are storages that recomputation right before the operator reads and writes.
        """
        if not self._running:
            return []
        changed = (*operator.writes, *operator.allocs)
        if operator.message and not operator.group:
            changed = operator.reads  # the buffers that were sent
        return self._conflicts({*operator.reads, *also_read}, {*changed, *recomputed})

    def _conflicts(self, reads: set[int], writes: set[int]) -> list[int]:
        result = []
        for index in self._running:
            operator = self._program.operators[index]
            results = (*operator.writes, *operator.allocs)
            if not writes.isdisjoint(operator.touched) or not reads.isdisjoint(results):
                result.append(index)
        return result

    def is_writing(self, storage: int) -> bool:
        """Return whether an operator in flight still writes a storage."""
        return bool(self._running) and bool(self._conflicts({storage}, set()))

    def defer_release(self, storage: int, position: int) -> bool:
        """Defer the release of a storage until its last user in flight is joined; return False if there is none."""
        users = [i for i in self._running if storage in self._program.touched[i]]
        if not users:
            return False
        self.cancel_release(storage)
        self._running[users[-1]][storage] = position  # the last one to finish
        return True

    def cancel_release(self, storage: int) -> bool:
        """Cancel the deferred release of a storage; return False if there is none."""
        deferred = [h for h in self._running.values() if storage in h]
        for releases in deferred:
            del releases[storage]
        return bool(deferred)

    def deferring(self) -> list[int]:
        """Return the collectives in flight that defer releases, oldest first; no messages, whose peers may be late."""
        return [i for i, h in self._running.items() if h and not self._program.operators[i].message]

    def join(self, index: int) -> list[tuple[int, int]]:
        """Record that an operator is joined; return its deferred releases as (storage, position)."""
        return list(self._running.pop(index).items())


@dataclass(frozen=True)
class UseDef:
    """Accesses of every storage, as positions in an order.

    Attributes:
        order: Operator index at each position.
        uses: Positions that access each storage, ascending.
        writes: Positions that change each storage after it was allocated, ascending.
        producer: Operator that allocates each storage, or -1 if the storage exists from the start.
    """

    order: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]


def use_definitions(program: MemoryProgram, order: Sequence[int]) -> UseDef:
    """Return the accesses of every storage in an order of the operators."""
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


def live_bytes(program: MemoryProgram, uses: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the device bytes at every position, without offload; `uses` has the positions that access each storage."""
    change = np.zeros(len(program.operators) + 1, np.int64)
    for storage, size, accesses in zip(program.storages, program.sizes, uses, strict=True):
        if accesses or storage.persistent:
            change[0 if storage.at_start else accesses[0]] += size
            if not storage.at_end:
                change[accesses[-1] + 1] -= size
    return np.cumsum(change[:-1])


def dependencies(program: MemoryProgram) -> list[set[int]]:
    """Return, per operator, the set of its direct predecessors in the recorded order; others follow by transitivity.

    Dependencies are true (read after write), anti (write after read) and output (write after write) dependencies.
    Operators that communicate also keep their mutual order, and so do other operators with `ordered`. An operator that
    accesses a received buffer stays after all collectives and message batches recorded before it, so that ranks never
    wait for each other in a cycle.
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
    """Return the actions of a step without offload and recomputation, in an order.

    Every operator runs once, and every storage without `at_end` is freed after its last use. A collective is joined
    before an operator uses its results or changes its operands. A collective that delays a `free` is joined before the
    first operator that begins after the collective has ended.
    """
    uses = use_definitions(program, order).uses
    freed = [s for s, storage in enumerate(program.storages) if not storage.at_end]
    last_use = {s: uses[s][-1] for s in freed if uses[s]}
    actions = [MemoryAction("free", s) for s in freed if program.storages[s].at_start and not uses[s]]
    comms, clock = CommsInFlight(program), ProgramClock(program)

    def emit(action: MemoryAction) -> None:
        actions.append(action)
        clock.apply(action)

    def release(s: int, position: int) -> None:
        if last_use.get(s) == position and not comms.defer_release(s, position):
            actions.append(MemoryAction("free", s))

    def join(index: int) -> None:
        emit(MemoryAction("join", index))
        for s, position in comms.join(index):
            release(s, position)

    for position, index in enumerate(order):
        operator = program.operators[index]
        if comms:
            for running in comms.deferring():
                if clock.done_s[running] <= clock.now_s:
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
    return tuple(actions)


def working_set_bytes(program: MemoryProgram) -> int:
    """Return the maximum over operators of the bytes of operands and results, a lower bound of every plan's peak."""
    return max((sum(program.sizes[s] for s in op.touched) for op in program.operators), default=0)
