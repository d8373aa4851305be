"""What the calls of a program were answered, line by line in a file: a program started again need not ask again.

    {"role": "Learner", "number": 0, "method": "Learner", "arguments": ["run/weights"], "value": null}   a role
    {"role": "Learner", "number": 3, "method": "learn", "arguments": [3, []], "value": {"loss": 0.5}}     a call
    {"role": "Learner", "number": 4, "method": "learn", "arguments": [4, []], "error": "ValueError ..."}  its exception
    {"role": null, "number": 1, "method": "first", "arguments": [["Sampler", 1], ["Sampler", 2]], "value": 1}

A line is on the disk before the program sees the answer. An exception that was the last answer of a role is not kept:
the program is started again because of it, and its call runs again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError, JournalMismatch, OutputNotWritable, RunInUse

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 10.0
"""The system kills the ranks of a controller that was killed, and they hold its journal until they are gone."""
_LOOK_S: Final = 0.02
_FIRST: Final = b'{"role": '
"""First bytes of a record."""
_KEYS: Final = {"role", "number", "method", "arguments"}


class Journal:
    """The record of a program.

    Args:
        path: The file; created when it is missing. None: nothing is recorded.

    Raises:
        JournalMismatch: HP641 for a file that is no journal.
        RunInUse: HP720 while another controller, or a rank of it, holds the file.
        OutputNotWritable: HP105 when it cannot be written.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path, self._file = path, None
        self._left: dict[tuple[str | None, int], dict[str, Any]] = {}
        if path is None:
            return
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
            self._lock()
            self._read()
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            with suppress(OutputNotWritable):
                self.close()
            raise self._not_writable(error) from error
        except HyperParallelError:
            self.close()
            raise

    def left(self, role: str) -> bool:
        """Whether calls of a role are recorded that the program has not made yet."""
        return any(name == role and number for name, number in self._left)

    def recall(
        self, role: str | None, number: int, method: str, arguments: str
    ) -> dict[str, Any] | None:
        """The record of a call, once; None when it was not answered.

        Args:
            role: Its name; None: a choice of `first`.
            number: Of the call in the role, of the choice.
            method: What is called; of call 0 the class.
            arguments: JSON.

        Raises:
            JournalMismatch: HP641 when something else is recorded in this place.
        """
        at = role, number
        if number == 0:  # roles start in the order of the program
            at = next((one for one in self._left if one[1] == 0), at)
        if (record := self._left.pop(at, None)) is None:
            return None
        asked = _words(role, number, method, arguments)
        found = _words(*at, record["method"], json.dumps(record["arguments"]))
        if found != asked:
            raise JournalMismatch(
                "the journal was written by another program, or by this one with other arguments",
                where=str(self._path),
                got=asked,
                allowed=found,
                hint=f"mv {self._path} {self._path}.old",
            )
        return record

    def write(
        self, role: str | None, number: int, method: str, arguments: str, answer: dict[str, Any]
    ) -> None:
        """Record a `value` or an `error`; it is on the disk when this returns."""
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
        """Let the file go."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise self._not_writable(error) from error

    def _lock(self) -> None:
        """Until nobody else has the file; forked ranks inherit the lock, and give it back when they end."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(_LOOK_S)
                    continue
                raise RunInUse(
                    "another controller writes this journal, or a rank of it has not ended",
                    where=str(self._path),
                    hint=f"fuser -v {self._path}",
                ) from error
            except OSError:
                _log.warning("%s is on a file system without locks", self._path)
            return

    def _read(self) -> None:
        """Take the records in; what follows the last whole one was being written when the program was killed."""
        self._file.seek(0)
        lines, whole = self._file.readlines(), 0
        last: dict[str | None, dict[str, Any]] = {}
        for at, line in enumerate(lines):
            record = _record(line)
            if record is None:
                if at < len(lines) - 1:
                    raise self._no_record(at, line)
                if not whole and not _is_torn(line):
                    raise self._no_record(at, line)
                self._file.truncate(whole)
                break
            whole += len(line)
            self._left[record["role"], record["number"]] = last[record["role"]] = record
        for role, record in last.items():
            if "error" in record:
                del self._left[role, record["number"]]

    def _no_record(self, at: int, line: bytes) -> JournalMismatch:
        return JournalMismatch(
            "a line of the journal is no record",
            where=f"{self._path}:{at + 1}",
            got=repr(line[:80]),
            hint=f"mv {self._path} {self._path}.old",
        )

    def _not_writable(self, error: OSError) -> OutputNotWritable:
        return OutputNotWritable(
            "the journal cannot be written",
            where=str(self._path),
            got=error.strerror,
            hint="Controller(journal='another/journal.jsonl')",
        )


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for anything else, a line without its end included."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = line.endswith(b"\n") and isinstance(record, dict) and record.keys() > _KEYS
    fits = fits and isinstance(record["role"], str | None) and isinstance(record["number"], int)
    return record if fits and ("value" in record) != ("error" in record) else None


def _is_torn(line: bytes) -> bool:
    """Return whether a line may be the beginning of a record; without one before, nothing else tells a journal."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return not line.endswith(b"\n") and line[: len(_FIRST)] == _FIRST[: len(line)]
    return _record(line + b"\n") is not None


def _words(role: str | None, number: int, method: str, arguments: str) -> str:
    """A call as errors show it, by which calls are compared."""
    call = f"{method}({arguments[1:-1]})"
    return f"choice {number}: {call}" if role is None else f"role `{role}`, call {number}: {call}"
