"""Engine `processes` of a controller: ranks are forked from the controller, and end when the controller ends.

A call and its answers are files in a folder, replaced atomically. The pipe between controller and rank carries only
short notifications, so it never fills up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from hyper_parallel.errors import written
from hyper_parallel.runtime.controller._inline import RoleHost, RoleSpec
from hyper_parallel.runtime.fork_server import begin_forked, fork_rank, prepare_fork, serial_tokenizers
from hyper_parallel.runtime.local_launch import publish_rank
from hyper_parallel.runtime.scratch_folders import scratch_folder
from hyper_parallel.runtime.supervision import HeartbeatBoard, hang, process_state
from hyper_parallel.serde import write_text


class ProcessEngine:
    """Engine that forks the ranks of roles on this machine; every role has a separate world (process group)."""

    most_ranks = None

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._scratch = self._stack.enter_context(scratch_folder())
        weakref.finalize(self, self._stack.close)
        self._started: list[ProcessRanks] = []

    def start(self, spec: RoleSpec, size: int) -> ProcessRanks:
        """Fork the ranks of a role.

        Raises:
            ForkUnsafe: HP605 when torch.distributed is initialized, or another thread of this process computes.
            RankFailed: HP601 when the limit of processes or memory is reached.
        """
        prepare_fork()
        self._started = [started for started in self._started if started.processes]
        first = spec.first_device
        if first is None:  # lowest range of local ranks that no other role uses
            used = {place for started in self._started for place in started.places}
            first = next(n for n in count() if used.isdisjoint(range(n, n + size)))
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        self._started.append(ProcessRanks(spec, range(first, first + size), folder))
        return self._started[-1]

    def wait(self, busy: Sequence[ProcessRanks], most_s: float) -> None:
        wait([news for ranks in busy for news in ranks.news()], most_s)

    def close(self) -> None:
        self._stack.close()


class ProcessRanks:
    """Processes of a role.

    Args:
        spec: Class and arguments of the role.
        places: Local rank of each process, which selects its device.
        folder: Folder of the files of calls and answers.
    """

    def __init__(self, spec: RoleSpec, places: range, folder: Path) -> None:
        self.places, self._folder = places, folder
        self._board = HeartbeatBoard(folder / "board", places.stop)
        self.processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []
        try:
            with serial_tokenizers():
                for rank, place in enumerate(places):
                    controller_end, rank_end = Pipe()
                    arguments = (spec, rank, places, folder, rank_end, self._board)
                    process = fork_rank(_rank, arguments, rank, len(places))
                    rank_end.close()
                    self._board.started(place, process.pid or 0)
                    self.processes.append(process)
                    self._pipes.append(controller_end)
        except BaseException:
            self.end()
            raise

    def news(self) -> list[Any]:
        """Return the objects for `multiprocessing.connection.wait` that become ready when a rank answers or ends."""
        return [*self._pipes, *(process.sentinel for process in self.processes)]

    def start_call(self, number: int, method: str, arguments: str) -> None:
        call = {"number": number, "method": method, "arguments": arguments}
        with written(self._folder):
            write_text(self._folder / "call.json", json.dumps(call))
        for pipe in self._pipes:
            with suppress(OSError):  # the rank has ended, which `lost` reports
                pipe.send_bytes(b"call")

    def answers(self) -> dict[int, dict[str, Any]]:
        answers = {}
        for rank, pipe in enumerate(self._pipes):
            with suppress(OSError, EOFError):
                if pipe.poll():
                    pipe.recv_bytes()
                    answers[rank] = json.loads(_answer_file(self._folder, rank).read_text("utf-8"))
        return answers

    def lost(self) -> str | None:
        """Return a text that names an ended rank and the reason; None while all ranks are alive.

        A rank killed by a signal takes precedence over other failures, which it may have caused.
        """
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        for rank, code in codes.items():
            if code is not None and code < 0:
                return f"rank {rank} was killed by {signal.Signals(-code).name}"
        ended = [rank for rank, code in codes.items() if code is not None]
        return f"rank {ended[0]} ended with status {codes[ended[0]]}" if ended else None

    def silent(self, silent_s: float, unanswered: Sequence[int]) -> tuple[str, tuple[str, ...], bool]:
        """Describe ranks that do not answer, by their heartbeats and process states; see `RoleRanks.silent`."""
        first = self.places.start
        states = {first + rank: process_state(self.processes[rank].pid or 0) for rank in unanswered}
        state = hang(self._board.read(), [silent_s] * self.places.stop, states, -first)
        return state.description, state.other_states, bool(state.stopped)

    def end(self) -> None:
        """Kill all ranks, wait until they have ended, and remove the folder of calls and answers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _answer_file(folder: Path, rank: int) -> Path:
    return folder / f"answer_{rank}.json"


def _rank(spec: RoleSpec, rank: int, places: range, folder: Path, pipe: Connection, board: HeartbeatBoard) -> None:
    status = 1
    try:
        begin_forked()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the controller kills its ranks
        import torch

        torch.manual_seed(rank)
        publish_rank(rank, len(places), places[rank], folder / "store", board)
        host = RoleHost(spec, rank)
        while pipe.recv_bytes():
            call = json.loads((folder / "call.json").read_text("utf-8"))
            write_text(_answer_file(folder, rank), host.answer(**call))
            sys.stdout.flush()
            pipe.send_bytes(b"answer")
    except EOFError:  # the controller has ended
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
