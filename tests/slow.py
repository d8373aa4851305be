"""Cells of a parametrized test that `make test-slow` runs and `make test` leaves out; whole tests have the mark `slow`.

Such a test takes seconds of processors, and a quicker one, or another cell, runs the same code. Measure with
`python tools/test_in_parallel.py --cpu-min=1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest


def slow_cells(*cells: Any) -> pytest.MarkDecorator:
    """Mark cells of a test as slow, by their whole id or by the value of one parameter."""
    return pytest.mark.slow_cells(*cells)


def mark_slow_cells(items: Sequence[pytest.Item], *, whole_modules: bool) -> None:
    """Add the mark `slow` to the collected cells of `slow_cells`.

    Args:
        items: Collected tests.
        whole_modules: True if all tests of each of their modules were collected.

    Raises:
        UsageError: if a test has no such cell, as after a change of a name.
    """
    unknown: dict[str, list[list[Any]]] = defaultdict(list)
    for item in items:
        for mark in item.iter_markers("slow_cells"):
            cell = item.callspec  # type: ignore[attr-defined]
            names = [cell.id, *cell.params.values()]
            others = [c for c in mark.args if not any(type(c) is type(n) and c == n for n in names)]
            if len(others) < len(mark.args):
                item.add_marker(pytest.mark.slow)
            unknown[f"{item.nodeid.partition('[')[0]} {id(mark)}"].append(others)
    for name, rests in unknown.items():
        missing = [c for c in rests[0] if all(c in rest for rest in rests)]
        if whole_modules and missing:
            raise pytest.UsageError(f"{name.partition(' ')[0]} has no cells {missing}")
