"""Positions at which to issue copies, and the queue of reloads that lack memory.

A position is an index in the order of the operators. A store copies a storage from the device to DRAM. A reload copies
it back: `copy_in` from flash to DRAM, `prefetch` from DRAM to the device. The copies of one direction run in series.

Reloads are issued as late as possible, computed backwards from their deadlines. Stores may run as soon as their content
is final. Reloads that lack memory are retried in the order of their issue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from hyper_parallel.ir import MemoryActionKind, MemoryProgram, MemoryTier
from hyper_parallel.memory.memory_machine import MemoryMachine


@dataclass(frozen=True, slots=True)
class Gap:
    """Range of positions in the operator order during which a storage is off the device.

    Attributes:
        storage: Index of the storage.
        first: Position after which the storage is evicted; -1: the storage is off the device at the start of the step.
        last: Position before which the storage is reloaded; the number of operators: not before the end of the step.
        tier: Tier that holds the storage during the gap.
    """

    storage: int
    first: int
    last: int
    tier: MemoryTier


@dataclass(slots=True)
class OutgoingCopy:
    """Copy in flight out of the device or out of DRAM.

    Attributes:
        storage: Index of the storage.
        destination: Tier that the storage is copied to.
        detaches: Whether the source is released when the copy ends.
    """

    storage: int
    destination: MemoryTier
    detaches: bool


def issue_positions(
    gaps: Sequence[Gap], starts_s: np.ndarray, program: MemoryProgram, machine: MemoryMachine
) -> list[tuple[int, Gap, MemoryActionKind]]:
    """Return the latest position at which to issue each reload, with copies of one direction in series.

    The deadline of a `prefetch` is the end of its gap, that of a `copy_in` is the start of its `prefetch`. Gaps until
    the end of the step have no reload. `starts_s` has the expected start of every position in seconds.

    Returns:
        List of (position before which to issue, gap, `prefetch` or `copy_in`), in order of issue.
    """
    events: list[tuple[int, int, Gap, MemoryActionKind]] = []
    free_s = {"prefetch": float("inf"), "copy_in": float("inf")}
    due = sorted((g for g in gaps if g.last < len(starts_s)), key=lambda g: -g.last)
    times = starts_s.tolist()
    for rank, gap in enumerate(due):
        num_bytes = program.storages[gap.storage].num_bytes
        deadline = times[gap.last]
        kinds: tuple[MemoryActionKind, ...] = ("prefetch",)
        if gap.tier == "flash":
            kinds = ("prefetch", "copy_in")
        for kind in kinds:
            seconds = machine.channel(kind).seconds(num_bytes)
            begin = min(deadline, free_s[kind]) - seconds
            free_s[kind] = deadline = begin
            position = max(bisect_right(times, begin) - 1, gap.first + 1, 0)
            events.append((min(position, gap.last), -2 * rank - (kind == "copy_in"), gap, kind))
    events.sort(key=lambda e: (e[0], e[1]))
    return [(position, gap, kind) for position, _, gap, kind in events]


class ReloadQueue:
    """Queue of the reloads of one emission. A reload that lacks memory sleeps until enough memory may be free.

    The argument `number` of the methods is the index of a reload in `events`.

    Args:
        events: Reloads as (position of issue, gap, kind), by ascending position.
    """

    def __init__(self, events: Sequence[tuple[int, Gap, MemoryActionKind]]) -> None:
        self._events = events
        self._num_issued = 0  # number of events whose position has been reached
        self._ready: list[int] = []  # heap of reloads to try at this position
        self._current = -1
        self._alarms: dict[int, list[int]] = {}  # position -> reloads to try there at the latest
        self._needed_bytes: dict[int, int] = {}  # reload -> device bytes that it waits for
        self._in_line: dict[int, int] = {}  # reload -> size of the DRAM buffer that it waits for
        # Size -> heap of reloads that wait, or have waited, for a DRAM buffer of this size.
        self._lines: dict[int, list[int]] = {}
        # Storage -> reloads that wait for its outgoing copy.
        self._waiting_for_copy: dict[int, list[int]] = {}
        self._asleep: set[int] = set()

    def due(
        self, position: int, free_bytes: Callable[[], int], has_dram_buffer: Callable[[int], bool]
    ) -> Iterator[tuple[int, Gap, MemoryActionKind]]:
        """Yield the reloads to try at a position, as (number, gap, kind).

        `free_bytes` returns the free device bytes, `has_dram_buffer` whether DRAM has a free buffer of a size in bytes.
        """
        ready = self._ready
        for number in self._alarms.pop(position, ()):
            self._wake(number)
        if self._needed_bytes:
            free = free_bytes()
            for number in [n for n, size in self._needed_bytes.items() if size <= free]:
                heappush(ready, number)
        for size in self._lines:
            self._next_in_line(size)
        while self._num_issued < len(self._events) and self._events[self._num_issued][0] <= position:
            heappush(ready, self._num_issued)
            self._num_issued += 1
        while ready:
            self._current = number = heappop(ready)
            if self._needed_bytes.get(number, 0) > free_bytes():
                continue  # earlier reloads took the bytes
            if number in self._in_line:
                if not has_dram_buffer(self._in_line[number]):
                    continue
                self._next_in_line(self._in_line.pop(number))
            self._asleep.discard(number)
            self._needed_bytes.pop(number, None)
            _, gap, kind = self._events[number]
            yield number, gap, kind
        self._current = len(self._events)

    def retry_at(self, number: int, position: int) -> None:
        """Let a reload sleep until a position, or until its deadline if that is earlier."""
        retry = min(position, self._events[number][1].last)
        self._alarms.setdefault(retry, []).append(number)
        self._asleep.add(number)

    def wait_for_bytes(self, number: int, num_bytes: int) -> None:
        """Let a reload sleep until `num_bytes` device bytes are free, or until its deadline."""
        self.retry_at(number, self._events[number][1].last)
        self._needed_bytes[number] = num_bytes

    def wait_for_dram(self, number: int, num_bytes: int) -> None:
        """Let a reload sleep until DRAM has a free buffer of `num_bytes`, or until its deadline."""
        self.retry_at(number, self._events[number][1].last)
        self._in_line[number] = num_bytes
        heappush(self._lines.setdefault(num_bytes, []), number)

    def wait_for_copy(self, number: int, storage: int) -> None:
        """Let a reload sleep until the outgoing copy of a storage has ended, or until its deadline."""
        self.retry_at(number, self._events[number][1].last)
        self._waiting_for_copy.setdefault(storage, []).append(number)

    def copy_ended(self, storage: int, position: int) -> None:
        """Wake the reloads that wait for the end of a storage's outgoing copy.

        Reloads that `due` has already tried at `position` are tried again at the next position.
        """
        for number in self._waiting_for_copy.pop(storage, ()):
            if number > self._current:
                self._wake(number)
            elif number in self._asleep:
                self.retry_at(number, position + 1)

    def _wake(self, number: int) -> None:
        if number in self._asleep:
            self._asleep.discard(number)
            self._needed_bytes.pop(number, None)
            self._in_line.pop(number, None)
            heappush(self._ready, number)

    def _next_in_line(self, size: int) -> None:
        """Put the first reload that waits for a DRAM buffer of `size` bytes into the heap of reloads to try."""
        line = self._lines[size]
        while line and line[0] not in self._in_line:
            heappop(line)
        if line:
            heappush(self._ready, line[0])
