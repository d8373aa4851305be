"""Journal of a program's answered calls, as JSON lines from which a restarted program replays the answers.

    {"role": "Learner", "number": 0, "method": "Learner", "arguments": ["run/weights"], "value": null}   a role
    {"role": "Learner", "number": 3, "method": "learn", "arguments": [3, []], "value": {"loss": 0.5}}     a call
    {"role": "Learner", "number": 4, "method": "learn", "arguments": [4, []], "error": "ValueError ..."}  its exception
    {"role": null, "number": 1, "method": "first", "arguments": [["Sampler", 1], ["Sampler", 2]], "value": 1}

A line is on disk before the program gets the answer. If the last answer of a role is an exception, the exception
probably ended the program, so a restarted program discards this answer and runs the call again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError, JournalMismatch, OutputNotWritable, RunInUse
from hyper_parallel.owned_folder import move_away
from hyper_parallel.serde import sync_directory

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 10.0
"""Maximum wait for the lock, which the ranks of a killed controller hold until the kernel has ended them."""
_POLL_S: Final = 0.02
_FIRST: Final = b'{"role": '
"""First bytes of a record."""
_KEYS: Final = {"role", "number", "method", "arguments"}


class Journal:
    """Journal file of a program, open for replay and for new answers.

    Args:
        path: Path of the file, which is created if it does not exist; None: nothing is recorded.

    Attributes:
        path: Path of the file as given; None: nothing is recorded.

    Raises:
        JournalMismatch: HP641 for a file that is not a journal.
        RunInUse: HP720 while another controller or its ranks hold the lock of the file.
        OutputNotWritable: HP105 when the file cannot be written.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path, self._file = path, None
        self._unreplayed: dict[tuple[str | None, int], dict[str, Any]] = {}
        if path is None:
            return
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
            self._lock()
            self._read()
            sync_directory(path.parent)
        except OSError as error:
            with suppress(OutputNotWritable):
                self.close()
            raise self._not_writable(error) from error
        except HyperParallelError:
            self.close()
            raise

    def left(self, role: str) -> bool:
        """Return whether the journal contains answers of a role that have not been replayed yet."""
        return any(name == role and number for name, number in self._unreplayed)

    def recall(self, role: str | None, number: int, method: str, arguments: str) -> dict[str, Any] | None:
        """Replay a call: remove and return its record; return None if the journal has no record of this number.

        Args:
            role: Name of the role; None: a choice of `Controller.first`.
            number: Number of the call in the role, or number of the choice.
            method: Name of the method; for number 0, which starts a role, name of the class.
            arguments: Arguments as a JSON list.

        Raises:
            JournalMismatch: HP641 when the record is of another call. Roles must start in their recorded order.
        """
        key = role, number
        if number == 0:  # roles start in the order of the program
            key = next((entry for entry in self._unreplayed if entry[1] == 0), key)
        if (record := self._unreplayed.pop(key, None)) is None:
            return None
        requested = _words(role, number, method, arguments)
        recorded = _words(*key, record["method"], json.dumps(record["arguments"]))
        if recorded != requested:
            raise JournalMismatch(
                "the journal was written by another program, or by this program with other arguments",
                where=str(self.path),
                got=requested,
                allowed=recorded,
                hint=move_away(Path(str(self.path))),
            )
        return record

    def write(self, role: str | None, number: int, method: str, arguments: str, answer: dict[str, Any]) -> None:
        """Append the record of a call to the file; `answer` is a dict with the key `value` or `error`.

        The record is on disk when this method returns. OutputNotWritable (HP105) is raised if this fails.
        """
        if self._file is None:
            return
        key = {"role": role, "number": number, "method": method, "arguments": json.loads(arguments)}
        try:
            self._file.write(json.dumps(key | answer).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._not_writable(error) from error

    def close(self) -> None:
        """Close the file, which releases its lock; raise OutputNotWritable (HP105) if writing buffered bytes fails."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise self._not_writable(error) from error

    def _lock(self) -> None:
        """Lock the file, after at most 10 s in which ranks of an earlier program may end; raise RunInUse (HP720)."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                raise RunInUse(
                    "another controller or one of its ranks uses this journal",
                    where=str(self.path),
                    hint=shlex.join(["fuser", "-v", str(self.path)]),
                ) from error
            except OSError:
                _log.warning("%s is on a file system without locks", self.path)
            return

    def _read(self) -> None:
        """Load the records; drop the last record of a role if it is an exception, and an incomplete last line."""
        self._file.seek(0)
        lines, complete_bytes = self._file.readlines(), 0
        last: dict[str | None, dict[str, Any]] = {}
        for index, line in enumerate(lines):
            record = _record(line)
            if record is None:
                if index < len(lines) - 1:
                    raise self._no_record(index, line)
                if not complete_bytes and not _is_torn(line):
                    raise self._no_record(index, line)
                self._file.truncate(complete_bytes)
                break
            complete_bytes += len(line)
            self._unreplayed[record["role"], record["number"]] = last[record["role"]] = record
        for role, record in last.items():
            if "error" in record:
                del self._unreplayed[role, record["number"]]

    def _no_record(self, index: int, line: bytes) -> JournalMismatch:
        return JournalMismatch(
            "a line of the journal is not a record",
            where=f"{self.path}:{index + 1}",
            got=repr(line[:80]),
            allowed="a JSON object on one line, as `Controller` writes it",
            hint=move_away(Path(str(self.path))),
        )

    def _not_writable(self, error: OSError) -> OutputNotWritable:
        return OutputNotWritable(
            "the journal cannot be written",
            where=str(self.path),
            got=error.strerror,
            hint="Controller(journal='another/journal.jsonl')",
        )


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return its record, or None if the line is not a record or has no newline."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = line.endswith(b"\n") and isinstance(record, dict) and record.keys() > _KEYS
    fits = fits and isinstance(record["role"], str | None) and isinstance(record["number"], int)
    return record if fits and ("value" in record) != ("error" in record) else None


def _is_torn(line: bytes) -> bool:
    """Return whether a line looks like a record whose write was interrupted."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return not line.endswith(b"\n") and line[: len(_FIRST)] == _FIRST[: len(line)]
    return _record(line + b"\n") is not None


def _words(role: str | None, number: int, method: str, arguments: str) -> str:
    """Return a call as text, for example ``role `Learner`, call 3: learn(3, [])``."""
    call = f"{method}({arguments[1:-1]})"
    return f"choice {number}: {call}" if role is None else f"role `{role}`, call {number}: {call}"
