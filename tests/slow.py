"""Cells of a matrix that `make test-slow` runs and `make test` leaves out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("slow_tests.txt")


def cells(every: Iterable[Any], *, slow: Container[Any]) -> list[Any]:
    """Parameters of a test, the slow ones marked."""
    return [pytest.param(cell, marks=pytest.mark.slow) if cell in slow else cell for cell in every]


def mark_slow_tests(items: Sequence[pytest.Item], *, whole_modules: bool) -> None:
    """Mark the collected tests that are rows of the table.

    Args:
        items: Collected tests.
        whole_modules: True if all tests of each of their modules were collected.

    Raises:
        UsageError: if a row names no test of its module, as after a change of a name.
    """
    rows = {line for line in TABLE.read_text().splitlines() if line and line[0] != "#"}
    names = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in rows & names.keys():
        names[name].add_marker(pytest.mark.slow)
    modules = {name.partition("::")[0] for name in names}
    missing = sorted(r for r in rows - names.keys() if r.partition("::")[0] in modules)
    if whole_modules and missing:
        raise pytest.UsageError(f"{TABLE.name} names tests that do not exist: {missing}")
