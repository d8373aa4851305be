"""What every test process does, how two of them share the modules (tools/test_in_parallel.py), and what each costs.

Seconds are those of processors, of a test and of all processes that it started: wall time would measure what else the
machine does.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.errors import HyperParallelError
from tests.hints import problems_of
from tests.pasting import Pasting
from tests.printed_hints import hints_of_ranks, watch_processes
from tests.slow import mark_slow_cells

gc.disable()  # until the tests are collected: imports leave nothing to collect
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reads the hub but those with one of their own
# Tests fork, and OpenMP's threads do not survive a fork: a child that asks for them waits for ever. Two test processes
# with a thread per core each would also spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it, and tests send it to their runs

RANKS = ("e2e", "parity", "dist")
"""Marks of modules that start ranks, in the order in which they begin."""
SPENT: pytest.StashKey[Counter[str]] = pytest.StashKey()
"""Processor seconds by node id of a test."""


SEEN_HINTS: set[str] = set()
"""Hints of the errors that the running test printed, or caught by `pytest.raises`."""
PASTING = Pasting()


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
    parser.getgroup("terminal reporting").addoption(
        "--cpu-min",
        type=float,
        default=math.inf,
        help="List modules and tests that took as many processor seconds.",
    )
    parser.getgroup("terminal reporting").addoption(
        "--paste-commands",
        action="store_true",
        help="Run commands in hints too, and list the hints that are not pasted.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Heed interrupts: a shell has what it starts in the background ignore them, and so would what tests interrupt."""
    config.stash[SPENT] = Counter()
    _collect_hints()
    PASTING.runs = config.getoption("paste_commands")
    PASTING.install()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _collect_hints() -> None:
    render, leave = HyperParallelError.render, pytest.RaisesExc.__exit__

    def rendered(error: HyperParallelError) -> str:
        SEEN_HINTS.add(error.hint or "")
        return render(error)

    def left(block, kind, error, trace):  # type: ignore[no-untyped-def]
        if isinstance(error, HyperParallelError):
            SEEN_HINTS.add(error.hint or "")
        return leave(block, kind, error, trace)

    def printed(words: list[str], error: HyperParallelError, head: str) -> None:
        SEEN_HINTS.add(error.hint or "")
        if words:
            PASTING.paste(words, error, head)

    watch_processes(printed)
    HyperParallelError.render = rendered  # type: ignore[method-assign]
    pytest.RaisesExc.__exit__ = left  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Paste the hints that the test has seen: a key, value, command or option that does not exist fails it."""
    SEEN_HINTS.clear()
    PASTING.begin_test()
    result = yield
    if folder := item.funcargs.get("tmp_path"):
        SEEN_HINTS.update(hints_of_ranks(folder))
    wrong = [f"hint: {hint}: {p}" for hint in sorted(SEEN_HINTS) for p in problems_of(hint)]
    wrong += PASTING.problems
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_cells(items, whole_modules=not any("::" in word for word in config.args))
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
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the modules that this process gets, as pytest's own loop does."""
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begin = _cpu_s()
    result = yield
    item.config.stash[SPENT][item.nodeid] += _cpu_s() - begin
    return result


def _cpu_s() -> float:
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if PASTING.runs:
        terminalreporter.section(f"{PASTING.num_pasted} hints pasted; not pasted, by reason")
        for reason, hints in PASTING.unpasted.items():
            terminalreporter.line(f"{reason}: {len(hints)}")
            for hint in sorted(hints):
                terminalreporter.line(f"    {hint}")
    least, spent = config.getoption("cpu_min"), config.stash[SPENT]
    if least == math.inf:
        return
    modules: Counter[str] = Counter()
    for name, seconds in spent.items():
        modules[name.partition("::")[0]] += seconds
    terminalreporter.section(f"{spent.total():.0f} s of processors; modules, tests")
    for counted in (modules, spent):
        for name, seconds in counted.most_common():
            if seconds >= least:
                terminalreporter.line(f"{seconds:7.2f} s  {name}")
