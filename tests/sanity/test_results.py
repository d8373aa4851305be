"""The pages of measurements are those of their raw files, and no raw file is left out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sanity
ROOT = Path(__file__).resolve().parents[2]


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of a script in tools."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))


def test_the_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tool("make_results", monkeypatch)["pages"]()
    stale = [
        path.name for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run python tools/make_results.py"


def test_every_raw_file_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tool("make_results", monkeypatch)["pages"]()
    used = sys.modules["results_tables"].USED
    assert not {p.stem for p in (ROOT / "benchmarks" / "results").glob("*.json")} - used


@pytest.mark.parametrize("name", ["pipeline_schedules", "strategy_ranking"])
def test_figures_are_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = tool("draw_figures", monkeypatch)["FIGURES"][name]()
    written = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == written, "run python tools/draw_figures.py"
