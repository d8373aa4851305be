"""The measured Timeline: spans of a window of steps, one lane per rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.ir import Counter, Span, Timeline

WINDOW = range(3, 13)
"""Steps that are recorded: past the warm-up of caches, few enough to stay small."""

_MAX_RANKS = 64


class SpanRecorder:
    """Records what this rank does and when.

    On an accelerator a mark is an event in the stream, read after the run, so recording does not wait for kernels.

    Args:
        rank: Rank of this process, the lane's name.
        device: Device of this rank.
        first_step: First step of this run; the window moves along when a run is resumed.
    """

    def __init__(self, rank: int, device: torch.device, first_step: int = 1) -> None:
        self._rank = rank
        self._device = device
        self._events = device.type != "cpu"
        self._window = range(WINDOW.start + first_step - 1, WINDOW.stop + first_step - 1)
        self._marks: list[tuple[str, str, str, int | None, Any, Any]] = []
        self._counters: list[tuple[Any, float]] = []
        self._step: int | None = None
        self._origin = self._now()

    def begin_step(self, step: int | None) -> None:
        """Say which step the coming spans belong to; None outside the training steps."""
        self._step = step

    @contextmanager
    def span(self, name: str, category: str, lane: str = "compute") -> Iterator[None]:
        """Record the enclosed work when the step is in the window; evaluations and checkpoints always."""
        if self._step is not None and self._step not in self._window:
            yield
            return
        start = self._now()
        yield
        self._marks.append((lane, name, category, self._step, start, self._now()))

    def memory(self, num_bytes: float) -> None:
        """Record one sample of the memory in use."""
        if self._step in self._window:
            self._counters.append((self._now(), num_bytes))

    def gather(self, num_ranks: int) -> Timeline | None:
        """Collect every rank's spans on rank 0 (the first 64 ranks' at most); None elsewhere.

        Starts are relative to the first recorded mark of rank 0's machine clock; ranks of other machines are aligned
        by their own `SpanRecorder` being created right after a barrier.
        """
        if self._events:
            torch.accelerator.synchronize(self._device)
        mine: tuple[tuple[Span, ...], tuple[Counter, ...]] = ((), ())
        if self._rank < _MAX_RANKS:
            mine = (tuple(self._spans()), tuple(self._samples()))
        gathered: list[Any] = [None] * num_ranks
        if num_ranks > 1:
            dist.gather_object(mine, gathered if self._rank == 0 else None)
        else:
            gathered = [mine]
        if self._rank != 0:
            return None
        return Timeline(
            kind="measured",
            spans=tuple(span for spans, _ in gathered for span in spans),
            counters=tuple(counter for _, counters in gathered for counter in counters),
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

    def _spans(self) -> Iterator[Span]:
        for lane, name, category, step, start, end in self._marks:
            begin = self._seconds(start)
            yield Span(
                lane=f"rank {self._rank}/{lane}",
                name=name,
                start_s=begin,
                duration_s=self._seconds(end) - begin,
                category=category,
                step=step,
            )

    def _samples(self) -> Iterator[Counter]:
        for mark, value in self._counters:
            yield Counter(f"rank {self._rank}/memory", self._seconds(mark), value)
