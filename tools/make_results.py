"""Write the measured pages of docs/results from benchmarks/results/*.json.

    python tools/make_results.py

The text of a page is a template in tools/results; a line `{{name}}` becomes the table of that name in
`tools/results_tables.py`. Pages with a generator of their own are compatibility.md (`tools/make_compatibility.py`),
peers.md (`tools/peers.py --page`) and sweeps.md (`tools/sweep.py --page`); notes.md is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import results_memory  # noqa: E402, F401  registers its tables
from results_tables import RECORDS, TABLES  # noqa: E402

TEMPLATES: Final = ROOT / "tools" / "results"
_PLACEHOLDER: Final = re.compile(r"^\{\{(\w+)\}\}$", re.MULTILINE)
_NOTE: Final = "<!-- Written by tools/make_results.py from tools/results/{name}; do not edit. -->"


def pages() -> dict[Path, str]:
    """Return the text of every page by its path."""
    result = {}
    for template in sorted(TEMPLATES.glob("*.md")):
        title, body = template.read_text(encoding="utf-8").split("\n", 1)
        text = _PLACEHOLDER.sub(lambda match: TABLES[match[1]](), body)
        note = _NOTE.format(name=template.name)
        result[RECORDS / template.name] = f"{title}\n\n{note}\n{text}"
    return result


def main() -> None:
    """Write all pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
