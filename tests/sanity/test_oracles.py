"""The comparison of `tools/oracles.py` finds each kind of difference and only that."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sanity

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SPLIT = ["tests/s.py::test_a", "tests/t.py::test_b"]
CODES = {"HP101": ["unknown key `a` | hint: write `b`"]}
BASELINE = {
    "renames": {},
    "errors": {"codes": ["HP101", "HP102"], "tests": {"tests/a.py::test_x[1]": CODES}},
    "census": {"recorded": {"pp, ok": 3}, "live llama": {"pp": "ok", "cp": "HP205: no such kind"}},
    "parity": {"tests/p.py::test_y": "passed"},
    "plans": {"dense": {"step_s": 0.5, "notes": ["assumed"], "planning_s": 1.0, "stages": [{"n": 4}]}},
    "cells": {
        "peak": {"value": 100, "tolerance": 0.0, "reason": "bytes"},
        "step": {"value": 1.0, "tolerance": 1e-6, "reason": "solver"},
    },
}  # fmt: skip


@pytest.fixture(name="kinds")
def _kinds(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import oracle_comparison

    def kinds(part, change, renames=None):
        """Kinds of differences of one part after `change` of a copy of its entries."""
        entries = copy.deepcopy(BASELINE[part])
        change(entries)
        baseline = {**BASELINE, "renames": renames or {}}
        return [d.kind for d in oracle_comparison.compare(part, baseline, entries)]

    return kinds


def rename_test(entries, old, *new):
    value = entries.pop(old)
    entries.update(dict.fromkeys(new, value))


@pytest.mark.parametrize("part", ["errors", "census", "parity", "plans", "cells"])
def test_equal_results_have_no_difference(kinds, part):
    assert kinds(part, lambda entries: None) == []


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("errors", lambda e: e["codes"].remove("HP102"), ["changed"]),
        ("errors", lambda e: e["tests"].clear(), ["changed"]),
        ("errors", lambda e: e["tests"].update({"tests/a.py::test_x[1]": {"HP102": []}}), ["changed"]),
        ("errors", lambda e: e["tests"].update({"tests/n.py::test_n": CODES}), ["new"]),
        ("errors", lambda e: e["tests"]["tests/a.py::test_x[1]"].update(HP101=["other"]), ["wording"] * 2),
        ("census", lambda e: e["recorded"].update({"pp, ok": 2}), ["changed"]),
        ("census", lambda e: e["live llama"].update(pp="HP205: none"), ["changed"]),
        ("census", lambda e: e["live llama"].update(cp="HP205: unknown kind"), ["wording"]),
        ("parity", lambda e: e.clear(), ["changed"]),
        ("parity", lambda e: e.update({"tests/p.py::test_y": "skipped"}), ["changed"]),
        ("parity", lambda e: e.update({"tests/p.py::test_z": "passed"}), ["new"]),
        ("parity", lambda e: e.update({"tests/p.py::test_z": "failed"}), ["changed"]),
        ("plans", lambda e: e["dense"].update(step_s=0.5000000000000001), ["changed"]),
        ("plans", lambda e: e["dense"]["stages"].append({"n": 1}), ["changed"]),
        ("plans", lambda e: e["dense"].pop("stages"), ["changed"]),
        ("plans", lambda e: e["dense"].update(notes=["taken as given"]), ["wording"]),
        ("plans", lambda e: e["dense"].update(planning_s=9.0), []),
        ("plans", lambda e: e.clear(), ["changed"]),
        ("cells", lambda e: e["peak"].update(value=101), ["changed"]),
        ("cells", lambda e: e["step"].update(value=1.0 + 1e-9), []),
        ("cells", lambda e: e["step"].update(value=1.0 + 1e-4), ["changed"]),
        ("cells", lambda e: e["step"].update(value=None), ["changed"]),
        ("cells", lambda e: e["step"].update(tolerance=1.0, value=2.0), ["changed"]),
    ],
)  # fmt: skip
def test_each_difference_has_its_kind(kinds, part, change, expected):
    assert kinds(part, change) == expected


@pytest.mark.parametrize(
    ("renames", "new"),
    [
        ({"tests/p.py": "tests/q/r.py"}, ["tests/q/r.py::test_y"]),
        ({"tests/p.py::test_y": "tests/p.py::test_w"}, ["tests/p.py::test_w"]),
        ({"tests/p.py": "tests/no.py", "tests/p.py::test_y": "tests/s.py::test_y"}, ["tests/s.py::test_y"]),
        ({"tests/p.py::test_y": SPLIT}, SPLIT),
    ],
)  # fmt: skip
def test_a_renamed_test_is_found_by_its_entry(kinds, renames, new):
    def change(entries):
        rename_test(entries, "tests/p.py::test_y", *new)

    assert "changed" in kinds("parity", change)
    assert kinds("parity", change, renames) == []


def test_parameters_of_a_renamed_test_keep_their_names(kinds):
    def change(entries):
        rename_test(entries["tests"], "tests/a.py::test_x[1]", "tests/b.py::test_z[1]")

    assert sorted(kinds("errors", change)) == ["changed", "new"]
    assert kinds("errors", change, {"tests/a.py::test_x": "tests/b.py::test_z"}) == []


def test_an_id_does_not_say_where_a_class_is_defined(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from oracle_collection import stable_id

    test = "tests/a.py::test_x[<class 'hyper_parallel.errors._planning.NoData'>-8]"
    assert stable_id(test) == "tests/a.py::test_x[NoData-8]"


def test_an_update_needs_a_reason(tmp_path):
    command = [sys.executable, TOOLS / "oracles.py", "--update", "--baseline", tmp_path / "b.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "needs a reason" in ended.stderr
    assert not (tmp_path / "b.json").exists()


def test_the_recorder_writes_rendered_and_caught_errors(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "from hyper_parallel.errors import NoData, UnknownKey\n"
        "def test_caught():\n"
        "    with pytest.raises(NoData):\n"
        "        raise NoData('17 rows in /data/x.json', hint='use 18')\n"
        "def test_forked():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        str(UnknownKey('no key'))\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "def test_discarded():\n"
        "    NoData('never seen')\n"
    )
    lines = tmp_path / "lines.jsonl"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "oracle_errors", "-p", "no:cacheprovider"),
        *("--oracle-errors", lines, "-c", tmp_path / "none.ini", tmp_path / "test_it.py"),
    ]
    (tmp_path / "none.ini").touch()
    path = f"{TOOLS.parent / 'src'}:{TOOLS}"
    ended = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    errors = [{**line, "test": line["test"].partition("::")[2]} for line in found if "code" in line]
    assert errors == [
        {"test": "test_caught", "code": "HP602", "text": "N rows in PATH", "hint": "use N"},
        {"test": "test_forked", "code": "HP101", "text": "no key", "hint": None},
    ]
    assert [line["outcome"] for line in found if "outcome" in line] == ["passed"] * 3
