"""Collection of the results that `tools/oracles.py` compares, by commands on the source of one checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import oracle_tables
from oracle_comparison import Entries, Renames, leaves

TOOLS = Path(__file__).resolve().parent
PARTS = ("errors", "census", "parity", "plans", "cells")
MARKS = "not accelerator and not cluster"
"""Slow tests are included: they hold most cells of the parity suites."""
DIGESTED = ("rejected", "pareto")
"""Lists of a plan of which each entry is kept as a digest: runners-up are half of the bytes."""


class Commands:
    """Runner of commands on the source of one checkout."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self.scratch = scratch
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{root / 'src'}{os.pathsep}{TOOLS}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(self, arguments: list[str], *, clean_cache: bool = False) -> subprocess.CompletedProcess[str]:
        """Run Python in the checkout; `clean_cache` hides the user's cached measurements."""
        environment = dict(self._environment)
        if clean_cache:
            environment["XDG_CACHE_HOME"] = str(self.scratch / "cache")
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )

    def pytest(self, files: list[str], name: str) -> list[dict[str, Any]]:
        """Run test files with the recorder plugin `oracle_errors`, and return its records."""
        lines = self.scratch / f"{name}.jsonl"
        result = self.run(
            [
                *("-m", "pytest", "-q", "-m", MARKS, "-p", "oracle_errors"),
                *("--oracle-errors", str(lines), "-p", "no:cacheprovider", "--hypothesis-seed=0"),
                *("--tb=short", "--no-showlocals", *files),
            ]
        )
        if result.returncode not in (0, 1):
            checked(result)
        if result.returncode:
            print(result.stdout[-6000:], file=sys.stderr)
        return [json.loads(line) for line in lines.read_text().splitlines()]


Job = Callable[[], Entries]
"""One command and the entries it gives."""


def test_jobs(commands: Commands, part: str, renames: Renames, recorded: Entries, match: str) -> list[Job]:
    """Return one job per group of test files; files that no longer exist are omitted."""
    groups = oracle_tables.ERROR_FILES if part == "errors" else oracle_tables.PARITY_FILES
    taken: set[str] = set()
    jobs: list[Job] = []
    for number, group in enumerate(groups):
        files = set().union(*(renames.files(file, recorded) for file in group)) - taken
        files = {f for f in files if match in f and (commands.root / f).exists()}
        taken |= files
        if not files:
            continue
        read = read_errors if part == "errors" else read_outcomes
        jobs.append(partial(_run_tests, commands, sorted(files), f"{part}{number}", read))
    return jobs


def _run_tests(
    commands: Commands, files: list[str], name: str, read: Callable[[list[dict[str, Any]]], Entries]
) -> Entries:
    return read(commands.pytest(files, name))


def stable_id(test: str) -> str:
    """Return a test id without module paths of classes and functions among its parameters."""
    test = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", test)
    return re.sub(r"<function (?:[\w<>]+\.)*(\w+) at 0x\w+>", r"\1", test)


def read_errors(lines: list[dict[str, Any]]) -> Entries:
    """Return {test: {code: [sentence and hint]}} from the recorder's records."""
    tests: dict[str, dict[str, set[str]]] = {}
    for line in lines:
        test = stable_id(line["test"])
        if "outcome" in line:
            if line["outcome"] == "failed":
                tests.setdefault(test, {})["failed"] = set()
            continue
        text = line["text"] + (f" | hint: {line['hint']}" if line["hint"] else "")
        tests.setdefault(test, {}).setdefault(line["code"], set()).add(text)
    return {test: {code: sorted(texts) for code, texts in sorted(codes.items())} for test, codes in tests.items()}


def read_outcomes(lines: list[dict[str, Any]]) -> Entries:
    """Return {test: outcome} from the recorder's records."""
    return {stable_id(line["test"]): line["outcome"] for line in lines if "outcome" in line}


def defined_codes(commands: Commands) -> list[str]:
    """Return every error code that the source defines."""
    code = "import json\nfrom hyper_parallel.errors import all_codes\nprint(json.dumps([*all_codes()]))"
    return list(json.loads(checked(commands.run(["-c", code]))))


def census_counts(commands: Commands) -> Entries:
    """Return the number of cells per axis and outcome in docs/census.json."""
    rows = json.loads((commands.root / "docs" / "census.json").read_text())["types"]
    counts: Counter[str] = Counter()
    for cells in rows.values():
        for axis, outcome in cells.items():
            kind = outcome.partition(":")[0]
            if axis == "plain" and kind != "ok":
                kind = "does not train"
            counts[f"{axis}, {kind}"] += 1
    return {"recorded": dict(sorted(counts.items()))}


def census_jobs(commands: Commands, match: str) -> list[Job]:
    """Return jobs for the counts of docs/census.json, and for census runs of a sample of types."""
    types = [name for name in oracle_tables.CENSUS_TYPES if match in f"live {name}"]
    halves = [types[i::2] for i in range(2)]
    live = [partial(_run_census, commands, half) for half in halves if half]
    return [partial(census_counts, commands), *live]


def _run_census(commands: Commands, types: list[str]) -> Entries:
    result = commands.run(["tools/census.py", "--axes", oracle_tables.CENSUS_AXES, *types])
    entries: Entries = {}
    for name, cells in re.findall(r"^(\S+) (\{.*\})$", checked(result), re.MULTILINE):
        outcomes = {k: re.sub(r"^differs: .*", "differs", v) for k, v in json.loads(cells).items()}
        entries[f"live {name}"] = outcomes
    return entries


def plan_jobs(commands: Commands, match: str) -> list[Job]:
    """Return one job per plan."""
    plans = oracle_tables.PLANS.items()
    return [partial(_run_plan, commands, *item) for item in plans if match in item[0]]


def _run_plan(commands: Commands, name: str, arguments: str) -> Entries:
    words = ["-m", "hyper_parallel", "plan", *shlex.split(arguments), "--json"]
    result = commands.run(words, clean_cache=True)
    refused = re.search(r"error\[(HP\d+)\]: (.*)", result.stderr)
    if result.returncode and refused:
        return {name: {"exit": result.returncode, "code": refused[1], "sentence": refused[2]}}
    plan = json.loads(checked(result))
    for key in DIGESTED:
        if isinstance(plan.get(key), list):
            plan[key] = [_digest(entry) for entry in plan[key]]
    return {name: plan}


def _digest(value: Any) -> str:
    text = json.dumps(sorted((path, repr(leaf)) for path, leaf in leaves(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cell_jobs(commands: Commands, match: str) -> list[Job]:
    """Return one job per benchmark command."""
    wanted = [b for b in oracle_tables.BENCHMARKS if any(match in name for name in b.cells)]
    return [partial(_run_benchmark, commands, benchmark) for benchmark in wanted]


def _run_benchmark(commands: Commands, benchmark: oracle_tables.Benchmark) -> Entries:
    script, *arguments = shlex.split(benchmark.command)
    result = commands.run([f"benchmarks/{script}", *arguments], clean_cache=True)
    output = json.loads(checked(result))
    return {
        name: {"value": select(output, path), "tolerance": tolerance, "reason": benchmark.reason}
        for name, (path, tolerance) in benchmark.cells.items()
    }


def select(value: Any, path: str) -> Any:
    """Return the value at a path: keys, indices and `key=value` of a row, separated by "/"; "#" is a length."""
    for step in path.split("/"):
        if step == "#":
            value = len(value)
        elif isinstance(value, dict):
            value = value[step]
        elif "=" in step:
            wanted = [pair.partition("=")[::2] for pair in step.split(",")]
            (value,) = (r for r in value if all(str(r[key]) == text for key, text in wanted))
        else:
            value = value[int(step)]
    return value


def checked(result: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command; exit with its output if it failed."""
    if result.returncode:
        said = result.stdout[-4000:] + result.stderr[-3000:]
        raise SystemExit(f"{shlex.join(result.args)} ended with {result.returncode}:\n{said}")
    return result.stdout


def collect(
    root: Path, parts: list[str], baseline: Mapping[str, Any], processes: int, match: str = ""
) -> tuple[dict[str, Entries], dict[str, float]]:
    """Run all jobs of the parts, `processes` at a time, and return entries and seconds by part."""
    renames = Renames(baseline.get("renames", {}))
    entries: dict[str, Entries] = {part: {} for part in parts}
    seconds = dict.fromkeys(parts, 0.0)
    with (
        tempfile.TemporaryDirectory(prefix="oracles_") as scratch,
        ThreadPoolExecutor(processes) as pool,
    ):
        commands = Commands(root, Path(scratch))
        recorded = {part: baseline.get(part, {}) for part in PARTS}
        errors = recorded["errors"].get("tests", {})
        jobs = {
            "errors": lambda: test_jobs(commands, "errors", renames, errors, match),
            "parity": lambda: test_jobs(commands, "parity", renames, recorded["parity"], match),
            "census": lambda: census_jobs(commands, match),
            "plans": lambda: plan_jobs(commands, match),
            "cells": lambda: cell_jobs(commands, match),
        }

        def timed(job: Job) -> tuple[Entries, float]:
            begin = time.monotonic()
            return job(), time.monotonic() - begin

        running = [(part, pool.submit(timed, job)) for part in parts for job in jobs[part]()]
        for part, future in running:
            some, spent = future.result()
            entries[part].update(some)
            seconds[part] += spent
        if "errors" in parts:
            entries["errors"] = {"codes": defined_codes(commands), "tests": entries["errors"]}
    return entries, seconds
