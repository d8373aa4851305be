"""Comparison of the results of `tools/oracles.py` with its baseline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIMING = re.compile(r"(^|_)(cpu|wall|planning|elapsed)_s$")
"""Keys of a plan with durations of the search."""


PROSE = ("sentence", "formula", "source")
"""Keys of a plan that hold text for readers."""


@dataclass(frozen=True)
class Difference:
    """Difference of one entry from the baseline.

    Attributes:
        entry: Name of the test, plan, cell or census row.
        text: Recorded and new value.
        kind: `changed` fails the comparison; `wording` and `new` are only printed.
    """

    entry: str
    text: str
    kind: str = "changed"


Entries = dict[str, Any]


class Renames:
    """Map from recorded names of tests and test files to their current names."""

    def __init__(self, table: Mapping[str, str | list[str]]) -> None:
        self._targets = {k: [v] if isinstance(v, str) else v for k, v in table.items()}
        self._canonical = {name: names[0] for names in self._targets.values() for name in names}

    def current(self, name: str) -> list[str]:
        """Return the current names of a recorded test id or file."""
        for prefix in _prefixes(name):
            if prefix in self._targets:
                return [new + name[len(prefix) :] for new in self._targets[prefix]]
        return [name]

    def canonical(self, name: str) -> str:
        """Return a common name for all parts of a test that was split."""
        for prefix in _prefixes(name):
            if prefix in self._canonical:
                return self._canonical[prefix] + name[len(prefix) :]
        return name

    def files(self, name: str, recorded: Mapping[str, Any]) -> set[str]:
        """Return the current files of a recorded file: the file itself, and files to which its tests moved."""
        files = {new.partition("::")[0] for new in self.current(name)}
        for test in recorded:
            if test.startswith(name + "::"):
                files |= {new.partition("::")[0] for new in self.current(test)}
        return files


def _prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of a test id, longest first: the id, its function, its classes, its file."""
    yield name
    function = name.partition("[")[0]
    while function:
        if function != name:
            yield function
        function = function.rpartition("::")[0]


def compare_errors(old: Entries, new: Entries, renames: Renames) -> list[Difference]:
    """Compare the error codes that tests see; differences of sentences and hints count as wording."""
    found: list[Difference] = []
    if old.get("codes") != new.get("codes"):
        gone, more = set(old["codes"]) - set(new["codes"]), set(new["codes"]) - set(old["codes"])
        found.append(Difference("codes", f"removed {sorted(gone)}, added {sorted(more)}"))
    before, after = _merged(old["tests"], renames, True), _merged(new["tests"], renames, False)
    for test in sorted(before | after):
        if test not in before:
            kind = "changed" if "failed" in after[test] else "new"
            found.append(Difference(test, f"sees {sorted(after[test])}", kind))
            continue
        if test not in after:
            found.append(Difference(test, f"is gone; it saw {sorted(before[test])}"))
            continue
        was, now = before[test], after[test]
        if was.keys() != now.keys():
            found.append(Difference(test, f"saw {sorted(was)}, sees {sorted(now)}"))
        for code in sorted(was.keys() & now.keys()):
            texts = [f"- {text}" for text in sorted(was[code] - now[code])]
            texts += [f"+ {text}" for text in sorted(now[code] - was[code])]
            found += [Difference(test, f"{code} {text}", "wording") for text in texts]
    return found


def _merged(tests: Entries, renames: Renames, recorded: bool) -> dict[str, dict[str, set[str]]]:
    """Return the errors of each test by canonical name; parts of a split test are merged."""
    merged: dict[str, dict[str, set[str]]] = {}
    for test, codes in tests.items():
        for name in renames.current(test) if recorded else [test]:
            errors = merged.setdefault(renames.canonical(name), {})
            for code, texts in codes.items():
                errors.setdefault(code, set()).update(texts)
    return merged


def compare_parity(old: Entries, new: Entries, renames: Renames) -> list[Difference]:
    """Compare outcomes: a recorded test must exist under its current name and have the same outcome."""
    found, known = [], set()
    for test, outcome in sorted(old.items()):
        for name in renames.current(test):
            known.add(name)
            if (now := new.get(name, "is gone")) != outcome:
                found.append(Difference(name, f"{outcome} before, now {now}"))
    for test in sorted(new.keys() - known):
        kind = "changed" if new[test] == "failed" else "new"
        found.append(Difference(test, new[test], kind))
    return found


def compare_census(old: Entries, new: Entries, renames: Renames) -> list[Difference]:
    """Compare counts exactly, and cells by outcome or code; a changed sentence of a refusal is wording."""
    found = []
    for entry in sorted(old.keys() | new.keys()):
        was, now = old.get(entry, {}), new.get(entry, {})
        for axis in sorted(was.keys() | now.keys()):
            a, b = str(was.get(axis)), str(now.get(axis))
            if a != b:
                same = a.partition(":")[0] == b.partition(":")[0]
                kind = "wording" if same and a.startswith("HP") else "changed"
                found.append(Difference(f"{entry}, {axis}", f"{a} -> {b}", kind))
    return found


def compare_plans(old: Entries, new: Entries, renames: Renames) -> list[Difference]:
    """Compare every leaf of every plan exactly; changed notes and other texts are wording."""
    found = []
    for entry in sorted(old.keys() | new.keys()):
        was, now = old.get(entry), new.get(entry)
        if was is None or now is None:
            found.append(Difference(entry, "is gone" if now is None else "has no record"))
            continue
        a, b = dict(leaves(was)), dict(leaves(now))
        for path in dict.fromkeys([*a, *b]):
            if a.get(path, "absent") != b.get(path, "absent"):
                keys = path.split("/")
                wording = keys[0] == "notes" or keys[-1] in PROSE
                kind = "wording" if wording else "changed"
                text = f"{path}: {a.get(path, 'absent')} -> {b.get(path, 'absent')}"
                found.append(Difference(entry, text, kind))
    return found


def compare_cells(old: Entries, new: Entries, renames: Renames) -> list[Difference]:
    """Compare each benchmark figure within its recorded tolerance."""
    found = []
    for entry in sorted(old.keys() | new.keys()):
        was, now = old.get(entry), new.get(entry)
        if was is None or now is None:
            found.append(Difference(entry, "is gone" if now is None else "has no record"))
            continue
        a, b, limit = was["value"], now["value"], was["tolerance"]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
        off = abs(a - b) / max(abs(a), abs(b), 1e-300) if numbers else float(a != b)
        if a != b and off > limit:
            found.append(Difference(entry, f"{a} -> {b}, tolerance {limit:g}"))
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf of a JSON value, without durations of the command itself."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            if not TIMING.search(key):
                yield from leaves(part, f"{path}/{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from leaves(part, f"{path}/{index}")
    else:
        yield path, value


COMPARE = {
    "errors": compare_errors,
    "census": compare_census,
    "parity": compare_parity,
    "plans": compare_plans,
    "cells": compare_cells,
}


def compare(part: str, baseline: Mapping[str, Any], entries: Entries, match: str = "") -> list[Difference]:
    """Return the differences of one part from the baseline, for entries whose name contains `match`."""
    if part not in baseline:
        return [Difference(part, "was never recorded")]
    renames = Renames(baseline.get("renames", {}))
    old = baseline[part]
    if part == "errors":
        old = {**old, "tests": _matching(old["tests"], renames, match)}
        entries = {**entries, "tests": _matching(entries["tests"], Renames({}), match)}
    else:
        old, entries = _matching(old, renames, match), _matching(entries, Renames({}), match)
    return COMPARE[part](old, entries, renames)


def _matching(entries: Entries, renames: Renames, match: str) -> Entries:
    """Return the entries whose current name contains `match`; for a test, the name of its file."""
    return {
        name: value
        for name, value in entries.items()
        if any(match in now.partition("::")[0] for now in renames.current(name))
    }
