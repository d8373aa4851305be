"""What every test process does, and how two of them share the modules (tools/test_in_parallel.py)."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

RANKS = ("e2e", "parity", "dist")
"""Marks of modules that start ranks, in the order in which they begin."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sharing modules between processes")
    group.addoption(
        "--claims",
        type=Path,
        help="Run only modules that no process with this directory has begun.",
    )
    group.addoption(
        "--modules",
        choices=("as-collected", "ranks-first", "ranks-last"),
        default="as-collected",
        help="Order of modules.",
    )


def pytest_configure() -> None:
    """Heed interrupts: a shell has what it starts in the background ignore them, and so would what tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = config.getoption("modules")
    if order == "as-collected":
        return
    modules = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    modules.sort(key=lambda module: min(map(_place, module)), reverse=order == "ranks-last")
    items[:] = itertools.chain.from_iterable(modules)


def _place(item: pytest.Item) -> int:
    marks = [number for number, mark in enumerate(RANKS) if item.get_closest_marker(mark)]
    return min(marks, default=len(RANKS))


def pytest_collection_finish() -> None:
    """Take what imports left behind (half a million objects with torch) out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own loop, over the modules this process gets."""
    claims = session.config.getoption("claims")
    if claims is None or session.testsfailed or session.config.option.collectonly:
        return None
    upcoming = itertools.chain(_claimed(session.items, claims), (None,))
    for item, following in itertools.pairwise(upcoming):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _claimed(items: list[pytest.Item], claims: Path) -> Iterator[pytest.Item]:
    """Items of modules that nobody has begun; a module is claimed when its first item is asked for."""
    for path, module in itertools.groupby(items, key=lambda item: item.path):
        name = str(path).replace(os.sep, "+")
        try:
            (claims / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from module
