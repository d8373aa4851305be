"""Heartbeats of ranks, detection of hangs and lost machines, and restarts after a hang or a failed rank.

    one slot per rank:  pid | phases begun | steps begun | step | microbatch | phase | note

The slots form the board, a file that the ranks of a machine and their parent map into memory. A rank writes its slot at
the start of every phase of a step (forward, backward, ...), which takes microseconds and no system call. If a phase
lasts long, a thread of the rank writes a note: the collective in which the main thread waits, or its position in the
code. Reads and writes are not synchronized, so a reader may rarely see a partial text. This module does not import
torch.

A rank makes progress when it begins a phase. A hang is detected when a rank makes no progress until its deadline. The
culprits of a hang are the ranks that are stopped by a signal or have ended. Without such ranks, the culprits are the
ranks outside collectives, because the other ranks wait for them. A process stopped by a signal cannot be busy, so the
shorter deadline applies to it.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from hyper_parallel.errors import HostLost, RankFailed, RankHung, RestartsUsedUp

BOARD_VARIABLE: Final = "HYPER_PARALLEL_BOARD"
"""Environment variable of forked ranks: number of slots and path of the parent's board."""

_MOVE: Final = struct.Struct("<qqqqq48s")
"""Format of a slot without note: five integers and the name of the phase, see the module docstring."""
_PID: Final = struct.Struct("<q")  # first field of `_MOVE`
_NOTE: Final = struct.Struct("<200s")
_SLOT_BYTES: Final = _MOVE.size + _NOTE.size
_IDLE_S: Final = 0.01
"""A thread that used fewer CPU seconds between two polls counts as waiting."""
_POLL_S: Final = 0.5  # this polling interval has no measurable cost
_COMMUNICATION: Final = ("torch/distributed/", "backends/torch/collectives.py")
"""Path fragments of source files with functions that communicate."""
_BETWEEN: Final = (
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "torch/_dynamo/",
    "backends/torch/forward_variants.py",
)
"""Path fragments of source files whose stack frames may lie between functions that communicate."""
_DELEGATES: Final = ("torch/autograd/", "concurrent/futures/", "threading.py")
"""Path fragments of source files in which the main thread waits for another thread, for example in backward."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Last published state of a rank.

    Attributes:
        pid: Process id; 0 if the rank has not started or is no longer monitored.
        beats: Number of phases begun, which does not change while the rank makes no progress.
        begun: Number of steps begun by the process.
        step: Current step; 0 outside steps.
        microbatch: Current microbatch of the step, from 1; 0 outside microbatches.
        phase: Current phase.
        note: Current wait (`waits for ...`) or position in the code (`is in ...`); empty in a short phase.
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
    """Heartbeat slots of the ranks on a machine.

    Args:
        path: Path of the file, which is created if it does not exist.
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
        """Return the last published state of every rank, in the order of slots."""
        return [self._read(rank * _SLOT_BYTES) for rank in range(self.ranks)]

    def started(self, rank: int, pid: int) -> None:
        """Record the process id of a rank before its first heartbeat."""
        _PID.pack_into(self.memory, rank * _SLOT_BYTES, pid)

    def _read(self, offset: int) -> Heartbeat:
        *numbers, phase = _MOVE.unpack_from(self.memory, offset)
        (note,) = _NOTE.unpack_from(self.memory, offset + _MOVE.size)
        return Heartbeat(*numbers, phase=_text(phase), note=_text(note))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


class HeartbeatWriter:
    """Writer of this rank's heartbeat slot. From its first heartbeat on, no other process writes the slot.

    Args:
        board: Heartbeat slots of the machine.
        slot: Index of this rank's slot.
    """

    def __init__(self, board: HeartbeatBoard, slot: int) -> None:
        self._memory, self._offset = board.memory, slot * _SLOT_BYTES
        self._numbers = [os.getpid(), 0, 0, 0, 0]
        self._noted = False
        self.begin_phase("start")

    def begin_step(self, step: int | None) -> None:
        """Publish the start of a step; None: work outside steps, such as an evaluation or a checkpoint."""
        self._numbers[2] += step is not None
        self._numbers[3:] = [step or 0, 0]
        self.begin_phase("begin")

    def begin_phase(self, phase: str) -> None:
        """Publish the start of a phase."""
        numbers = self._numbers
        numbers[1] += 1
        numbers[4] += phase == "forward"
        _MOVE.pack_into(self._memory, self._offset, *numbers, phase.encode()[:47])
        if self._noted:
            self.note("")

    def note(self, text: str) -> None:
        """Publish a note: the current wait of this rank, or its position in the code."""
        self._noted = bool(text)
        _NOTE.pack_into(self._memory, self._offset + _MOVE.size, text.encode()[:199])

    @contextmanager
    def watched(self, poll: Callable[[], None]) -> Iterator[None]:
        """Run a thread inside the context that twice a second calls `poll`, and publishes a note in a long phase."""
        ended = threading.Event()
        main = threading.main_thread().ident or 0

        def watch() -> None:
            before, computed_s = -1, 0.0
            while not ended.wait(_POLL_S):
                now_s = _computed_s(main)
                # A user's loop, which publishes no phases, counts as waiting only while it uses no CPU time.
                if self._numbers[1] == before and (self._numbers[2] or now_s - computed_s < _IDLE_S):
                    self.note(describe_position())
                elif self._noted:
                    self.note("")
                before, computed_s = self._numbers[1], now_s
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
    """Return the CPU seconds used by a thread; 0.0 on systems without thread clocks."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def describe_position() -> str:
    """Describe the collective in which the main thread waits or, outside collectives, its position in the code.

    Examples: `waits for all_reduce (gradient norm) over dp_shard`, `is in f (file.py:3)`.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident())  # the frame of this function, to avoid a reference cycle
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
    """Describe the collective in which a thread waits, given its innermost frame; return "" outside collectives.

    `f_locals` is read only from frames of the collective, because Python keeps this copy of the variables until the
    function returns.
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
"""Name of the function in `backends.torch.collectives` that waits for a collective in flight."""
_NO_CALLS: Final = ("_", "wrapper", "wait", "<")
"""Prefixes of function names that do not name a collective."""
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
"""Name of the collective in messages, by name of the function of torch or FSDP that runs the collective."""


def _facts(variables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield facts about a collective, ("group" | "purpose" | "layer", text), from the local variables of a frame."""
    for value in variables.values():
        if description := getattr(value, "group_desc", None):
            axis = str(description).removeprefix("mesh_")
            yield "group", "all ranks" if axis == "default_pg" else axis
        elif type(value).__name__ == "Purpose":
            yield "purpose", str(value)
        elif layer := getattr(value, "_module_fqn", None):
            yield "layer", str(layer)


_log = logging.getLogger(__name__)
_LONGEST_POLL_S: Final = 2.0
"""At most this many seconds between two polls count towards a deadline; longer pauses concern the whole machine."""
_BACKOFF_S: Final = 1.0
"""Seconds of waiting before the first restart, doubled for each later restart."""
_LONGEST_BACKOFF_S: Final = 60.0
STOPPED: Final = ("t", "T")
"""Process states of proc(5): stopped by a debugger, stopped by a signal."""
GONE: Final = ("Z", "X")
"""Process states of proc(5): zombie, dead."""
_LAST_WORDS_S: Final = 0.5
"""Seconds for the ranks of a machine to print the reason and their stacks, before the first rank ends."""
_ENDING_S: Final = 10.0
"""Minimum deadline of a phase, in seconds, after a signal has asked the run to end."""
_ENDING_FIRST_S: Final = 20.0
"""Like `_ENDING_S`, for the first step, which is slower; not measured."""
_ENDING_PHASES: Final = 3.0
"""Deadline of a phase after a signal has asked the run to end, as a multiple of the longest phase so far."""
_QUIET_S: Final = 30.0
"""Seconds without progress after which waiting ranks are reported: longer than common steps, not measured."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Maximum time without progress of a rank.

    Attributes:
        step_s: Seconds in a phase of any step except the first of the process; also seconds after which a process that
            is stopped by a signal, or has ended, counts as a hang.
        first_step_s: Seconds in a phase of the first step of the process, and outside steps: start, evaluation,
            checkpoint, export.
    """

    step_s: float
    first_step_s: float

    def of(self, beat: Heartbeat) -> float:
        """Return the deadline, in seconds, that applies to a rank in state `beat`."""
        return self.step_s if beat.step and beat.begun > 1 else self.first_step_s


@dataclass(frozen=True, slots=True)
class Hang:
    """Description of a hang.

    Attributes:
        culprits: Ranks that cause the hang; empty when all ranks wait in collectives.
        stopped: Culprits that are stopped by a signal.
        description: Line about the state of the first culprit; without culprits, about the collectives of all ranks.
        other_states: Lines about the states of all other ranks.
    """

    culprits: tuple[int, ...]
    stopped: tuple[int, ...]
    description: str
    other_states: tuple[str, ...]

    def error(self, where: str | None = None, stack: str = "", restart: str = "training.max_restarts=3") -> RankHung:
        """Return the RankHung error (HP620) of this hang.

        Args:
            where: Log file of the first culprit; None: no log file.
            stack: Stack of the first culprit.
            restart: Setting that makes the launcher restart failed ranks, for the hint.
        """
        hint = (
            "if a phase may take this long, raise `training.timeout_s` or, for the first step, evaluation, checkpoint "
            "and export, `training.first_step_timeout_s` (with `hp.launch`: `deadlines`)"
        )
        if not self.culprits:
            hint = "training.debug_collectives=true (in your own loop `World.join(debug=True)`) names the collectives"
        elif self.stopped:
            hint = f"{restart} continues from the newest checkpoint"
        description = f"{self.description}\n{stack}".strip()
        return RankHung(description, where=where, hint=hint, others=self.other_states)


class HangDetector:
    """Hang detector that polls the heartbeats of a machine.

    At most two seconds of the time between two polls count, so a pause of the whole machine is not taken for a hang.

    Args:
        board: Heartbeat slots of the ranks.
        deadlines: Maximum time without progress of a rank.
        first: Rank of slot 0.
        ending: Function that returns whether a signal has asked the run to end after the current step. Deadlines are
            then shorter.
    """

    def __init__(
        self,
        board: HeartbeatBoard,
        deadlines: Deadlines,
        first: int = 0,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._board, self._deadlines, self._first = board, deadlines, first
        self._ending, self._longest_s = ending, 0.0
        self._beats = [0] * board.ranks
        self._idle_s = [0.0] * board.ranks
        self._frozen_s = [0.0] * board.ranks
        self._polled_at = time.monotonic()

    def poll(self, ranks: Collection[int]) -> Hang | None:
        """Poll the heartbeats; return the hang if any of `ranks` (running slots) exceeds its deadline, else None."""
        now = time.monotonic()
        passed, self._polled_at = min(now - self._polled_at, _LONGEST_POLL_S), now
        beats = self._board.read()
        states = {rank: process_state(beats[rank].pid) for rank in ranks}
        for rank, beat in enumerate(beats):
            is_idle = beat.beats == self._beats[rank]
            if not is_idle and beat.step:
                self._longest_s = max(self._longest_s, self._idle_s[rank])
            frozen = states.get(rank) in STOPPED + GONE
            self._idle_s[rank] = self._idle_s[rank] + passed if is_idle else 0.0
            self._frozen_s[rank] = self._frozen_s[rank] + passed if frozen else 0.0
            self._beats[rank] = beat.beats
        if all(
            self._idle_s[rank] <= self._deadline_s(beats[rank]) and self._frozen_s[rank] <= self._deadlines.step_s
            for rank in ranks
        ):
            return None
        seconds = [f or s for f, s in zip(self._frozen_s, self._idle_s, strict=True)]
        return hang(beats, seconds, states, self._first)

    def ends_start(self) -> bool:
        """Return whether a signal has asked the run to end before any rank has begun a step."""
        return self._ending() and not any(beat.begun for beat in self._board.read())

    def _deadline_s(self, beat: Heartbeat) -> float:
        deadline_s = self._deadlines.of(beat)
        if not (beat.step and self._ending()):
            return deadline_s
        least_s = _ENDING_S if beat.begun > 1 else _ENDING_FIRST_S
        return min(deadline_s, max(least_s, _ENDING_PHASES * self._longest_s))


class WaitReporter:
    """Reporter for runs without deadlines: prints waits and positions of all ranks when no rank makes progress.

    Args:
        board: Heartbeat slots of the ranks.
        first: Rank of slot 0.
    """

    def __init__(self, board: HeartbeatBoard, first: int = 0) -> None:
        self._board, self._first = board, first
        self._seen: list[tuple[int, str]] = []
        self._since = time.monotonic()
        self._next_s = _QUIET_S

    def poll(self) -> None:
        """Poll; print a line after 30 s, 60 s, 120 s, ... without progress of any rank, if a rank waits for others."""
        seen = [(beat.beats, beat.note) for beat in self._board.read()]
        if seen != self._seen or not any(note.startswith("waits for") for _, note in seen):
            self._seen, self._since, self._next_s = seen, time.monotonic(), _QUIET_S
            return
        idle_s = time.monotonic() - self._since
        if idle_s >= self._next_s:
            self._next_s *= 2
            where = "; ".join(self.places())
            sys.stderr.write(f"no rank has made progress for {idle_s:.0f} s: {where}\n")

    def places(self) -> list[str]:
        """Return a line about the wait or position of every monitored rank."""
        return [
            f"rank {self._first + slot} {beat.note or 'does not wait'}"
            for slot, beat in enumerate(self._board.read())
            if beat.pid
        ]


def hang(beats: Sequence[Heartbeat], idle_s: Sequence[float], states: dict[int, str], first: int = 0) -> Hang:
    """Determine the ranks that cause a hang, and describe the states of all ranks.

    Args:
        beats: Last published state by slot.
        idle_s: Seconds by slot since the last progress, or since the process was stopped by a signal or ended.
        states: Process states of proc(5) by slot, for running ranks; "": unknown.
        first: Rank of slot 0.
    """
    waiting = [rank for rank in states if beats[rank].note.startswith("waits for")]
    stopped = tuple(rank for rank, state in states.items() if state in STOPPED)
    gone = tuple(rank for rank, state in states.items() if state in GONE)
    culprits = stopped + gone or tuple(rank for rank in states if rank not in waiting)
    lines = {
        slot: f"rank {first + slot} {_doing(beats[slot], state)} "
        f"(no progress for {idle_s[slot]:.0f} s), in {beats[slot]}"
        for slot, state in states.items()
    }
    description = "all ranks wait in collectives, which do not match or wait for another machine"
    if culprits:
        description = lines.pop(culprits[0]) + ("; the others wait for it" if waiting else "")
    ranks = [tuple(first + slot for slot in slots) for slots in (culprits, stopped)]
    return Hang(*ranks, description, tuple(lines.values()))


def _doing(beat: Heartbeat, state: str) -> str:
    if state in STOPPED:
        return "is stopped by a signal"
    if state in GONE:
        return "has ended without an error message"
    return beat.note or "reports no position"


def process_state(pid: int) -> str:
    """Return the state of a process as a letter of proc(5); "X" if it has ended, "" if unknown or `pid` is 0."""
    if not pid or not Path("/proc/self/stat").exists():
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "X"


class HangMonitor:
    """Hang monitor inside each rank of torchrun; after a hang, all ranks of the machine end.

    Every rank polls, because any rank may be stopped by a signal. torchrun restarts the ended ranks if `--max-restarts`
    permits.

    Args:
        board: Heartbeat slots of the machine.
        deadlines: Maximum time without progress of a rank.
        slot: Slot of this rank.
        first: Rank of slot 0.
        ending: See `HangDetector`. Called on another thread, because the main thread may be blocked.
    """

    def __init__(
        self,
        board: HeartbeatBoard,
        deadlines: Deadlines,
        slot: int,
        first: int,
        ending: Callable[[], bool],
    ) -> None:
        self._board, self._slot, self._first = board, slot, first
        self._watch = HangDetector(board, deadlines, first, ending)

    def poll(self) -> None:
        """Poll the heartbeats; after a hang, end this process and all stopped processes of the machine.

        The lowest rank that is not stopped prints the error.
        """
        hang_state = self._watch.poll(range(self._board.ranks))
        if hang_state is None:
            return
        slots = [rank - self._first for rank in hang_state.stopped]
        if self._slot == min(set(range(self._board.ranks)) - set(slots)):
            error = hang_state.error(restart="torchrun --max-restarts=3")
            sys.stderr.write(error.render() + "\n")
        if self._first + self._slot in hang_state.culprits:
            faulthandler.dump_traceback(all_threads=True)
        time.sleep(_LAST_WORDS_S)
        pids = [beat.pid for beat in self._board.read()]
        for slot in slots:
            with suppress(ProcessLookupError):
                os.kill(pids[slot], signal.SIGKILL)
        with suppress(OSError):
            self._board.path.unlink()
        os._exit(1)


def board_of_machine() -> Path:
    """Return the path of the heartbeat file that the ranks of torchrun share; a restart uses a new file."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = "-".join([str(os.getuid()), str(os.getppid()), *(os.environ.get(n, "") for n in names)])
    return Path(tempfile.gettempdir()) / f"hyper_parallel-{run.replace('/', '_')}.board"


_ANSWER_S: Final = 5.0
"""Seconds within which a machine must report after a failed collective; not measured on a large cluster."""
_ANSWER_POLL_S: Final = 0.1  # short compared with `_ANSWER_S`


class Hosts:
    """Flags of live machines in the store of the process group, to name a lost machine after a failed collective.

    Machines may run different numbers of ranks, so each machine adds its name and ranks to a list in the store.

    Args:
        store: Store of the process group.
        rank: Rank of this process in its world.
        world_size: Number of ranks of the world.
        local_rank: Rank of this process on its machine.
        local_size: Number of launched ranks on this machine.
    """

    def __init__(self, store: Any, rank: int, world_size: int, local_rank: int, local_size: int) -> None:
        self._store, self._rank, self._first_rank = store, rank, max(0, rank - local_rank)
        last = min(world_size, rank - local_rank + local_size) - 1
        text = f"{rank} {socket.gethostname()} (ranks {rank} to {last})\n" if rank == self._first_rank else ""
        store.append("hyper_parallel/hosts", text)

    def report_alive(self) -> None:
        """Set the flag of this machine; called after a failure of this rank."""
        self._store.set(f"hyper_parallel/alive/{self._first_rank}", "")

    def find_lost(self) -> HostLost | None:
        """Return an error that names the machines whose flags are not set within 5 s; None if all flags are set.

        If the store is unreachable, the error names the rendezvous host.
        """
        missing = dict[int, str]()
        answered = threading.Event()

        def poll() -> None:
            with suppress(Exception):  # the error class for a lost store depends on torch's store
                self.report_alive()
                lines = self._store.get("hyper_parallel/hosts").decode().splitlines()
                missing.update((int(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines)
                deadline = time.monotonic() + _ANSWER_S
                while missing and time.monotonic() < deadline:
                    for first_rank in [*missing]:
                        if self._store.check([f"hyper_parallel/alive/{first_rank}"]):
                            del missing[first_rank]
                    time.sleep(_ANSWER_POLL_S)
                answered.set()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        thread.join(2 * _ANSWER_S)
        lost = [missing[first_rank] for first_rank in sorted(missing)] if answered.is_set() else []
        if answered.is_set() and not lost:
            return None
        where = f"the rendezvous host {os.environ.get('MASTER_ADDR')}"
        return HostLost(
            f"the connection to {', '.join(lost) or where} is lost",
            where=f"rank {self._rank} on {socket.gethostname()}",
            hint="check the lost machine, then resume from the newest checkpoint",
        )


def with_restarts(attempt: Callable[[int], _T], max_restarts: int) -> _T:
    """Return the result of the first successful `attempt(number)`, for numbers from 0 to `max_restarts`.

    Only RankFailed and RankHung lead to another attempt, after a growing pause.

    Raises:
        RestartsUsedUp: HP621 when the last attempt has failed.
        RankFailed: HP601 when `max_restarts` is 0.
        RankHung: HP620 when `max_restarts` is 0.
    """
    for number in range(max_restarts + 1):
        try:
            return attempt(number)
        except (RankFailed, RankHung) as error:
            first, *other_lines = error.what.splitlines()
            if not max_restarts:
                raise
            if number == max_restarts:
                raise RestartsUsedUp(
                    f"{first}; the ranks were started {max_restarts + 1} times",
                    where=error.where,
                    allowed=f"training.max_restarts={max_restarts}",
                    hint="read the log of the failed rank, then resume the run from the newest checkpoint",
                    others=[line for line in other_lines or error.others if line.strip()],
                ) from error
            wait_s = min(_BACKOFF_S * 2**number, _LONGEST_BACKOFF_S)
            _log.warning("[%s] %s", error.code, first)
            _log.warning("restart %d of %d in %.0f s", number + 1, max_restarts, wait_s)
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
