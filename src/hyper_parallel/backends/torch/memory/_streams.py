"""Copies on the streams of a device, ordered by events: the host waits for none of them.

A copy waits for everything the compute stream did before it was issued (it made what is copied, and it used the
buffer that is filled). `wait` makes the compute stream wait for the copy. So what the compute stream does afterwards,
above all giving a buffer back to an allocator that hands it out in the compute stream's order, comes after the copy.
A valid plan drops nothing under a running copy, so no buffer needs `record_stream`.

Files are read and written by host threads. A thread waits for the event of what it reads or overwrites; a copy to the
device that follows a file is issued by the thread, and only the wait for it reaches the host.

Only names that all device modules of torch share are used (`torch.get_device_module`: cuda, npu, xpu, and cpu, whose
streams and events do nothing).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.backends.torch.memory._copies import HOST, HostTasks, finish
from hyper_parallel.ir import COPIES, MemoryAction, MemoryProgram, Operator
from hyper_parallel.ir.timeline import Span
from hyper_parallel.memory import Copied

_FILES = ("copy_in", "copy_out")


class _HostEvent(torch.cpu.Event):
    """An event of torch.cpu, which has no queue, with the time that it lacks."""

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
    """What the executor needs of a device's queues, under one set of names.

    Attributes:
        module: `torch.cuda`, `torch.npu`, `torch.cpu`, ...
        device: The device.
        event: Makes an event; `enable_timing=True` for one that knows its time.
    """

    module: Any
    device: torch.device
    event: Callable[..., Any]

    @classmethod
    def of(cls, device: torch.device) -> DeviceApi:
        """The queues of a device."""
        module = torch.get_device_module(device)
        timed = hasattr(module.Event, "elapsed_time")
        return cls(module, device, module.Event if timed else _HostEvent)

    def enter_thread(self) -> None:
        """A new thread works on this device: it would begin on the first one, and make a context there."""
        if self.device.index is not None:
            self.module.set_device(self.device)


@dataclass(slots=True)
class Times:
    """Measured times of one step, in seconds from its start."""

    now_s: float
    wait_s: float
    join_s: float
    copied: dict[str, Copied]
    spans: list[Span] | None


class StreamLanes(HostTasks):
    """The copies that are under way: one stream per direction, one thread for files in each direction.

    Args:
        api: The device's queues.
    """

    def __init__(self, api: DeviceApi) -> None:
        super().__init__()
        self._api = api
        self._streams = {
            kind: api.module.Stream(api.device) for kind in COPIES if kind not in _FILES
        }
        self._threads = {
            kind: ThreadPoolExecutor(1, f"hyper-{kind}", api.enter_thread)
            for kind in (*_FILES, HOST)
        }
        self._running: dict[tuple[int, str], Any] = {}
        self._compute: Any = None
        self._marks: list[tuple[str, str, str, Any, Any, int]] = []
        self._trace = False

    def begin(self, program: MemoryProgram, trace: bool) -> None:
        """A step starts on the compute stream, which is the current one."""
        self._program = program
        self._compute = self._api.module.current_stream(self._api.device)
        self._marks, self._trace = [], trace
        self._begun: dict[int, Any] = {}
        self._first, self._first_host = self._mark(self._compute), _HostEvent.now()

    def start(self, storage: int, lane: str, move: Callable[[], None], num_bytes: int) -> None:
        """Issue a copy; `move` moves the bytes, on the current stream or by itself."""
        src, dst = COPIES[lane]
        before = self._running.get((storage, src))
        change = self._changing.get(storage) if src == "dram" else None
        issued = self._api.event()
        issued.record(self._compute)
        if lane not in _FILES and change is None and before is None:
            self._running[storage, dst] = self._on_stream(storage, lane, move, [issued])
            return
        todo = [move]

        def by_thread() -> Any:
            finish(change)
            ahead = finish(before) if isinstance(before, Future) else before
            if lane not in _FILES:
                return self._on_stream(storage, lane, todo.pop(), [issued, ahead])
            issued.synchronize()
            if ahead is not None:
                ahead.synchronize()
            begin = _HostEvent.now()
            # Let go of the buffers before the copy counts as done: the plan may free them right then.
            todo.pop()()
            known = self._program.storages[storage]
            self._marks.append((lane, known.name, "copy", begin, _HostEvent.now(), known.num_bytes))
            return None

        # A copy to the device that follows a file is issued where the file is read, one that follows an operator in
        # host memory where that runs.
        behind = "copy_in" if change is None else HOST
        self._running[storage, dst] = self._threads[lane if lane in _FILES else behind].submit(
            by_thread
        )

    def update(self, index: int, operator: Operator, run: Callable[[], None]) -> None:
        """Begin an operator in host memory, behind what fills its operands there and the operators before it."""
        # What it writes may still be on its way to the device, which the compute stream has been made to wait for.
        issued = self._api.event()
        issued.record(self._compute)
        ahead = [issued, *(self._running.get((s, "dram")) for s in operator.touched)]
        todo = [run]

        def by_thread() -> None:
            for task in ahead:
                event = finish(task) if isinstance(task, Future) else task
                if event is not None:
                    event.synchronize()
            ahead.clear()
            begin = _HostEvent.now()
            todo.pop()()
            self._marks.append((HOST, operator.name, "update", begin, _HostEvent.now(), 0))

        self._began(index, operator, self._threads[HOST].submit(by_thread))

    def _on_stream(
        self, storage: int, lane: str, move: Callable[[], None], ahead: list[Any]
    ) -> Any:
        """Copy on the stream of a direction, after these events; the event of its end."""
        stream = self._streams[lane]
        for event in ahead:
            if event is not None:
                stream.wait_event(event)
        begin = self._mark(stream)
        with self._api.module.stream(stream):
            move()
        end = self._mark(stream)
        known = self._program.storages[storage]
        self._marks.append((lane, known.name, "copy", begin, end, known.num_bytes))
        return end

    def wait(self, storage: int, tier: str) -> None:
        """Let the compute stream go on only after the newest copy of a storage into a tier.

        The host waits for a file, not for a copy.

        Raises:
            TransferFailed: HP513 when the copy could not be made.
        """
        done = self._running.pop((storage, tier))
        begin = self._mark(self._compute)
        if isinstance(done, Future):
            done = finish(done)
        if done is not None:
            self._compute.wait_event(done)
        name = f"wait {self._program.storages[storage].name}"
        self._marks.append(("compute", name, "wait", begin, self._mark(self._compute), 0))

    def ran(self, action: MemoryAction, begin: Any) -> None:
        """An operator was issued after `begin`; kept for the timeline."""
        operator = self._program.operators[action.target]
        if operator.group:
            self._begun[action.target] = begin
            return
        name = operator.name
        self._marks.append(("compute", name, action.kind, begin, self._mark(self._compute), 0))

    def joined(self, index: int, begin: Any) -> None:
        """The compute stream was made to wait for an operator of a group after `begin`.

        The collective library's stream is its own, so for the timeline the operator is under way until then.
        """
        end, name = self._mark(self._compute), self._program.operators[index].name
        group = self._program.operators[index].group
        self._marks.append(("compute", f"wait {name}", "join" if group else "wait", begin, end, 0))
        if index in self._begun:
            lane = "communication"
            self._marks.append((lane, name, lane, self._begun.pop(index), end, 0))

    def now(self) -> Any:
        """An event at this point of the compute stream."""
        return self._mark(self._compute)

    def seconds(self, event: Any) -> float:
        """When an event of the compute stream happened, from the start of the step."""
        return float(self._first.elapsed_time(event)) / 1e3

    def _mark(self, stream: Any) -> Any:
        event = self._api.event(enable_timing=True)
        event.record(stream)
        return event

    def times(self) -> Times:
        """What the step took; waits for its end."""
        last = self._mark(self._compute)
        last.synchronize()
        copied = dict.fromkeys(COPIES, Copied())
        spans: list[Span] = []
        waited = joined = 0.0
        for lane, name, category, begin, end, num_bytes in self._marks:
            end.synchronize()
            seconds = max(begin.elapsed_time(end), 0.0) / 1e3
            if category == "copy":
                old = copied[lane]
                copied[lane] = Copied(
                    old.count + 1, old.num_bytes + num_bytes, old.seconds + seconds
                )
            elif category == "wait":
                waited += seconds
            elif category == "join":
                joined, category = joined + seconds, "wait"
            if self._trace:
                first = self._first_host if lane in (*_FILES, HOST) else self._first
                start = first.elapsed_time(begin) / 1e3
                spans.append(Span(lane, name, start, seconds, category))
        now = self._first.elapsed_time(last) / 1e3
        return Times(now, waited, joined, copied, spans if self._trace else None)

    def close(self) -> None:
        """End the threads, and wait for what the device still does."""
        for lane in self._threads.values():
            lane.shutdown()
        self._api.module.synchronize(self._api.device)
