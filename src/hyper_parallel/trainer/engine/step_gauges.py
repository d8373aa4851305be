"""Measurements of training steps on this rank: timeline spans in a window of steps, peak memory, profiler traces."""

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
from hyper_parallel.ir import Counter, Flight, Span, Timeline, masking, merge_timelines
from hyper_parallel.runtime import HeartbeatWriter

WINDOW: Final = range(2, 13)
"""Recorded steps: step 2, in which `MemoryGauge` counts bytes, and ten later steps, few enough for small files."""
_MAX_RANKS: Final = 64
_MAX_FLIGHTS: Final = 20_000
"""Maximum number of a rank's collectives in a timeline; `overlap` counts all collectives."""
_ACTION: Final = re.compile(r"\d+([FBIW])\d+")
"""Name of a pipeline action: stage, direction, microbatch."""


class SpanRecorder:
    """Recorder of this rank's timeline spans in a window of training steps.

    On an accelerator, start and end of a span are stream events. They are read after the run, so recording does not
    synchronize the device.

    Args:
        rank: Rank of this process.
        device: Device of this rank.
        first_step: First step of this process; `WINDOW` is shifted accordingly.
        pulse: Heartbeat that every span updates; None: no heartbeat.
        role: Prefix of the timeline lane's name, which is followed by the rank.

    Attributes:
        origin_s: Creation time in seconds since the epoch; time 0 of the timeline.
        over: Whether the window of recorded steps has passed.
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
        """Set the step of the following spans; None: outside training steps."""
        self._step = step
        self.over = self.over or (step is not None and step >= self._window.stop)
        if self._pulse is not None:
            self._pulse.begin_step(step)

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Record the context as a span, unless the current step is a training step outside the window."""
        if self._pulse is not None:
            self._pulse.begin_phase(name)
        if self._step is not None and self._step not in self._window:
            yield
            return
        start = self._now()
        yield
        label = (f"{self._lane}/compute", name, category, self._step)
        end = self._now()
        self._spans.append((label, start, end))
        if self._events:
            self._samples.append(("memory", end, torch.accelerator.memory_allocated(self._device)))

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Record start and end of the collectives issued inside the context, in steps of the window.

        No effect on accelerators, where the host does not see when a collective ends. Collectives issued by FSDP are
        not recorded.
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
        """Return exposed seconds and masked share of the last step's recorded collectives (see `ir.masking`).

        Return {} if no collective was recorded. The shortest duration so far of each kind and size of collective stands
        for its duration without concurrent work.
        """
        return masking(self._flights, self._alone_s) if self._flights else {}

    def memory(self, samples: Iterable[tuple[str, float, int]]) -> None:
        """Add samples of `MemoryGauge`, (name, host time in seconds, bytes), if the current step is in the window."""
        if self._step in self._window:
            self._samples += [(w, self._now() if self._events else t, n) for w, t, n in samples]

    def gather(self, num_ranks: int) -> Timeline | None:
        """Gather the timelines of the first 64 ranks on rank 0; return None on other ranks.

        Each rank's times are relative to the creation of its `SpanRecorder`. The engine creates the recorders right
        after a barrier, so the clocks of different machines need not agree.
        """
        own = self.own() if self._rank < _MAX_RANKS else Timeline("measured", ())
        gathered = [own] * num_ranks
        if num_ranks > 1:
            dist.gather_object(own, gathered if self._rank == 0 else None)
        return merge_timelines(gathered) if self._rank == 0 else None

    def own(self, origin_s: float | None = None) -> Timeline:
        """Return this rank's timeline, with time 0 at `origin_s` (seconds since the epoch; None: the creation time)."""
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
            tuple(Counter(f"{self._lane}/{what}", seconds(mark), n) for what, mark, n in self._samples),
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
    """Substitute for `SpanRecorder` that only calls `begin` with the name of each span at its start.

    Names of pipeline actions become `forward` or `backward`.
    """

    def __init__(self, begin: Callable[[str], None]) -> None:
        self._begin = begin

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Call `begin` at the start of the context."""
        if action := _ACTION.fullmatch(name):
            name = "forward" if action[1] == "F" else "backward"
        self._begin(name)
        yield


_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_COUNTED_STEPS: Final = 2
"""Number of steps at the start of a run in which the bytes of all tensors are counted. Counting slows a step. The
first step also creates the optimizer state, so the second step represents all later steps."""
_SAMPLE_INTERVAL_S: Final = 1e-3
"""Minimum seconds between two samples in a counted step; new peaks are always sampled."""


class MemoryGauge:
    """Gauge of this rank's peak memory during a step; create it before the model.

    On an accelerator the gauge reads the allocator's peak. On a CPU it counts the bytes of all tensors in the first two
    steps, the quantity that plans predict. For later steps it reports the peak of the second step.

    If `state` is None, a CPU rank counts no tensors. The gauge then reports peak resident anonymous memory minus its
    value at construction. The peak comes from `VmHWM` in /proc/self/status, which writing 5 to /proc/self/clear_refs
    resets (proc(5)). It includes freed memory that the C library caches.

    Attributes:
        state: Function that returns the tensors that outlive a step; None: tensors are not counted.
        kinds: Function that returns current bytes by kind: parameters, gradients, optimizer states. An empty dict means
            that kinds are not separated.
        samples: Tuples (name, host time in seconds, bytes) of the last step if its tensors were counted. The name is
            `memory`, or `peak` followed by a kind.
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
            # Return free heap memory inherited by fork to the system; its reuse would not be counted.
            with suppress(AttributeError):  # a C library other than glibc
                ctypes.CDLL(None).malloc_trim(0)
        self._baseline = _resident()["RssAnon"] if device.type == "cpu" else 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that runs inside the context, and discard earlier samples."""
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
        """Record the live bytes after an operator and, at the end of a rise to a new peak, the bytes by kind."""
        now, rising = time.perf_counter(), live_bytes == peak_bytes
        if self._rising and not rising:
            self._highest = self.kinds()
        if rising or not self.samples or now - self.samples[-1][1] >= _SAMPLE_INTERVAL_S:
            self.samples.append(("memory", now, live_bytes))
        self._rising = rising

    def peak_bytes(self) -> int:
        """Return the peak bytes of the running or last step; 0 if the operating system does not report memory use."""
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        if self.state is not None:
            return self._counted if self._watch is None else self._watch.peak_bytes
        now = _resident()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return max(0, peak - self._baseline)


def _resident() -> dict[str, int]:
    """Return the sizes listed in /proc/self/status, in bytes by name, such as `VmHWM`; 0 for absent names."""
    text = _STATUS.read_text() if _STATUS.exists() else ""
    sizes = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return defaultdict(int, {kind: int(size) * 1024 for kind, size in sizes})


def device_name(device: torch.device) -> str:
    """Return type and product name of a device, such as `cuda (NVIDIA H200)`; for a CPU its architecture."""
    module = torch.get_device_module(device)
    known = device.type != "cpu" and hasattr(module, "get_device_name")
    return f"{device.type} ({module.get_device_name(device) if known else platform.machine()})"


def write_profile(profiler: Any, path: Path, unwritten: Unwritten) -> None:
    """Write the trace of a finished `torch.profiler.profile` in Chrome's format; keep write failures in `unwritten`."""
    with unwritten.spare(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:  # the trace library raises RuntimeError for I/O errors
            raise not_writable(OSError(f"{error!s:.200}"), path) from error
