"""Measurements of steps on this rank: spans in a window of steps, peak memory, and the trace of a profiler."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch import flights_to, local
from hyper_parallel.backends.torch.memory import StorageWatch
from hyper_parallel.errors import Unwritten, not_writable
from hyper_parallel.ir import Counter, Flight, Span, Timeline, joined, masking
from hyper_parallel.runtime import HeartbeatWriter

WINDOW: Final = range(2, 13)
"""Recorded steps, few enough for small files: the second, whose bytes are counted, and ten after the warm-up."""
_MAX_RANKS: Final = 64
_MAX_FLIGHTS: Final = 20_000
"""Collectives of a rank that a timeline shows; all of them count in the figures of a step."""
_ACTION: Final = re.compile(r"\d+([FBIW])\d+")
"""Name of a pipeline action: stage, direction, microbatch."""


class SpanRecorder:
    """Recorder of this rank's spans.

    On an accelerator a mark is an event in the stream, read after the run, so recording does not synchronize.

    Args:
        rank: Rank of this process, the number of the lane.
        device: Device of this rank.
        first_step: First step of this process; the window is relative to it.
        pulse: Heartbeat that is told about every span; None: no heartbeat.
        role: Name of the lane.

    Attributes:
        origin_s: Creation time in seconds of `time.time`, the start of the timeline.
        over: Whether the window has passed.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        first_step: int = 1,
        pulse: HeartbeatWriter | None = None,
        role: str = "rank",
    ) -> None:
        self._rank, self._device, self._pulse = rank, device, pulse
        self._lane, self.over = f"{role} {rank}", False
        self._events = device.type != "cpu"
        self._window = range(WINDOW.start + first_step - 1, WINDOW.stop + first_step - 1)
        self._spans: list[tuple[tuple[str, str, str, int | None], Any, Any]] = []
        self._samples: list[tuple[str, Any, float]] = []
        self._step: int | None = None
        self._flights: list[Flight] = []
        self._alone_s: dict[tuple[str, int], float] = {}
        self._shown_flights = 0
        self._origin, self.origin_s = self._now(), time.time()

    def begin_step(self, step: int | None) -> None:
        """Set the step of the next spans; None outside the training steps."""
        self._step = step
        self.over = self.over or (step is not None and step >= self._window.stop)
        if self._pulse is not None:
            self._pulse.begin_step(step)

    @contextmanager
    def span(self, name: str, category: str, lane: str = "compute") -> Iterator[None]:
        """Record the enclosed work if the step is in the window; evaluations and checkpoints are always recorded."""
        if self._pulse is not None:
            self._pulse.begin_phase(name)
        if self._step is not None and self._step not in self._window:
            yield
            return
        start = self._now()
        yield
        what = (f"{self._lane}/{lane}", name, category, self._step)
        end = self._now()
        self._spans.append((what, start, end))
        if self._events:
            self._samples.append(("memory", end, torch.accelerator.memory_allocated(self._device)))

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Record when collectives of the enclosed step are in flight, and when this rank waits for them.

        Only steps in the window and ranks on a CPU: a host does not wait for the collectives of an accelerator.
        Collectives of FSDP, which torch issues, are not recorded.
        """
        self._flights = []
        if self._events or self._step not in self._window:
            yield
            return
        with flights_to(self._flights.append):
            yield
        for flight in self._flights:
            seconds = flight.end_s - flight.start_s
            self._alone_s[flight.work] = min(seconds, self._alone_s.get(flight.work, seconds))
        shown = self._flights[: _MAX_FLIGHTS - self._shown_flights]
        self._shown_flights += len(shown)
        for flight in shown:
            lane = f"{self._lane}/communication"
            span = lane, str(flight.purpose), "in flight", self._step
            self._spans.append((span, flight.start_s, flight.end_s))

    def overlap(self) -> dict[str, Any]:
        """Return `ir.masking` of the last step; empty without recorded collectives.

        A collective alone takes its shortest time of the recorded steps so far.
        """
        return masking(self._flights, self._alone_s) if self._flights else {}

    def memory(self, samples: Iterable[tuple[str, float, int]]) -> None:
        """Add the gauge's samples of the step: name, host time and bytes."""
        if self._step in self._window:
            self._samples += [(w, self._now() if self._events else t, n) for w, t, n in samples]

    def gather(self, num_ranks: int) -> Timeline | None:
        """Collect every rank's spans on rank 0 (the first 64 ranks' at most); None elsewhere.

        Starts are relative to the first mark of each rank. Clocks of machines are aligned because every rank creates
        its `SpanRecorder` right after a barrier.
        """
        own = self.own() if self._rank < _MAX_RANKS else Timeline("measured", ())
        gathered = [own] * num_ranks
        if num_ranks > 1:
            dist.gather_object(own, gathered if self._rank == 0 else None)
        return joined(gathered) if self._rank == 0 else None

    def own(self, origin_s: float | None = None) -> Timeline:
        """Return this rank's timeline, relative to its own start or to a moment of `time.time`."""
        if self._events:
            torch.accelerator.synchronize(self._device)
        offset = 0.0 if origin_s is None else self.origin_s - origin_s

        def seconds(mark: Any) -> float:
            return self._seconds(mark) + offset

        return Timeline(
            "measured",
            tuple(
                Span(lane, name, seconds(start), seconds(end) - seconds(start), category, step=step)
                for (lane, name, category, step), start, end in self._spans
            ),
            tuple(
                Counter(f"{self._lane}/{what}", seconds(mark), n) for what, mark, n in self._samples
            ),
        )

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if self._events:
            return float(self._origin.elapsed_time(mark)) * 1e-3
        return float(mark - self._origin)


class PhaseSpans:
    """Substitute for `SpanRecorder` that reports the start of each part of a step to a listener.

    Args:
        begin: Called with a span's name; for a pipeline action with its direction, `forward` or `backward`.
    """

    def __init__(self, begin: Callable[[str], None]) -> None:
        self._begin = begin

    @contextmanager
    def span(self, name: str, category: str, lane: str = "compute") -> Iterator[None]:
        """Report the start of the enclosed work."""
        if action := _ACTION.fullmatch(name):
            name = "forward" if action[1] == "F" else "backward"
        self._begin(name)
        yield


_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_COUNTED_STEPS: Final = 2
"""Steps with counted tensors, which are slower: the first creates the optimizer state, all others are equal."""
_SAMPLE_INTERVAL_S: Final = 1e-3
"""Minimum seconds between samples of the bytes in a counted step, except peaks."""


class MemoryGauge:
    """Peak memory of this rank during one step; create it before the model.

    Accelerators: the allocator's peak. CPU: the bytes of all tensors, as predicted by a plan, counted in the first two
    steps of a run; later steps repeat the second. Without `state` no tensors are counted, and a CPU rank reports its
    peak resident anonymous memory above that of the process before the model was built. The kernel keeps the peak of
    the full resident set (`VmHWM`), which writing 5 to `/proc/self/clear_refs` resets (proc(5)); the file part is
    subtracted. Freed memory cached by the C library is resident and counts.

    Args:
        device: Device of this rank.

    Attributes:
        state: Returns the tensors that outlive a step; None: tensors are not counted.
        kinds: Returns the current bytes of parameters, optimizer states and gradients; empty: kinds are not separated.
        samples: Name (`memory`, or `peak` and a kind), time and bytes of the last step if it was counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state: Callable[[], Iterable[Tensor]] | None = None
        self.kinds: Callable[[], dict[str, int]] = dict
        self.samples: list[tuple[str, float, int]] = []
        self._highest: dict[str, int] = {}
        self._rising = False
        self._steps = self._counted = 0
        self._watch: StorageWatch | None = None
        if device.type == "cpu" and sys.platform == "linux":
            # Free memory of the inherited heap would be reused uncounted; return it to the system first.
            with suppress(AttributeError):  # a C library other than glibc
                ctypes.CDLL(None).malloc_trim(0)
        self._baseline = _resident()["RssAnon"] if device.type == "cpu" else 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the enclosed step and drop the previous measurements."""
        self.samples = []
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        elif self.state is None:
            if _STATUS.exists():
                _CLEAR_REFS.write_text("5")
        elif self._steps < _COUNTED_STEPS:
            self._steps += 1
            watch = self._watch = StorageWatch(sample=self._sample)
            for tensor in self.state():
                watch.track(local(tensor))
            with watch:
                yield
            self._counted, self._watch = self.peak_bytes(), None
            now = time.perf_counter()
            self.samples += [(f"peak {kind}", now, size) for kind, size in self._highest.items()]
            return
        yield

    def _sample(self, live_bytes: int, peak_bytes: int) -> None:
        """Record the live bytes after an operator of a counted step, and the bytes by kind after a peak."""
        now, rising = time.perf_counter(), live_bytes == peak_bytes
        if self._rising and not rising:
            self._highest = self.kinds()
        if rising or not self.samples or now - self.samples[-1][1] >= _SAMPLE_INTERVAL_S:
            self.samples.append(("memory", now, live_bytes))
        self._rising = rising

    def peak_bytes(self) -> int:
        """Return the peak of the running or the last step; 0 on a system without this information."""
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        if self.state is not None:
            return self._counted if self._watch is None else self._watch.peak_bytes
        now = _resident()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return max(0, peak - self._baseline)


def _resident() -> dict[str, int]:
    """Return the resident memory of this process in bytes by kind, as counted by the kernel; 0 if unavailable."""
    text = _STATUS.read_text() if _STATUS.exists() else ""
    sizes = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return defaultdict(int, {kind: int(size) * 1024 for kind, size in sizes})


def device_name(device: torch.device) -> str:
    """Return type and name of a device; for a CPU the architecture."""
    module = torch.get_device_module(device)
    known = device.type != "cpu" and hasattr(module, "get_device_name")
    return f"{device.type} ({module.get_device_name(device) if known else platform.machine()})"


def write_profile(profiler: Any, path: Path, unwritten: Unwritten) -> None:
    """Write a trace of torch.profiler in Chrome's format.

    Args:
        profiler: Finished `torch.profiler.profile`.
        path: Path of the file; its directory is created.
        unwritten: Collects a write failure.
    """
    with unwritten.spare(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:  # the trace library raises RuntimeError for I/O errors
            raise not_writable(OSError(f"{error!s:.200}"), path) from error
