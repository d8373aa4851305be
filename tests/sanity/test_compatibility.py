"""The compatibility page is what the census found, no family fails on four ranks, and cells of it can be repeated."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.slow import slow_cells

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
def data(tool: ModuleType) -> dict[str, Any]:
    return json.loads(tool.DATA.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def table(data) -> dict[str, dict[str, str]]:
    return data["families"]


def test_the_page_says_what_the_census_found(tool: ModuleType, data) -> None:
    written = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(data) == written, "run python tools/make_compatibility.py"


def test_every_type_that_trains_plainly_trains_sharded_or_is_refused(tool: ModuleType, data) -> None:
    bad = {
        f"{name}, {axis}": cells[axis]
        for name, cells in data["types"].items()
        for axis in ("one rank", "dp_shard")
        if tool.kind(cells.get(axis, "")) == "wrong"
    }
    assert not bad


def test_every_family_has_every_layout(tool: ModuleType, table) -> None:
    assert list(table) == list(tool.ROWS), "run python tools/make_compatibility.py --run"
    for row, cells in table.items():
        assert list(cells) == list(tool.COLUMNS), row


def test_every_cell_is_exact_or_refused(tool: ModuleType, table) -> None:
    for row, cells in table.items():
        for name, value in cells.items():
            assert not value.startswith(tool.FAILS), f"{row}, {name}: {value}"
            if tool.NUMBER.fullmatch(value):
                assert float(value) <= tool.LIMIT, f"{row}, {name}"


def test_no_family_is_refused_where_all_must_train(tool: ModuleType, table) -> None:
    for row, cells in table.items():
        assert tool.NUMBER.fullmatch(cells["tp 4"]), f"{row}: {cells['tp 4']}"


@slow_cells("glm4-cp ring", "phi3-tp 4")
@pytest.mark.parametrize(("row", "name"), [("phi3", "tp 4"), ("glm4", "cp ring"), ("deepseek_v3", "tp 2-D")])
def test_a_cell_is_repeated(tool: ModuleType, table, row: str, name: str) -> None:
    found = tool.cell(tool.Reference(tool.setup_of(row)), tool.COLUMNS[name])
    if tool.NUMBER.fullmatch(found):
        assert tool.NUMBER.fullmatch(table[row][name])
    else:
        assert found == table[row][name]
