"""Heartbeats of the ranks of a machine, in a file that the ranks and their parent map into memory.

    one slot per rank:  pid | phases begun | steps begun | step | microbatch | phase | note

A rank writes its slot at the begin of every phase of a step, which takes a few microseconds and no system call. The
note describes a wait: a thread of the rank inspects the stack of a phase that lasts, so short phases cost nothing.
Reads and writes are not synchronized: a reader may see a partial text, and reads again later. This module does not
import torch.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

BOARD_VARIABLE: Final = "HYPER_PARALLEL_BOARD"
"""Environment variable with the path of the launcher's board, for a forked rank."""

_MOVE: Final = struct.Struct("<qqqqq48s")
_PID: Final = struct.Struct("<q")  # first field of `_MOVE`
_NOTE: Final = struct.Struct("<200s")
_SLOT_BYTES: Final = _MOVE.size + _NOTE.size
_IDLE_S: Final = 0.01
"""CPU seconds between two looks below which a thread counts as waiting."""
_POLL_S: Final = 0.5  # this polling interval has no measurable cost
_COMMUNICATION: Final = ("torch/distributed/", "backends/torch/collectives.py")
_BETWEEN: Final = (
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "torch/_dynamo/",
    "backends/torch/forward_variants.py",
)
"""Files of stack frames between two functions that communicate."""
_DELEGATES: Final = ("torch/autograd/", "concurrent/futures/", "threading.py")
"""Files in which the main thread waits for another thread: backward on a device, an asynchronous checkpoint."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of a rank, as last published by it.

    Attributes:
        pid: Process id; 0 before the first heartbeat and after a successful end.
        beats: Number of phases begun; constant while the rank makes no progress.
        begun: Number of steps begun by this process.
        step: Current step; 0 outside steps.
        microbatch: Microbatch of the step, from 1; 0 if there is none.
        phase: Current phase.
        note: Current wait (`waits for ...`) or position (`is in ...`); empty in a phase that has just begun.
    """

    pid: int
    beats: int
    begun: int
    step: int
    microbatch: int
    phase: str
    note: str

    def __str__(self) -> str:
        where = f"step {self.step}, {self.phase}" if self.step else self.phase
        return f"{where} of microbatch {self.microbatch}" if self.microbatch else where


class HeartbeatBoard:
    """Heartbeat slots of the ranks of one machine.

    Args:
        path: The file; created when it is missing.
        ranks: Number of slots.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        self.path, self.ranks = path, ranks
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, ranks * _SLOT_BYTES)
            self.memory = mmap.mmap(file, ranks * _SLOT_BYTES)
        finally:
            os.close(file)

    def read(self) -> list[Heartbeat]:
        """Return the state of every rank, in rank order."""
        return [self._read(rank * _SLOT_BYTES) for rank in range(self.ranks)]

    def started(self, rank: int, pid: int) -> None:
        """Record the process of a rank, which may be stopped before its first heartbeat."""
        _PID.pack_into(self.memory, rank * _SLOT_BYTES, pid)

    def _read(self, offset: int) -> Heartbeat:
        *numbers, phase = _MOVE.unpack_from(self.memory, offset)
        (note,) = _NOTE.unpack_from(self.memory, offset + _MOVE.size)
        return Heartbeat(*numbers, phase=_text(phase), note=_text(note))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


class HeartbeatWriter:
    """Heartbeat slot of this rank, its only writer.

    Args:
        board: Slots of this machine.
        slot: Index of this rank's slot.
    """

    def __init__(self, board: HeartbeatBoard, slot: int) -> None:
        self._memory, self._offset = board.memory, slot * _SLOT_BYTES
        self._numbers = [os.getpid(), 0, 0, 0, 0]
        self._noted = False
        self.begin_phase("start")

    @property
    def beats(self) -> int:
        """Number of phases begun."""
        return self._numbers[1]

    def begin_step(self, step: int | None) -> None:
        """Begin a step; None begins work outside steps, such as an evaluation or a checkpoint."""
        self._numbers[2] += step is not None
        self._numbers[3:] = [step or 0, 0]
        self.begin_phase("begin")

    def begin_phase(self, phase: str) -> None:
        """Begin a phase."""
        numbers = self._numbers
        numbers[1] += 1
        numbers[4] += phase == "forward"
        _MOVE.pack_into(self._memory, self._offset, *numbers, phase.encode()[:47])
        if self._noted:
            self.note("")

    def note(self, text: str) -> None:
        """Publish a wait or position of this rank."""
        self._noted = bool(text)
        _NOTE.pack_into(self._memory, self._offset + _MOVE.size, text.encode()[:199])

    @contextmanager
    def watched(self, poll: Callable[[], None]) -> Iterator[None]:
        """Run a thread that publishes the wait of a long phase twice a second, and then calls `poll`."""
        ended = threading.Event()

        main = threading.main_thread().ident or 0

        def watch() -> None:
            before, computed_s = -1, 0.0
            while not ended.wait(_POLL_S):
                now_s = _computed_s(main)
                # A loop without phases counts as waiting unless it has used CPU time.
                if self.beats == before and (self._numbers[2] or now_s - computed_s < _IDLE_S):
                    self.note(describe_position())
                elif self._noted:
                    self.note("")
                before, computed_s = self.beats, now_s
                poll()

        thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._numbers[0] = 0  # an ended rank is no longer monitored
            self.begin_phase("end")


def _computed_s(thread: int) -> float:
    """Return the CPU seconds of a thread; 0 on systems without thread clocks."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def describe_position() -> str:
    """Describe the main thread: `waits for all_reduce (gradient norm) over dp_shard`, or `is in f (file.py:3)`.

    Frames are released on return. A reference cycle would keep the variables of functions that have returned, their
    tensors and buffers included, until the next garbage collection.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident())  # this function's own, whose variables refer to it
    main = frames.pop(threading.main_thread().ident or 0)
    innermost = [main]
    if any(part in main.f_code.co_filename for part in _DELEGATES):
        innermost += frames.values()
    for frame in innermost:
        if waits := _communication(frame):
            return waits
    code = main.f_code
    return f"is in {code.co_name} ({Path(code.co_filename).name}:{main.f_lineno})"


def _communication(frame: FrameType | None) -> str:
    """Return the collective in the innermost frames of a thread; empty if there is none.

    Only these frames are asked for `f_locals`: Python keeps that snapshot until the function returns, and these
    functions return as soon as the collective is done.
    """
    calls: list[str] = []
    facts: dict[str, str] = {}
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in file for part in _COMMUNICATION):
            if name == _AWAIT:
                calls.append(str(frame.f_locals["kind"]))
            elif not name.startswith(_NO_CALLS):
                calls.append(name)
            for key, fact in _facts(frame.f_locals):
                facts.setdefault(key, fact)
        elif not (calls and any(part in file for part in _BETWEEN)):
            break
        frame = frame.f_back
    if not calls:
        return ""
    purpose = f" ({facts['purpose']})" if "purpose" in facts else ""
    group = f" over {facts['group']}" if "group" in facts else ""
    layer = f" of {facts['layer']}" if "layer" in facts else ""
    return f"waits for {_PLAIN.get(calls[0], calls[0])}{purpose}{group}{layer}"


_AWAIT: Final = "await_collective"
"""Function of `backends.torch.collectives` that waits for a collective in flight."""
_NO_CALLS: Final = ("_", "wrapper", "wait", "<")
_PLAIN: Final = {
    "foreach_all_gather": "all_gather",
    "foreach_all_gather_copy_out": "all_gather",
    "foreach_reduce": "reduce_scatter",
    "wait_for_unshard": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "launch_gather_rows": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "launch_reduce_into": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def _facts(variables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield group, purpose and layer of a collective from the local variables of a function."""
    for value in variables.values():
        if description := getattr(value, "group_desc", None):
            axis = str(description).removeprefix("mesh_")
            yield "group", "all ranks" if axis == "default_pg" else axis
        elif type(value).__name__ == "Purpose":
            yield "purpose", str(value)
        elif layer := getattr(value, "_module_fqn", None):
            yield "layer", str(layer)
