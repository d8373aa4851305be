"""Regression test: compare errors, plans and figures with a recorded baseline (`make oracles`).

    python tools/oracles.py                          every part against tools/oracles_baseline.json
    python tools/oracles.py --only plans,cells       these parts: errors, census, parity, plans, cells
    python tools/oracles.py --only errors --match planner    only entries whose name contains this
    python tools/oracles.py --root DIR               the source of another checkout, with this baseline
    python tools/oracles.py --update --reason TEXT   record a new baseline, with reason and date

* errors: code, sentence and hint of every coded error that a set of tests sees, by test.
* census: counts of docs/census.json, and a sample of model types run by tools/census.py.
* parity: outcome of each test of the suites that compare results bitwise or within rounding.
* plans: output of `hyper-parallel plan --json` for pairs of model and machine.
* cells: deterministic figures of benchmarks/, each with its tolerance.

A changed sentence, hint or note is printed as `wording` and does not fail; every other difference gives exit status 1.
Tests that the baseline lacks are counted as new. Renamed tests and test files are entered by hand under `renames` of
the baseline: `{"tests/old.py": "tests/new.py", "tests/a.py::test_old": "tests/b.py::test_new"}`. A list of names means
that a test was split. The longest matching entry applies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from oracle_collection import PARTS, TOOLS, collect
from oracle_comparison import compare

BASELINE = TOOLS / "oracles_baseline.json"


def save(baseline: Mapping[str, Any], path: Path) -> None:
    """Write the baseline with one line per entry, so that a diff can be reviewed."""

    def lines(value: Any, indent: str, depth: int) -> str:
        if depth and isinstance(value, dict) and value:
            deeper = indent + " "
            inner = [f"{deeper}{json.dumps(k)}: {lines(v, deeper, depth - 1)}" for k, v in value.items()]
            return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
        return json.dumps(value)

    parts = [f"{json.dumps(k)}: {lines(v, '', 2)}" for k, v in baseline.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    """Collect the results, and compare them with the baseline or record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--match", default="", help="only entries with this in their name")
    parser.add_argument("--root", type=Path, default=TOOLS.parent, help="checkout to run")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--processes", type=int, default=2, help="commands at the same time")
    parser.add_argument("--update", action="store_true", help="record what the parts give now")
    parser.add_argument("--reason", default="", help="why the baseline changes")
    parser.add_argument("--wording", type=int, default=40, help="changed texts printed per part")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; parts are {', '.join(PARTS)}")
    if args.update and not args.reason.strip():
        parser.error('an update needs a reason: make oracles UPDATE=1 REASON="why"')
    if args.update and args.match:
        parser.error("an update records whole parts: leave out --match")
    baseline = json.loads(args.baseline.read_text()) if args.baseline.exists() else {}
    begin = time.monotonic()
    entries, seconds = collect(args.root.resolve(), parts, baseline, args.processes, args.match)
    failed = False
    for part in parts:
        size = len(entries[part].get("tests", entries[part]))
        differences = compare(part, baseline, entries[part], args.match)
        kinds = Counter(d.kind for d in differences)
        failed |= bool(kinds["changed"])
        counted = ", ".join(f"{kinds[kind]} {kind}" for kind in ("changed", "wording", "new"))
        print(f"== {part}: {size} entries, {counted}, {seconds[part]:.0f} s")
        for kind, most in (("changed", 60), ("wording", args.wording)):
            some = [d for d in differences if d.kind == kind]
            for d in some[:most]:
                print(f"{kind}: {d.entry}: {d.text[:400]}")
            if len(some) > most:
                print(f"... and {len(some) - most} more ({kind})")
    print(f"total {time.monotonic() - begin:.0f} s, {args.processes} commands at a time")
    if args.update:
        record = {"date": date.today().isoformat(), "reason": args.reason, "parts": parts}
        history = [*baseline.get("history", []), record]
        whole = {**baseline, **entries}
        order = {"history": history, "renames": baseline.get("renames", {})}
        save({**order, **{p: whole[p] for p in PARTS if p in whole}}, args.baseline)
        print(f"recorded {', '.join(parts)} in {args.baseline}")
        return 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
