import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hyper_parallel

pytestmark = pytest.mark.sanity

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
        if not target.startswith(("http://", "https://", "mailto:")) and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert not {page for page in pages if f"({page})" not in index}


def test_every_page_of_docs_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = {path for section in nav for path in paths(section)}
    assert listed == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


def paths(section: dict[str, str | list] | str) -> Iterator[str]:
    """Yield the pages of a section of the navigation."""
    if isinstance(section, str):
        yield section
        return
    for value in section.values():
        for entry in value if isinstance(value, list) else [value]:
            yield from paths(entry)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda p: p.stem)
def test_a_how_to_guide_has_at_most_two_screens(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= 450


def test_every_public_name_exists() -> None:
    for name in hyper_parallel.__all__:
        assert getattr(hyper_parallel, name) is not None


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_every_benchmark_takes_json(script: Path) -> None:
    assert 'add_argument("--json"' in script.read_text(encoding="utf-8"), "`make bench` passes it"


def test_the_pages_make_a_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "explanation" / "memory_plans" / "index.html").is_file()
