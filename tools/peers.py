"""Compare training runs with TRL's trainers on the same tokens, and write the docs page of the results.

    make peers                                  the environment, all rows, and the page
    python tools/peers.py --list                names of the rows
    python tools/peers.py "dpo sigmoid" kto     these rows only, printed; with `--record`, also recorded
    python tools/peers.py --match moe           rows whose name contains this text
    python tools/peers.py --page                write docs/results/peers.md from the records

Runs in the environment of `tools/peers_env.sh` (`build/peers/bin/python`); `--list` and `--page` in any. The table of
rows, and how to add one, is `integration_tests/peers/rows.py`. The exit code is 1 when a row is `wrong` (not equal
without a reason, or equal with one) or `fails`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from integration_tests.peers.compare import compare_in_child, verdict  # noqa: E402
from integration_tests.peers.rows import ROWS, Row  # noqa: E402

RECORDS = ROOT / "docs" / "results" / "peers.json"


def recorded() -> dict[str, Any]:
    """Return the content of the file of recorded results."""
    if RECORDS.is_file():
        return json.loads(RECORDS.read_text(encoding="utf-8"))
    return {"rows": {}}


def record(results: dict[str, Any]) -> None:
    """Store results by row in the order of the table, without rows that the table no longer has."""
    rows = recorded()["rows"] | results
    versions = {package: version(package).split("+")[0] for package in ("trl", "transformers", "torch")}
    kept = {row.name: rows[row.name] for row in ROWS if row.name in rows}
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    RECORDS.write_text(json.dumps(versions | {"rows": kept}, indent=1) + "\n", encoding="utf-8")


def shown(row: Row, result: dict[str, Any]) -> str:
    """Return a line with the result of a row for the terminal."""
    head = f"{verdict(row, result):8} {row.name}:"
    if "error" in result:
        return f"{head} {result['error']}"
    own, theirs, apart = result["own"], result["trl"], result["apart"]
    parts = [f"first {key} {own[key][0]} / {theirs[key][0]}" for key in ("loss", "grad_norm")]
    parts.append(f"targets {own['targets']} / {theirs['targets']}")
    differences = (f"{k} {'NaN' if v is None else format(v, '.1e')}" for k, v in apart.items())
    return "\n         ".join((f"{head} {', '.join(parts)}", f"apart: {', '.join(differences)}"))


def run(rows: list[Row], keep: Path | None) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Run rows one after another, and yield each with its result."""
    import datasets
    import transformers
    import trl  # noqa: F401  imported once, before rows are forked

    import hyper_parallel.trainer  # noqa: F401

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for row in rows:
        with tempfile.TemporaryDirectory(prefix="peers_") as scratch:
            place = (keep or Path(scratch)) / re.sub("[^a-z0-9_]+", "_", row.name)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            yield row, compare_in_child(row, place)


def main() -> None:
    """Run rows, or write the page, as the arguments request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--match", help="rows whose name has this text")
    parser.add_argument("--page", action="store_true", help="write docs/results/peers.md")
    parser.add_argument("--record", action="store_true", help="record named rows too")
    parser.add_argument("--keep", type=Path, help="folder that keeps the files of every row")
    given = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    if given.list:
        print("\n".join(by_name))
        return
    if given.page:
        from integration_tests.peers.page import write_page

        write_page(recorded())
        return
    if unknown := [name for name in given.names if name not in by_name]:
        sys.exit(f"no such row: {', '.join(unknown)}; see --list")
    chosen = [by_name[name] for name in given.names]
    chosen += [row for row in ROWS if given.match and given.match in row.name]
    some = bool(given.names or given.match)
    rows = chosen if some else list(ROWS)
    counts: Counter[str] = Counter()
    for row, result in run(rows, given.keep):
        print(shown(row, result), flush=True)
        counts[verdict(row, result)] += 1
        if given.record or not some:
            record({row.name: result})
    print(dict(counts.most_common()))
    sys.exit(1 if counts["wrong"] or counts["fails"] else 0)


if __name__ == "__main__":
    main()
