"""Operators that other ranks take part in: begun by their `run`, under way beside the compute lane until their `join`.

One communication lane carries them one after another, in the order in which they are begun. A collective library has a
queue per process group; groups that run at the same time share the link, and the machine that a plan is made for
names one link. So groups in turn take as long as groups together, and nothing is counted twice.

No plan can make ranks wait for each other in a circle, whatever each of them decides about memory. All ranks begin what
they do together in the order in which it was recorded, when every collective was waited for at once. Of what has not
ended, take what ended first then: whatever any of its ranks has to wait for before beginning it ended earlier, so it
has ended here as well. A collective is joined no earlier than it is begun; a message is joined where it is needed,
which is behind everything that was begun before it was needed then (`dependencies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator
from hyper_parallel.memory._clock import ProgramClock


class CommsInFlight:
    """What is under way while a program is emitted, and what it keeps from leaving the device.

    Args:
        program: The operators.
    """

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program
        self._running: dict[int, dict[int, int]] = {}  # operator -> held storage -> position

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        """Operators that were begun and not joined, first begun first."""
        return list(self._running)

    def begin(self, index: int) -> None:
        """An operator was begun."""
        self._running[index] = {}

    def before(
        self, operator: Operator, also_read: Iterable[int] = (), recomputed: Iterable[int] = ()
    ) -> list[int]:
        """What must be joined before an operator runs, before more storages are read, and others are made again."""
        if not self._running:
            return []
        changed = (*operator.writes, *operator.allocs)
        if operator.message and not operator.group:
            changed = operator.reads  # the end of what was sent from them
        return self._users({*operator.reads, *also_read}, {*changed, *recomputed})

    def _users(self, reads: set[int], writes: set[int]) -> list[int]:
        """What is under way and makes one storage, or uses another one."""
        result = []
        for index in self._running:
            operator = self._program.operators[index]
            made = (*operator.writes, *operator.allocs)
            if not writes.isdisjoint(operator.touched) or not reads.isdisjoint(made):
                result.append(index)
        return result

    def fills(self, storage: int) -> bool:
        """Other ranks are still writing a storage."""
        return bool(self._running) and bool(self._users({storage}, set()))

    def hold(self, storage: int, position: int) -> bool:
        """Put off what happens to a storage after a position until what uses it is done; False: nothing does."""
        users = [i for i in self._running if storage in self._program.touched[i]]
        for index in users[-1:]:  # the last one to be done
            for other in self._running.values():
                other.pop(storage, None)
            self._running[index][storage] = position
        return bool(users)

    def keep(self, storage: int) -> bool:
        """A storage that was to leave stays after all; False: it was not held."""
        held = [h for h in self._running.values() if storage in h]
        for one in held:
            del one[storage]
        return bool(held)

    def holding(self) -> list[int]:
        """Collectives that keep something from leaving, first begun first; no messages, whose peer may be late."""
        return [i for i, h in self._running.items() if h and not self._program.operators[i].message]

    def end(self, index: int) -> list[tuple[int, int]]:
        """An operator was joined; the (storage, position) that it held."""
        return list(self._running.pop(index).items())


def plain_actions(
    program: MemoryProgram, order: Sequence[int], last: Sequence[int]
) -> list[MemoryAction]:
    """Every operator once, every storage freed when nothing uses it any more, nothing moved.

    An operator of a group is joined where its results are needed, or as soon as it is done when it holds what could be
    freed.

    Args:
        program: The operators.
        order: Their order.
        last: Position after which each storage is free; -1: it stays.
    """
    actions: list[MemoryAction] = []
    comms, clock = CommsInFlight(program), ProgramClock(program)

    def emit(action: MemoryAction) -> None:
        actions.append(action)
        clock.apply(action)

    def after(s: int, position: int) -> None:
        if last[s] == position and not comms.hold(s, position):
            actions.append(MemoryAction("free", s))

    def join(index: int) -> None:
        emit(MemoryAction("join", index))
        for s, position in comms.end(index):
            after(s, position)

    for position, index in enumerate(order):
        operator = program.operators[index]
        if comms:
            for other in comms.holding():
                if clock.done_s(other) <= clock.now_s:
                    join(other)
            for other in comms.before(operator):
                join(other)
        emit(MemoryAction("run", index))
        if operator.group:
            comms.begin(index)
        for s in program.touched[index]:
            after(s, position)
    for other in comms.running:
        join(other)
    return actions
