"""Issue of copies: positions of reloads and early stores, and the queue of reloads that lack room.

Reloads are issued as late as possible on serial channels, computed backwards from their deadlines. Stores may run as
soon as their content is final. Reloads without room are retried in the order of their issue. A reload that cannot
succeed before a change is not retried until then, so a long queue costs little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from hyper_parallel.ir import MemoryActionKind, MemoryProgram, MemoryTier
from hyper_parallel.memory.memory_machine import MemoryMachine


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions between which a storage is off the device.

    Attributes:
        storage: Storage index.
        first: Position after which it is evicted; -1 when it starts the step off the device.
        last: Position before which it must be back; the number of operators when it ends the step off the device.
        tier: Tier of the storage in the gap.
    """

    storage: int
    first: int
    last: int
    tier: MemoryTier


@dataclass(slots=True)
class OutgoingCopy:
    """A running copy out of the device, or out of DRAM, that a detach waits for.

    Attributes:
        storage: Storage index.
        destination: Tier that it is copied to.
        detaches: Whether the source is released when the copy ends; False if an operator needs the storage before.
    """

    storage: int
    destination: MemoryTier
    detaches: bool


def issue_positions(
    gaps: Sequence[Gap],
    starts_s: np.ndarray,
    program: MemoryProgram,
    machine: MemoryMachine,
) -> list[tuple[int, Gap, MemoryActionKind]]:
    """Return the latest issue of every reload on one serial channel per direction that keeps all deadlines.

    Args:
        gaps: Gaps to reload from.
        starts_s: Expected start of every position.
        program: Sizes.
        machine: Channels.

    Returns:
        (position before which to issue, gap, prefetch or copy_in), in order of issue.
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


def early_stores(
    gaps: Sequence[Gap],
    program: MemoryProgram,
    num_positions: int,
    uses: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    dropped: Collection[int],
) -> list[list[Gap]]:
    """Return, per position, the gaps whose content is final from there on: their stores may run before the eviction.

    Args:
        gaps: Gaps of evicted storages.
        program: Storages.
        num_positions: Length of the order.
        uses: Positions that access each storage.
        writes: Positions that change each storage after it was allocated, ascending.
        dropped: Storages that are dropped for recomputation; no copy of them may be running then.
    """
    early: list[list[Gap]] = [[] for _ in range(num_positions)]
    for g in gaps:
        accesses = uses[g.storage]
        if g.first < 0 or not accesses or g.tier != "dram" or g.storage in dropped:
            continue
        written = writes[g.storage]
        index = bisect_right(written, g.first)
        begun = 0 if program.storages[g.storage].at_start else accesses[0]
        since = written[index - 1] if index else begun
        if since < g.first:
            early[since].append(g)
    return early


class ReloadQueue:
    """Reloads of one emission.

    Args:
        events: Reloads as (position of issue, gap, kind), ascending.
    """

    def __init__(self, events: Sequence[tuple[int, Gap, MemoryActionKind]]) -> None:
        self._events = events
        self._num_issued = 0  # events whose position has come
        self._ready: list[int] = []  # heap of reloads to try at this position
        self._current = -1
        self._alarms: dict[int, list[int]] = {}  # position -> reloads to try there at the latest
        self._needed_bytes: dict[int, int] = {}  # reload -> device bytes that it waits for
        self._in_line: dict[int, int] = {}  # reload -> size of the DRAM buffer that it waits for
        self._lines: dict[int, list[int]] = {}  # by size, heap of such reloads and of woken ones
        # Storage -> reloads that wait for its outgoing copy.
        self._waiting_for_copy: dict[int, list[int]] = {}
        self._asleep: set[int] = set()

    def due(
        self, position: int, free_bytes: Callable[[], int], has_dram_buffer: Callable[[int], bool]
    ) -> Iterator[tuple[int, Gap, MemoryActionKind]]:
        """Yield the reloads to try at a position, as (number, gap, kind).

        Args:
            position: Position that is being emitted.
            free_bytes: Function that returns the free device bytes.
            has_dram_buffer: Function that returns whether DRAM has a buffer of a size.
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
        while (
            self._num_issued < len(self._events) and self._events[self._num_issued][0] <= position
        ):
            heappush(ready, self._num_issued)
            self._num_issued += 1
        while ready:
            self._current = number = heappop(ready)
            if self._needed_bytes.get(number, 0) > free_bytes():
                continue  # earlier reloads took the room
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
        """Retry a reload at a position, or at its deadline if that is earlier."""
        retry = min(position, self._events[number][1].last)
        self._alarms.setdefault(retry, []).append(number)
        self._asleep.add(number)

    def wait_for_bytes(self, number: int, num_bytes: int) -> None:
        """Retry a reload when so many device bytes are free."""
        self.retry_at(number, self._events[number][1].last)
        self._needed_bytes[number] = num_bytes

    def wait_for_dram(self, number: int, num_bytes: int) -> None:
        """Retry a reload when DRAM has a buffer of a size."""
        self.retry_at(number, self._events[number][1].last)
        self._in_line[number] = num_bytes
        heappush(self._lines.setdefault(num_bytes, []), number)

    def wait_for_copy(self, number: int, storage: int) -> None:
        """Retry a reload when the outgoing copy of a storage has ended."""
        self.retry_at(number, self._events[number][1].last)
        self._waiting_for_copy.setdefault(storage, []).append(number)

    def copy_ended(self, storage: int, position: int) -> None:
        """Wake the reloads that wait for the end of a storage's outgoing copy."""
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
        """Wake the first reload that waits for a buffer of a size."""
        line = self._lines[size]
        while line and line[0] not in self._in_line:
            heappop(line)
        if line:
            heappush(self._ready, line[0])
