"""ARCHITECTURE.md against the source: the rooms of its picture, their order, and the names of its walk-throughs."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from hyper_parallel.backends import BACKENDS

pytestmark = pytest.mark.sanity

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hyper_parallel"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_NAMES = 10


def section(title: str) -> str:
    """Text below a heading, up to the next one."""
    return re.split(rf"^#+ {re.escape(title)}$", PAGE, flags=re.MULTILINE)[1].split("\n#")[0]


def picture() -> list[str]:
    """Lines of the block in the section about rooms."""
    return [line[4:] for line in section("Packages and who may import whom").splitlines() if line[:4] == "    "]


def drawn_layers() -> list[list[str]]:
    """Rooms line by line; an arrow runs down on their left."""
    rooms = [line[3:] for line in picture() if line.startswith(("|  ", "v  "))]
    return [re.split(r"\s{2,}", line)[0].split(" | ") for line in rooms]


def contract(start: str) -> list[str]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (rules,) = [c for c in tool["contracts"] if c["type"] == "layers" and c["containers"] == [start]]
    return rules["layers"]


def defined(path: Path) -> dict[str, ast.AST]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in body if isinstance(node, kinds)}


def exists(name: str) -> bool:
    """Return whether `room.module.name` is a function or class that is defined there."""
    *module, last = name.split(".")
    path = PACKAGE.joinpath(*module).with_suffix(".py")
    return path.is_file() and last in defined(path)


WALKS = ("A recipe to ranks", "A model to a plan", "A storage to an address")


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_through_names_at_most_ten_functions_that_exist(title: str) -> None:
    steps = re.findall(r"^\d+\. (.*)$", section(title), flags=re.MULTILINE)
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", "\n".join(steps))
    names = [name for name in names if not name.endswith((".yaml", ".json"))]
    assert steps
    assert all(step.startswith(f"`{name}`") for step, name in zip(steps, names, strict=True))
    assert len(names) <= MOST_NAMES
    assert not [name for name in names if not exists(name)]


def test_missing_names_are_seen() -> None:
    assert exists("sim.events.simulate")
    assert not exists("sim.events.simulated")
    assert not exists("ir.nothing.simulate")


def test_the_picture_has_the_folders_of_the_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    drawn = [room for layer in drawn_layers() for room in layer]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == folders | modules


def test_the_picture_has_the_order_of_the_import_rules() -> None:
    layers = [line for line in contract("hyper_parallel") if not line.startswith("(")]
    assert [" | ".join(layer) for layer in drawn_layers()] == layers


def test_the_rooms_of_the_torch_back_end_are_drawn_in_their_order() -> None:
    (line,) = [line for line in picture() if line.startswith("inside backends/torch:")]
    ordered, rest = re.split(r";\s+", line.split(":", 1)[1])
    assert [room.strip() for room in ordered.split(">")] == contract("hyper_parallel.backends.torch")
    folders = {path.parent.name for path in (PACKAGE / "backends" / "torch").glob("*/__init__.py")}
    assert {*contract("hyper_parallel.backends.torch"), rest.split()[0]} == folders


def test_only_back_ends_name_themselves() -> None:
    names = [name for name, backend in BACKENDS.items() if backend.programs is not None]
    assert names
    others = (p for p in PACKAGE.rglob("*.py") if PACKAGE / "backends" not in p.parents)
    texts = {path: path.read_text(encoding="utf-8").lower() for path in others}
    assert not [(path, name) for path, text in texts.items() for name in names if name in text]
