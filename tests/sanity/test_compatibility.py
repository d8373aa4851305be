"""The compatibility page has a cell for every family and axis, none of which fails, and cells of it can be repeated."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.sanity, pytest.mark.parity]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "make_compatibility.py"
    spec = importlib.util.spec_from_file_location("make_compatibility", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(tool: ModuleType) -> dict[str, dict[str, str]]:
    return tool.read_page(tool.PAGE.read_text(encoding="utf-8"))


def test_the_page_has_every_family_and_axis(tool: ModuleType, table) -> None:
    assert list(table) == list(tool.ROWS), "run python tools/make_compatibility.py"
    for row, cells in table.items():
        assert list(cells) == list(tool.COLUMNS), row
    assert tool.page(table).split("\n\n", 3)[3] == tool.PAGE.read_text().split("\n\n", 3)[3]


def test_every_cell_is_exact_or_refused(tool: ModuleType, table) -> None:
    for row, cells in table.items():
        for name, value in cells.items():
            assert not value.startswith(tool.FAILS), f"{row}, {name}: {value}"
            if tool.NUMBER.fullmatch(value):
                assert float(value) <= tool.LIMIT, f"{row}, {name}"


def test_no_family_is_refused_where_all_must_train(tool: ModuleType, table) -> None:
    for row, cells in table.items():
        for name in ("dp_replicate", "dp_shard", "tp 2", "tp 4"):
            assert tool.NUMBER.fullmatch(cells[name]), f"{row}, {name}: {cells[name]}"


@pytest.mark.parametrize(("row", "name"), [("phi3", "tp 4"), ("glm4", "tp 2"), ("llama", "ep")])
def test_a_cell_is_repeated(tool: ModuleType, table, row: str, name: str) -> None:
    found = tool.cell(tool.Reference(tool.setup_of(row)), tool.COLUMNS[name])
    if tool.NUMBER.fullmatch(found):
        assert tool.NUMBER.fullmatch(table[row][name])
    else:
        assert found == table[row][name]
