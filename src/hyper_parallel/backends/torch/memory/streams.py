"""Copies on the streams of a device, ordered by events, without host synchronisation.

A copy waits for the work that was issued to the compute stream before it, which may write the source or use the target
buffer. `wait` makes the compute stream wait for the copy. Later work of the compute stream, such as a reuse of the
buffer, then follows the copy. A valid plan frees no buffer of a copy in flight, so no buffer needs `record_stream`.

Host threads read and write files, after the events of the storages that they read or overwrite. A thread also issues a
copy whose source is still being written by another copy. `wait` blocks the host only for a copy that a thread runs or
issues.

Only names that all device modules of torch share are used (`torch.get_device_module`: cuda, npu, xpu, and cpu, whose
streams and events do nothing).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from hyper_parallel.backends.torch.memory.tier_copies import finish
from hyper_parallel.ir import COPIES, MemoryAction, MemoryProgram
from hyper_parallel.ir.timeline import Span
from hyper_parallel.memory import Copied

_FILES = ("copy_in", "copy_out")
_LANES: Final = {
    "wait": ("compute", "wait", "wait "),
    "join": ("compute", "wait", "wait "),
    "run": ("compute", "run", ""),
    "recompute": ("compute", "recompute", ""),
    "communication": ("communication", "communication", ""),
}
"""Dict from kind of event (copies excluded) to (lane, category, name prefix) in a timeline."""


@dataclass(slots=True)
class _Copies:
    """Copies of one direction in a step, by column: storages, and events before and after each copy.

    Attributes:
        waited: Indices of the copies for which the compute stream has waited.
        waits: Events on the compute stream before these waits.
        num_bytes: Bytes of all copies.
    """

    storages: list[int] = field(default_factory=list)
    begins: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    waits: list[Any] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, storage: int, begin: Any, end: Any, num_bytes: int) -> None:
        self.storages.append(storage)
        self.begins.append(begin)
        self.ends.append(end)
        self.num_bytes += num_bytes


class _HostEvent(torch.cpu.Event):
    """Event of torch.cpu with a time; the CPU has no queue, so the event occurs when it is recorded."""

    __slots__ = ("_at_s",)  # thousands are read between two steps

    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    @classmethod
    def now(cls) -> _HostEvent:
        event = cls()
        event.record()
        return event

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._at_s - self._at_s) * 1e3


@dataclass(frozen=True)
class DeviceApi:
    """Streams and events of a device.

    Attributes:
        module: `torch.cuda`, `torch.npu`, `torch.cpu`, ...
        event: Function that creates an event; `enable_timing=True` gives it a time.
    """

    module: Any
    device: torch.device
    event: Callable[..., Any]

    @classmethod
    def of(cls, device: torch.device) -> DeviceApi:
        """Return the API of a device."""
        module = torch.get_device_module(device)
        timed = hasattr(module.Event, "elapsed_time")
        return cls(module, device, module.Event if timed else _HostEvent)

    def enter_thread(self) -> None:
        """Select this device in a new thread, which would otherwise create a context on the first device."""
        if self.device.index is not None:
            self.module.set_device(self.device)


@dataclass(slots=True)
class Times:
    """Measured seconds of one step (`now_s`) and of its waits, totals by kind of copy, and spans (None: not traced)."""

    now_s: float
    wait_s: float
    join_s: float
    copied: dict[str, Copied]
    spans: list[Span] | None


class StreamLanes:
    """Copies in flight: one stream per direction between device and DRAM, and one thread per direction of files.

    A direction is called a lane. Events are created once and reused in every step; all work issued at one point of the
    compute stream shares an event. A copy begins when it is issued or when the preceding copy on its stream ends.

    Attributes:
        position: Event at the current point of the compute stream; None: not recorded yet.
    """

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self.position: Any = None
        self._streams = {kind: api.module.Stream(api.device) for kind in COPIES if kind not in _FILES}
        self._threads = {kind: ThreadPoolExecutor(1, f"hyper-{kind}", api.enter_thread) for kind in _FILES}
        # (storage, target tier) -> newest copy: a thread's future, or columns and index of a copy on a stream
        self._running: dict[tuple[int, str], Any] = {}
        self._compute: Any = None
        self._events: list[Any] = []
        self._copies: dict[str, _Copies] = {}
        self._thread_copies: list[tuple[str, int, Any, Any]] = []
        self._recorded: dict[str, list[tuple[str, Any, Any]]] = {}
        self._trace = False

    def begin(self, program: MemoryProgram, trace: bool) -> None:
        """Begin a step; the current stream is its compute stream. With `trace`, spans are recorded."""
        self._program = program
        self._compute = self._api.module.current_stream(self._api.device)
        self._trace, self.position = trace, None
        self._copies, self._thread_copies = {lane: _Copies() for lane in self._streams}, []
        self._recorded = {kind: [] for kind in _LANES}
        self._issue_events: dict[int, Any] = {}
        self._unused = iter(tuple(self._events))
        self._first, self._first_host = self.now(), _HostEvent.now()

    def start(self, storage: int, lane: str, move: Callable[[], Any], num_bytes: int) -> None:
        """Issue a copy.

        A copy between device and DRAM is issued on the stream of its direction: immediately, or by a thread if another
        copy writes its source. A copy between DRAM and a file runs in a thread.

        `lane` is the direction, a key of `COPIES`. `move` copies the bytes, on the current stream or synchronously.
        """
        src, dst = COPIES[lane]
        source_copy = self._running.get((storage, src))
        issued = self.now()
        if source_copy is None and lane not in _FILES:
            end, copies = self._on_stream(lane, move, issued), self._copies[lane]
            self._running[storage, dst] = copies, len(copies.ends)
            copies.add(storage, issued, end, num_bytes)
            return
        # The plan may free the buffers as soon as the copy is done. `move` is therefore popped before it runs, so that
        # no reference to the buffers outlives it.
        pending_move = [move]

        def issue_on_stream() -> Any:
            stream = self._streams[lane]
            if (dependency := _end(source_copy)) is not None:
                stream.wait_event(dependency)
            stream.wait_event(issued)
            start_event = self._mark(stream)
            end = self._on_stream(lane, pending_move.pop(), start_event)
            self._thread_copies.append((lane, storage, start_event, end))
            return end

        def copy_file() -> None:
            dependency = _end(source_copy)
            issued.synchronize()
            if dependency is not None:
                dependency.synchronize()
            begin = _HostEvent.now()
            pending_move.pop()()
            self._thread_copies.append((lane, storage, begin, _HostEvent.now()))

        if lane in _FILES:
            self._running[storage, dst] = self._threads[lane].submit(copy_file)
            return
        # The thread that reads files issues the copy, because it can wait for the copy that writes the source.
        self._running[storage, dst] = self._threads["copy_in"].submit(issue_on_stream)

    def _on_stream(self, lane: str, move: Callable[[], Any], after: Any) -> Any:
        """Issue a copy on the stream of a direction, to begin after an event, and return the event of its end."""
        stream = self._streams[lane]
        stream.wait_event(after)
        with self._api.module.stream(stream):
            move()
        return self._mark(stream)

    def wait(self, storage: int, tier: str) -> None:
        """Make the compute stream wait for the newest copy of a storage into a tier.

        The host blocks only if a thread runs or issues the copy.

        Raises:
            TransferFailed: HP513 when the copy failed.
        """
        copy, begin = self._running.pop((storage, tier)), self.now()
        if (end := _end(copy)) is not None:
            self._compute.wait_event(end)
        self.position = None
        if isinstance(copy, Future):
            self._recorded["wait"].append((self._program.storages[storage].name, begin, self.now()))
        else:
            copies, index = copy
            copies.waited.append(index)
            copies.waits.append(begin)

    def ran(self, action: MemoryAction, begin: Any) -> None:
        """Add an operator to the timeline, from the event `begin` until now; collectives are added by `record_join`."""
        operator = self._program.operators[action.target]
        if operator.group:
            self._issue_events[action.target] = begin
        else:
            self._recorded[action.kind].append((operator.name, begin, self.now()))

    def record_join(self, index: int, begin: Any) -> None:
        """Add a wait for a collective to the timeline, from the event `begin` until now, and the collective itself.

        `index` is the operator of the collective, which is shown from its issue until now.
        """
        self.position = None
        end, name = self.now(), self._program.operators[index].name
        self._recorded["join"].append((name, begin, end))
        if index in self._issue_events:
            self._recorded["communication"].append((name, self._issue_events.pop(index), end))

    def now(self) -> Any:
        """Return the event at the current point of the compute stream, recorded if there is none yet."""
        if self.position is None:
            self.position = self._mark(self._compute)
        return self.position

    def seconds(self, event: Any) -> float:
        """Return the seconds from the start of the step to an event of the compute stream."""
        return float(self._first.elapsed_time(event)) / 1e3

    def _mark(self, stream: Any) -> Any:
        event = next(self._unused, None)
        if event is None:
            event = self._api.event(enable_timing=True)
            self._events.append(event)
        event.record(stream)
        return event

    def times(self) -> Times:
        """Wait for the end of the step on the device and return its times."""
        last = self.now()
        for event in (last, *(copies.ends[-1] for copies in self._copies.values() if copies.ends)):
            event.synchronize()
        for _, _, _, event in self._thread_copies:
            event.synchronize()
        storages, copied = self._program.storages, dict.fromkeys(COPIES, Copied())
        seconds = dict.fromkeys(self._recorded, 0.0)
        spans: list[Span] = []
        at_ms = self._first.elapsed_time
        for lane, copies in self._copies.items():
            stops = np.fromiter(map(at_ms, copies.ends), float, len(copies.ends))
            starts = np.fromiter(map(at_ms, copies.begins), float, len(stops))
            starts[1:] = np.maximum(starts[1:], stops[:-1])
            wait_times = stops.copy()
            wait_times[copies.waited] = list(map(at_ms, copies.waits))
            resumed = np.maximum(stops, wait_times)
            busy_s = max(float((stops - starts).sum()), 0.0) / 1e3
            copied[lane] = Copied(len(stops), copies.num_bytes, busy_s)
            seconds["wait"] += float((resumed - wait_times).sum()) / 1e3
            if self._trace:
                columns = (starts, stops - starts, wait_times, resumed - wait_times)
                rows = zip(copies.storages, *(column.tolist() for column in columns), strict=True)
                for s, start, length, wait, waited in rows:
                    name = storages[s].name
                    spans.append(Span(lane, name, start / 1e3, length / 1e3, "copy"))
                    span = Span("compute", f"wait {name}", wait / 1e3, waited / 1e3, "wait")
                    spans.append(span)
        for lane, s, begin, end in self._thread_copies:
            at_ms = (self._first_host if lane in _FILES else self._first).elapsed_time
            start, length = at_ms(begin) / 1e3, max(at_ms(end) - at_ms(begin), 0.0) / 1e3
            copied[lane] = copied[lane].plus(storages[s].num_bytes, length)
            if self._trace:
                spans.append(Span(lane, storages[s].name, start, length, "copy"))
        for kind, recorded in self._recorded.items():
            lane, category, prefix = _LANES[kind]
            for name, begin, end in recorded:
                start, stop = self.seconds(begin), self.seconds(end)
                length = max(stop - start, 0.0)
                seconds[kind] += length
                if self._trace:
                    spans.append(Span(lane, prefix + name, start, length, category))
        return Times(
            self.seconds(last), seconds["wait"], seconds["join"], copied,
            spans if self._trace else None,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads, and synchronise the device."""
        for lane in self._threads.values():
            lane.shutdown()
        self._api.module.synchronize(self._api.device)


def _end(copy: Future[Any] | tuple[_Copies, int] | None) -> Any:
    """Wait for the thread of a copy, if any, and return the copy's end event; None for a copy of a file or no copy."""
    if isinstance(copy, Future):
        return finish(copy)
    return None if copy is None else copy[0].ends[copy[1]]
