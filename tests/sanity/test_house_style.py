"""Shape of functions and modules, and words of docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.sanity

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hyper_parallel"

MAX_LINES = 60
"""Lines of a function, with its signature and docstring."""
MAX_PARAMETERS = 7
"""Parameters of a constructor, without `self`."""
MAX_SIBLINGS = 8
"""Modules of its own folder that a file imports; `__init__.py`, the interface of the folder, imports any number."""
PHRASES = re.compile(r"\bmade again\b|\bbeside\b|\bat home\b|\btalk", re.IGNORECASE)
FIRST_WORDS = re.compile(
    r"(What|Whether|Those|These|As|Of|Where|Which|How|Who|Nothing|None|It|One|More|All|Everything)\b"
)

Finding = tuple[str, str]
"""Rule, and place."""


def shape_findings(name: str, tree: ast.Module) -> Iterator[Finding]:
    """Long functions, wide constructors and files with many imports of siblings."""
    room = ".".join(("hyper_parallel", *name.split("/")[:-1]))
    siblings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
                yield "lines of a function", f"{name}: {node.name}, {lines} lines"
            arguments = node.args.args + node.args.kwonlyargs
            if node.name == "__init__" and len(arguments) - 1 > MAX_PARAMETERS:
                yield "parameters of a constructor", f"{name}:{node.lineno}, {len(arguments) - 1}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder, _, module = node.module.rpartition(".")
            siblings.update([module] if folder == room else [])
    if len(siblings) > MAX_SIBLINGS and not name.endswith("__init__.py"):
        yield "imports of siblings", f"{name}: {len(siblings)}"


def docstring_findings(name: str, tree: ast.Module) -> Iterator[Finding]:
    """Docstrings with a phrase or a first word that says nothing."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text is None:
            continue
        place = f"{name}:{getattr(node, 'lineno', 1)}"
        for phrase in PHRASES.findall(text):
            yield "phrases", f"{place}: {phrase}"
        if match := FIRST_WORDS.match(text):
            yield "first words", f"{place}: {match[0]}"


@cache
def findings() -> tuple[Finding, ...]:
    """Rule and place of every finding."""
    rows: list[Finding] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        rows += (*shape_findings(name, tree), *docstring_findings(name, tree))
    return tuple(rows)


RULES = (
    "lines of a function",
    "parameters of a constructor",
    "imports of siblings",
    "phrases",
    "first words",
)


@pytest.mark.parametrize("rule", RULES)
def test_no_place_breaks_a_rule(rule: str) -> None:
    assert not [place for name, place in findings() if name == rule]


def test_findings_are_seen() -> None:
    body = "\n".join(["    x = 1"] * MAX_LINES)
    arguments = ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1))
    imports = [f"from hyper_parallel.ir.m{i} import x" for i in range(MAX_SIBLINGS + 1)]
    source = '"""It is made again, beside a talk."""\n' + "\n".join(imports)
    source += f"\ndef long():\n{body}\nclass A:\n    def __init__(self, {arguments}): ...\n"
    tree = ast.parse(source)
    rules = [rule for rule, _ in (*shape_findings("ir/a.py", tree), *docstring_findings("a", tree))]
    assert Counter(rules) == Counter([*RULES, "phrases", "phrases"])
    assert not [*shape_findings("cost/a.py", ast.parse("\n".join(imports)))]
