"""Use-definition chains, liveness and dependencies over storages.

Views need no rule, because the front end resolves every view to its storage. An access through any alias is an access
to the storage, and creating a view is no access.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.ir import MemoryAction, MemoryProgram
from hyper_parallel.memory._comms import plain_actions


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


def use_definitions(
    program: MemoryProgram, order: Sequence[int], hosted: Collection[int] = ()
) -> UseDef:
    """Return every storage's accesses in an order.

    Args:
        program: Operators and storages.
        order: Order of the operators.
        hosted: Optimizer operators that run on the host: their writes count, their uses of the device do not.
    """
    uses: list[list[int]] = [[] for _ in program.storages]
    writes: list[list[int]] = [[] for _ in program.storages]
    producer = [-1] * len(program.storages)
    for position, index in enumerate(order):
        op = program.operators[index]
        for s in program.touched[index] if index not in hosted else ():
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
    circle (see `_comms`).
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
