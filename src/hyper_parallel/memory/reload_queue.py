"""Reloads whose time has come, and for which there is no room yet.

They are tried in the order in which they were to be issued. One that cannot succeed before something has changed is
not tried until then, so that a long line costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from hyper_parallel.ir import MemoryActionKind
from hyper_parallel.memory.copy_issue import Gap


class ReloadQueue:
    """The line of one emission.

    Args:
        events: What is to be issued: (position before which, what comes back, how), ascending.
    """

    def __init__(self, events: Sequence[tuple[int, Gap, MemoryActionKind]]) -> None:
        self._events = events
        self._begun = 0  # how many have had their time
        self._now: list[int] = []  # a heap: to be tried at this position
        self._current = -1
        self._alarms: dict[int, list[int]] = {}  # position -> what is tried there, if not before
        self._needs: dict[int, int] = {}  # waits for so many bytes
        self._in_line: dict[int, int] = {}  # waits for a buffer of DRAM of so many bytes
        self._lines: dict[int, list[int]] = {}  # heaps of those and of some that no longer do
        self._behind: dict[int, list[int]] = {}  # storage -> what waits for a copy of it to end
        self._asleep: set[int] = set()

    def at(
        self, position: int, free_bytes: Callable[[], int], dram_fits: Callable[[int], bool]
    ) -> Iterator[tuple[int, Gap, MemoryActionKind]]:
        """What is to be tried at a position, as (number, what comes back, how).

        Args:
            position: Of the emission.
            free_bytes: Bytes that are free now.
            dram_fits: Whether DRAM has a buffer of so many bytes.
        """
        now = self._now
        for number in self._alarms.pop(position, ()):
            self._wake(number)
        if self._needs:
            free = free_bytes()
            for number in [n for n, size in self._needs.items() if size <= free]:
                heappush(now, number)
        for size in self._lines:
            self._next_in_line(size)
        while self._begun < len(self._events) and self._events[self._begun][0] <= position:
            heappush(now, self._begun)
            self._begun += 1
        while now:
            self._current = number = heappop(now)
            if self._needs.get(number, 0) > free_bytes():
                continue  # others have taken the room
            if number in self._in_line:
                if not dram_fits(self._in_line[number]):
                    continue
                self._next_in_line(self._in_line.pop(number))
            self._asleep.discard(number)
            self._needs.pop(number, None)
            _, gap, kind = self._events[number]
            yield number, gap, kind
        self._current = len(self._events)

    def until(self, number: int, position: int) -> None:
        """Try it again at a position, or where it must be back."""
        at = min(position, self._events[number][1].last)
        self._alarms.setdefault(at, []).append(number)
        self._asleep.add(number)

    def for_bytes(self, number: int, num_bytes: int) -> None:
        """Try it again when so many bytes are free."""
        self.until(number, self._events[number][1].last)
        self._needs[number] = num_bytes

    def for_dram(self, number: int, num_bytes: int) -> None:
        """Try it again when DRAM has a buffer of so many bytes."""
        self.until(number, self._events[number][1].last)
        self._in_line[number] = num_bytes
        heappush(self._lines.setdefault(num_bytes, []), number)

    def for_copy(self, number: int, storage: int) -> None:
        """Try it again when a copy of a storage that is leaving has ended."""
        self.until(number, self._events[number][1].last)
        self._behind.setdefault(storage, []).append(number)

    def ended(self, storage: int, position: int) -> None:
        """A copy of a storage that is leaving has ended."""
        for number in self._behind.pop(storage, ()):
            if number > self._current:
                self._wake(number)
            elif number in self._asleep:
                self.until(number, position + 1)

    def _wake(self, number: int) -> None:
        if number in self._asleep:
            self._asleep.discard(number)
            self._needs.pop(number, None)
            self._in_line.pop(number, None)
            heappush(self._now, number)

    def _next_in_line(self, size: int) -> None:
        """The first that waits for a buffer is tried; the others have to wait for it."""
        line = self._lines[size]
        while line and line[0] not in self._in_line:
            heappop(line)
        if line:
            heappush(self._now, line[0])
