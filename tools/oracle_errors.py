"""Pytest plugin that records every coded error that a test sees: `pytest -p oracle_errors --oracle-errors FILE`.

An error counts when it is rendered (printed, matched, or turned into text) or caught by `pytest.raises`. An error that
is only constructed, for instance while a search discards a candidate, is not recorded. Ranks that a test forks inherit
the hook and append to the same file. A command started as a new process does not.

Each line is one JSON object. `test` is the test id, `code` the error code, `text` the sentence, `hint` the line after
`hint:`. Values that change between two runs (numbers, paths, temporary names) are replaced by placeholders.
A line with `outcome` instead of `code` says how a test ended.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import HyperParallelError

_FIRST_LINE = re.compile(r"error\[(HP\d+)\]: (.*)")
_HINT = re.compile(r"^hint: (.*)$", re.MULTILINE)
_PLACEHOLDERS = (
    (re.compile(r"(?<![\w.~])~?(?:/[\w.+@-]+)+/?"), "PATH"),
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"), "HEX"),
    (re.compile(r"(?<!\w)[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"), "N"),
    (re.compile(r"N(?:, N)+"), "N, ..."),
    (re.compile(r"\b[KMGTP]i?B(/s)?\b"), r"B\1"),
)
"""Applied in this order. Units of bytes change with the number before them."""


def normalized(text: str) -> str:
    """Return `text` with paths, hexadecimal digests and numbers replaced by placeholders."""
    for pattern, placeholder in _PLACEHOLDERS:
        text = pattern.sub(placeholder, text)
    return text


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--oracle-errors`."""
    parser.addoption("--oracle-errors", type=Path, help="Append every coded error to this file.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    if (path := config.getoption("oracle_errors")) is not None:
        config.pluginmanager.register(Recorder(path), "oracle_error_recorder")


class Recorder:
    """Recorder of errors at `HyperParallelError.render` and at the end of `pytest.raises`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._test = ""
        self._seen: set[str] = set()
        self._render = HyperParallelError.render
        self._exit = pytest.RaisesExc.__exit__

    def pytest_sessionstart(self) -> None:
        """Install both hooks."""
        recorder = self

        def render(error: HyperParallelError) -> str:
            text = recorder._render(error)
            recorder.record(text)
            return text

        def leave(block: Any, kind: Any, error: Any, trace: Any) -> bool:
            if isinstance(error, HyperParallelError):
                recorder.record(recorder._render(error))
            return recorder._exit(block, kind, error, trace)

        HyperParallelError.render = render  # type: ignore[method-assign]
        pytest.RaisesExc.__exit__ = leave  # type: ignore[method-assign]

    def pytest_unconfigure(self) -> None:
        """Remove both hooks."""
        HyperParallelError.render = self._render  # type: ignore[method-assign]
        pytest.RaisesExc.__exit__ = self._exit  # type: ignore[method-assign]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute later errors to the test that begins."""
        self._test = nodeid
        self._seen = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test, from its call, or from a set-up that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome})

    def record(self, text: str) -> None:
        """Write one rendered error, once per test and process."""
        first = _FIRST_LINE.match(text)
        if first is None or not self._test:
            return
        hint = _HINT.search(text)
        self._write(
            {
                "test": self._test,
                "code": first[1],
                "text": normalized(first[2]),
                "hint": normalized(hint[1]) if hint else None,
            }
        )

    def _write(self, line: dict[str, str | None]) -> None:
        text = json.dumps(line)
        if text in self._seen:
            return
        self._seen.add(text)
        # One write of one line in append mode, because forked ranks write to the same file.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (text + "\n").encode())
        finally:
            os.close(handle)
