"""The shape of the source: no import circle, one class name once, short files, file names that say one thing.

What breaks a rule today stands in a list of known offenders. The lists only shrink: an entry that no longer offends
fails its test until it is taken out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.sanity

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SOURCE / "hyper_parallel"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 600
ONE_SHAPE = (PACKAGE / "backends" / "torch", PACKAGE / "trainer")
"""Folders whose sub-rooms have the same files: there a file name says which part of its room it is."""

# Known, to go.
KNOWN_CIRCLES: set[str] = set()  # the first module of each group
KNOWN_LONG: set[str] = set()
KNOWN_CLASSES: set[str] = set()
KNOWN_FILE_NAMES: set[str] = {
    "_collectives.py", "_copies.py", "_parallelize.py", "_plan.py", "_stages.py", "_step.py",
}  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(tree: ast.AST) -> set[str]:
    """Modules of the package that a tree imports, also inside functions; not under `TYPE_CHECKING`."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else node.module)
        else:
            names |= imports(node)
    return names & MODULES.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return groups


def test_circles_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == [["b", "c"]]


def test_no_modules_import_each_other() -> None:
    graph = {module: imports(parsed(path)) - {module} for module, path in MODULES.items()}
    groups = {group[0]: group for group in circles(graph)}
    assert groups.keys() == KNOWN_CIRCLES, groups


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module_name(path))
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert repeated.keys() == KNOWN_CLASSES, repeated


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {str(p.relative_to(PACKAGE)): n for p, n in lengths.items() if n > MOST_LINES}
    assert long.keys() == KNOWN_LONG, long


def test_a_file_name_is_used_once() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for path in FILES:
        folder = path.parent
        if path.name != "__init__.py":
            places[path.name].add(folder.parent if folder.parent in ONE_SHAPE else folder)
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert repeated.keys() == KNOWN_FILE_NAMES, repeated
