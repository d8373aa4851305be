"""Structure of the source: no import circle, and no import of another folder's private modules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.sanity

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SOURCE / "hyper_parallel"
FILES = sorted(PACKAGE.rglob("*.py"))

KNOWN_CIRCLES: set[str] = set()  # the first module of each group


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
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else node.module)
        elif not isinstance(node, ast.expr):  # an expression imports nothing
            pending += ast.iter_child_nodes(node)
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


def private_imports(path: Path, room: str) -> list[str]:
    """Private modules of other folders that a file imports, at any depth."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hyper_parallel"):
            targets = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            private = [t for t in targets if t in MODULES and t.rpartition(".")[2].startswith("_")]
            names += [t for t in private if t.rpartition(".")[0] != room]
    return names


def test_no_file_imports_a_private_module_of_another_folder() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in FILES
        if (names := private_imports(path, module_name(path.with_name("__init__.py"))))
    }
    assert not found, found


def test_tests_import_public_modules_only() -> None:
    tests = sorted(Path(__file__).parents[1].rglob("*.py"))
    found = {str(path): names for path in tests if (names := private_imports(path, ""))}
    assert not found, found
