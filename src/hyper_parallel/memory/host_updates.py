"""Optimizer updates in host memory: which operators may run there, what follows from it, and what is under way.

An update on the device needs the state there: parameter, moments and master weights come and go. In host memory they
stay where they are: the gradient goes out, and what the device needs of the result comes back. The host works beside
the compute lane, on one operator after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hyper_parallel.ir import MemoryProgram, Operator
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.memory_machine import MemoryMachine


@dataclass(frozen=True)
class HostUpdates:
    """Operators of one order that run in host memory, and what that decides.

    Attributes:
        operators: Their indices.
        at_home: What has its home in DRAM for their sake, with the positions at which it is changed there, ascending.
        last_read: Position of the last of them that uses each storage.
        gaps: What is away from the device for their sake, whatever else is chosen.
    """

    operators: frozenset[int] = frozenset()
    at_home: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    last_read: Mapping[int, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()

    @classmethod
    def of(
        cls,
        program: MemoryProgram,
        order: Sequence[int],
        operators: Collection[int],
        uses: Sequence[Sequence[int]],
    ) -> HostUpdates:
        """What follows from running some operators in host memory.

        Args:
            program: All operators.
            order: Their order.
            operators: Those that run in host memory.
            uses: Positions at which each storage is used on the device.
        """
        at_home: dict[int, list[int]] = {}
        last_read: dict[int, int] = {}
        for position, index in enumerate(order):
            if index in operators:
                for s in program.operators[index].touched:
                    last_read[s] = position
                for s in state_of(program, index):
                    changed = at_home.setdefault(s, [])
                    if s in program.operators[index].writes:
                        changed.append(position)
        gaps: list[Gap] = []
        n = len(order)
        for s, position in last_read.items():
            at, storage = list(uses[s]), program.storages[s]
            if s in at_home:
                # Between two uses on the device the content that is there becomes stale.
                ends = [(-1, at[0]), (at[-1], n)] if at else [(-1, n)]
                stale = [
                    (a, b)
                    for a, b in pairwise(at)
                    if any(a < position < b for position in at_home[s])
                ]
                gaps += [Gap(s, a, b, "dram") for a, b in (*ends, *stale)]
            elif not storage.at_end and not storage.at_start and at[-1] < position:
                gaps.append(Gap(s, at[-1], n, "dram"))
        fixed = {s: tuple(positions) for s, positions in at_home.items()}
        return cls(frozenset(operators), fixed, last_read, tuple(gaps))

    def seconds(self, program: MemoryProgram, order: Sequence[int]) -> list[float]:
        """Seconds of every position on the compute lane."""
        hosted = self.operators
        return [0.0 if i in hosted else program.operators[i].seconds for i in order]

    def device_writes(self, program: MemoryProgram, order: Sequence[int]) -> dict[int, list[int]]:
        """Positions at which every storage is changed on the device."""
        result: dict[int, list[int]] = {}
        for position, index in enumerate(order):
            if index not in self.operators:
                for s in program.operators[index].writes:
                    result.setdefault(s, []).append(position)
        return result

    def ready(self, gap: Gap) -> int:
        """Position from which on a gap's storage may come back: not before it has been changed in host memory."""
        within = [p for p in self.at_home.get(gap.storage, ()) if gap.first < p < gap.last]
        return max(within, default=gap.first) + 1


def hostable(program: MemoryProgram) -> frozenset[int]:
    """Operators that may run in host memory.

    An update of optimizer state that makes nothing and keeps no order. The state it uses must be changed by such
    operators only; other things that it changes must not be used by others afterwards (fused optimizers may scale
    gradients in place).
    """
    storages = program.storages
    made = {s for op in program.operators for s in op.allocs}

    def may(op: Operator) -> bool:
        return (
            op.phase == "optimizer"
            and not op.allocs
            and not op.ordered
            and not op.group
            and any(storages[s].kind == "optimizer" for s in op.writes)
            and all(
                storages[s].persistent or (s in made and not storages[s].at_end) for s in op.writes
            )
            and all(s in made or storages[s].persistent for s in op.reads)
        )

    return together(program, {i for i, op in enumerate(program.operators) if may(op)})


def together(program: MemoryProgram, operators: set[int]) -> frozenset[int]:
    """Those that leave nothing to an operator on the device that it must not find changed, or change, itself."""
    left = set(operators)
    while True:
        others: set[int] = set()
        last_use: dict[int, int] = {}
        for i, op in enumerate(program.operators):
            if i not in left:
                others.update(op.writes)
                last_use.update(dict.fromkeys(op.touched, i))
        mixed = {
            i
            for i in left
            if any(s in others for s in state_of(program, i))
            or any(
                last_use.get(s, -1) > i
                for s in program.operators[i].writes
                if not program.storages[s].persistent
            )
        }
        if not mixed:
            return frozenset(left)
        left -= mixed


def state_of(program: MemoryProgram, index: int) -> list[int]:
    """What an operator uses that lasts, but for the inputs of the step."""
    storages = program.storages
    return [
        s
        for s in program.operators[index].touched
        if storages[s].persistent and storages[s].kind != "input"
    ]


def device_part(program: MemoryProgram, machine: MemoryMachine) -> MemoryProgram:
    """What is left for the device at least: a bound for this program holds for every plan of the whole one.

    Operators that may run in host memory take no time, need nothing on the device and change nothing there.
    """
    if machine.host is None:
        return program
    idle = {
        i: Operator(program.operators[i].name, phase=program.operators[i].phase)
        for i in hostable(program)
    }
    return replace(
        program, operators=tuple(idle.get(i, op) for i, op in enumerate(program.operators))
    )


class UpdatesInFlight:
    """Operators in host memory that were begun while a program is emitted, and what they keep in DRAM.

    Args:
        program: All operators.
        host: Those that run in host memory.
    """

    def __init__(self, program: MemoryProgram, host: HostUpdates) -> None:
        self._program, self._host = program, host
        self._left: dict[int, int] = {}  # storage -> operators that still use it
        for index in host.operators:
            for s in program.operators[index].touched:
                self._left[s] = self._left.get(s, 0) + 1
        self.running: list[int] = []

    def __contains__(self, storage: object) -> bool:
        """Whether an operator in host memory is using a storage, or will."""
        return storage in self._left

    def begin(self, index: int) -> None:
        """An operator was begun."""
        self.running.append(index)

    def using(self, storage: int) -> list[int]:
        """What is under way and uses a storage."""
        return [i for i in self.running if storage in self._program.touched[i]]

    def end(self, index: int) -> list[int]:
        """An operator was joined; what it read and no other one needs any more."""
        self.running.remove(index)
        done = []
        for s in self._program.touched[index]:
            self._left[s] -= 1
            if not self._left[s]:
                del self._left[s]
                if s not in self._host.at_home:
                    done.append(s)
        return done
