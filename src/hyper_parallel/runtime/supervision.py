"""Who holds a run up, and what follows: ranks are ended with the culprit's name, and started again if the recipe says.

A rank does not move while it begins no phase. When one has not moved for longer than its deadline, the culprit is the
rank that is stopped or gone, else the one that is anywhere but in a collective: those that wait in one wait for it. A
process that a signal has stopped cannot be busy, whatever its phase: it gets the shorter deadline everywhere.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from hyper_parallel.errors import RankFailed, RankHung, RestartsUsedUp
from hyper_parallel.runtime.heartbeat import Beat, Board

_log = logging.getLogger(__name__)
_LONGEST_LOOK_S: Final = 2.0
_BACKOFF_S: Final = 1.0  # doubles with every restart
_LONGEST_BACKOFF_S: Final = 60.0
_STOPPED: Final = "tT"  # stopped by a debugger, by a signal: proc(5)
_GONE: Final = "ZX"
_LAST_WORDS_S: Final = 0.5
_ENDING_S: Final = 10.0
"""Seconds that a phase of a step may last after a signal to end, where no phase before lasted longer."""
_ENDING_FIRST_S: Final = 20.0  # in the first step, of which no phase is known
_ENDING_PHASES: Final = 3.0  # of the longest phase so far
_QUIET_S: Final = 30.0
"""Seconds without a word after which a waiting rank is said to wait; a choice, above steps of common size."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a rank may stay in one phase.

    Attributes:
        step_s: In a step; and in any phase that a process is stopped, or gone, without a break.
        first_step_s: In the first step of a process, and outside of steps: start, evaluation, checkpoint, export.
    """

    step_s: float
    first_step_s: float

    def of(self, beat: Beat) -> float:
        """The one that counts for a rank now."""
        return self.step_s if beat.step and beat.begun > 1 else self.first_step_s


@dataclass(frozen=True, slots=True)
class Hang:
    """A run that is held up.

    Attributes:
        culprits: Ranks that hold it up; none where all wait in collectives.
        stopped: Those of them that a signal has stopped.
        what: What the first culprit does.
        others: What the other ranks do, one line each.
    """

    culprits: tuple[int, ...]
    stopped: tuple[int, ...]
    what: str
    others: tuple[str, ...]

    def error(
        self, where: str | None = None, stack: str = "", restart: str = "training.max_restarts=3"
    ) -> RankHung:
        """What is raised.

        Args:
            where: File with the log of the first culprit.
            stack: Where the first culprit stands.
            restart: What has the launcher start lost ranks again.
        """
        hint = "training.timeout_s=3600, where a phase may take so long"
        if not self.culprits:
            hint = "training.debug_collectives=true names the collectives that do not fit"
        elif self.stopped:
            hint = f"{restart} goes on from the newest checkpoint"
        what = f"{self.what}\n{stack}".strip()
        return RankHung(what, where=where, hint=hint, others=self.others)


class Watch:
    """Looks at a board again and again, and says when the run is held up.

    Seconds count while this process looks: of a pause of the whole machine at most two.

    Args:
        board: The slots.
        deadlines: How long a rank may stay in one phase.
        first: Rank of slot 0.
        ending: Whether a signal has asked the run to end after the present step, which a step that waits never does.
    """

    def __init__(
        self,
        board: Board,
        deadlines: Deadlines,
        first: int = 0,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._board, self._deadlines, self._first = board, deadlines, first
        self._ending, self._longest_s = ending, 0.0
        self._beats = [0] * board.ranks
        self._still_s = [0.0] * board.ranks
        self._frozen_s = [0.0] * board.ranks
        self._looked = time.monotonic()

    def look(self, ranks: Collection[int]) -> Hang | None:
        """Whether one of these ranks, which have not ended, is over its deadline."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        beats = self._board.read()
        states = {rank: process_state(beats[rank].pid) for rank in ranks}
        for rank, beat in enumerate(beats):
            still = beat.beats == self._beats[rank]
            if not still and beat.step:
                self._longest_s = max(self._longest_s, self._still_s[rank])
            frozen = _is(states.get(rank, ""), _STOPPED + _GONE)
            self._still_s[rank] = self._still_s[rank] + passed if still else 0.0
            self._frozen_s[rank] = self._frozen_s[rank] + passed if frozen else 0.0
            self._beats[rank] = beat.beats
        if all(
            self._still_s[rank] <= self._deadline_s(beats[rank])
            and self._frozen_s[rank] <= self._deadlines.step_s
            for rank in ranks
        ):
            return None
        seconds = [f or s for f, s in zip(self._frozen_s, self._still_s, strict=True)]
        return hang(beats, seconds, states, self._first)

    def ends_start(self) -> bool:
        """Return whether a signal has asked the run to end before any rank has begun a step."""
        return self._ending() and not any(beat.begun for beat in self._board.read())

    def _deadline_s(self, beat: Beat) -> float:
        deadline_s = self._deadlines.of(beat)
        if not (beat.step and self._ending()):
            return deadline_s
        least_s = _ENDING_S if beat.begun > 1 else _ENDING_FIRST_S
        return min(deadline_s, max(least_s, _ENDING_PHASES * self._longest_s))


class QuietRanks:
    """Says who waits for whom where no rank of a loop without deadlines moves.

    Args:
        board: The slots.
        first: Rank of slot 0.
    """

    def __init__(self, board: Board, first: int = 0) -> None:
        self._board, self._first = board, first
        self._seen: list[tuple[int, str]] = []
        self._since = time.monotonic()
        self._next_s = _QUIET_S

    def look(self) -> None:
        """Warn when all ranks are where they were at the look before, for 30 s, 60, 120."""
        seen = [(beat.beats, beat.note) for beat in self._board.read()]
        if seen != self._seen or not any(note.startswith("waits for") for _, note in seen):
            self._seen, self._since, self._next_s = seen, time.monotonic(), _QUIET_S
            return
        still_s = time.monotonic() - self._since
        if still_s >= self._next_s:
            self._next_s *= 2
            where = "; ".join(self.places())
            sys.stderr.write(f"no rank has moved for {still_s:.0f} s: {where}\n")

    def places(self) -> list[str]:
        """Return where every rank is that has said so, one line each."""
        return [
            f"rank {self._first + slot} {beat.note or 'does not wait'}"
            for slot, beat in enumerate(self._board.read())
            if beat.pid
        ]


def hang(
    beats: Sequence[Beat], still_s: Sequence[float], states: dict[int, str], first: int = 0
) -> Hang:
    """Tell the culprits from those that wait for them.

    Args:
        beats: What every rank has said.
        still_s: Since when none of them has moved, or was stopped.
        states: States of the processes that have not ended, by slot, see proc(5); empty: unknown.
        first: Rank of slot 0.
    """
    waiting = [rank for rank in states if beats[rank].note.startswith("waits for")]
    stopped = tuple(rank for rank, state in states.items() if _is(state, _STOPPED))
    gone = tuple(rank for rank, state in states.items() if _is(state, _GONE))
    culprits = stopped + gone or tuple(rank for rank in states if rank not in waiting)
    said = {
        slot: f"rank {first + slot} {_doing(beats[slot], state)} since {still_s[slot]:.0f} s, in {beats[slot]}"
        for slot, state in states.items()
    }
    what = "all ranks wait in collectives: they do not fit one another, or wait for another machine"
    if culprits:
        what = said.pop(culprits[0]) + ("; the others wait for it" if waiting else "")
    ranks = [tuple(first + slot for slot in slots) for slots in (culprits, stopped)]
    return Hang(*ranks, what, tuple(said.values()))


def _doing(beat: Beat, state: str) -> str:
    if _is(state, _STOPPED):
        return "is stopped by a signal"
    if _is(state, _GONE):
        return "has ended without a word"
    return beat.note or "does not move"


def _is(state: str, states: str) -> bool:
    return state != "" and state in states


def process_state(pid: int) -> str:
    """State of a process, a letter of proc(5); empty where it is not known, before it has begun, or has ended well."""
    if not pid or not Path("/proc/self/stat").exists():
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "X"


class Sentry:
    """What a rank of another launcher does about the ranks of its machine: end all when one holds them up.

    Every rank looks, so that one of them is awake. The launcher notices that they ended, and starts them again when
    it was told to (`torchrun --max-restarts`).

    Args:
        board: The slots of this machine.
        deadlines: How long a rank may stay in one phase.
        slot: Slot of this rank.
        first: Rank of slot 0, by which slots are named.
        ending: As of `Watch`; called on another thread than the main one, which may wait.
    """

    def __init__(
        self, board: Board, deadlines: Deadlines, slot: int, first: int, ending: Callable[[], bool]
    ) -> None:
        self._board, self._slot, self._first = board, slot, first
        self._watch = Watch(board, deadlines, first, ending)

    def look(self) -> None:
        """End this process and the stopped ones when the ranks are held up; the lowest that can says why."""
        found = self._watch.look(range(self._board.ranks))
        if found is None:
            return
        slots = [rank - self._first for rank in found.stopped]
        if self._slot == min(set(range(self._board.ranks)) - set(slots)):
            error = found.error(restart="torchrun --max-restarts=3")
            sys.stderr.write(error.render() + "\n")
        if self._first + self._slot in found.culprits:
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
    """File of the board that the ranks of another launcher share on this machine, new with each of its restarts."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = "-".join([str(os.getuid()), str(os.getppid()), *(os.environ.get(n, "") for n in names)])
    return Path(tempfile.gettempdir()) / f"hyper_parallel-{run.replace('/', '_')}.board"


def with_restarts(attempt: Callable[[int], _T], most: int) -> _T:
    """The result of `attempt(n)`; when ranks were lost in it, of the next one, up to `most` more times.

    Raises:
        RestartsUsedUp: HP621 when the last restart has failed as well.
        RankFailed: HP601, RankHung: HP620 when there are no restarts. Other coded errors at once: they come again.
    """
    for number in range(most + 1):
        try:
            return attempt(number)
        except (RankFailed, RankHung) as error:
            first, *others = error.what.splitlines()
            if not most:
                raise
            if number == most:
                raise RestartsUsedUp(
                    f"{first}; the ranks were started {most + 1} times",
                    where=error.where,
                    allowed=f"training.max_restarts={most}",
                    hint="read the log of that rank; then train again, from the newest checkpoint",
                    others=[line for line in others or error.others if line.strip()],
                ) from error
            wait_s = min(_BACKOFF_S * 2**number, _LONGEST_BACKOFF_S)
            _log.warning("[%s] %s", error.code, first)
            _log.warning("restart %d of %d in %.0f s", number + 1, most, wait_s)
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
