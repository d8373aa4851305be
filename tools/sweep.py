"""Run a check on every model type of transformers, in child processes, and write the docs page of the results.

    python tools/sweep.py --list                          names of the sweeps
    python tools/sweep.py packing                         all model types of a sweep, recorded
    python tools/sweep.py packing mistral phi3            these types only, printed; with `--record`, also recorded
    python tools/sweep.py packing --missing --shard 0/2   every second type that has no record yet
    python tools/sweep.py mindspore --containing aten.std  the types whose record contains this text, recorded again
    python tools/sweep.py --page                          write docs/results/sweeps.md from the records

Records are docs/results/sweeps/NAME.json. The exit code is 1 when a cell is `wrong` or `fails`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools"), str(ROOT)]


from sweeps.interface import Sweep, kind, one_line  # noqa: E402

RECORDS = ROOT / "docs" / "results" / "sweeps"
PAGE = ROOT / "docs" / "results" / "sweeps.md"
PAGE_HEAD = """# Sweeps over model types

<!-- Written by `python tools/sweep.py --page` from docs/results/sweeps/*.json; do not edit. -->

Each table is one check over the model types of transformers, with shrunk configs and random weights. `make sweeps` runs
all of them. A cell is `ok`, a coded refusal (HPnnn), `skipped` (plain transformers cannot do it either), `wrong` or
`fails`. The tables list every type that is not `ok` in all columns.
"""


def names() -> list[str]:
    """Return the names of all sweeps."""
    files = (ROOT / "tools" / "sweeps").glob("*.py")
    return sorted(f.stem for f in files if f.stem not in ("__init__", "interface"))


def runnable() -> list[str]:
    """Return the names of the sweeps whose packages are installed."""
    return [name for name in names() if not missing_packages(name)]


def missing_packages(name: str) -> list[str]:
    """Return the packages that a sweep needs and that are not installed."""
    return [package for package in getattr(load(name), "NEEDS", ()) if not find_spec(package)]


def load(name: str) -> Sweep:
    """Import the module of a sweep, and return it."""
    sweep: Any = importlib.import_module(f"sweeps.{name}")
    return sweep


def run_types(sweep: Sweep, model_types: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield model types with their result texts by column, computed in child processes under the limits of the sweep.

    A child computes `TYPES_PER_PROCESS` types, by default one. If it dies, the current type fails, and another child
    computes the remaining types.
    """
    waiting = list(model_types)
    while waiting:
        batch = waiting[: getattr(sweep, "TYPES_PER_PROCESS", 1)]
        computed = 0
        for computed, cells in enumerate(_child_cells(sweep, batch), 1):
            yield batch[computed - 1], cells
        del waiting[:computed]


def _child_cells(sweep: Sweep, batch: list[str]) -> Iterator[dict[str, str]]:
    """Yield the results of types computed by one child process, up to the type at which it dies."""
    scratch = Path(tempfile.mkdtemp(prefix="sweep_"))
    results = scratch / "cells.jsonl"
    results.touch()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _compute(sweep, batch, scratch, results)
        sys.stdout.flush()
        os._exit(0)
    deadline, ended, status, finished = time.monotonic() + sweep.SECONDS, 0, 0, 0
    with results.open(encoding="utf-8") as lines:
        while finished < len(batch):
            if not ended:
                ended, status = os.waitpid(pid, os.WNOHANG)
            if line := lines.readline():
                yield json.loads(line)
                deadline, finished = time.monotonic() + sweep.SECONDS, finished + 1
            elif ended or time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    if finished < len(batch):
        why = "killed" if ended else f"no end after {sweep.SECONDS} s"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            why = f"no end after {sweep.CPU_SECONDS} s of processor time"
        yield {sweep.COLUMNS[0]: f"fails: {why}"}


def _compute(sweep: Sweep, batch: list[str], scratch: Path, results: Path) -> None:
    """Compute the results of types, and append them to a file, one line per type."""
    for model_type in batch:
        folder = scratch / model_type
        folder.mkdir()
        try:
            if cpu_seconds := getattr(sweep, "CPU_SECONDS", None):
                limit = int(time.process_time()) + cpu_seconds
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            cells = sweep.run(model_type, folder)
        except BaseException as error:
            traceback.print_exc()
            cells = {sweep.COLUMNS[0]: f"fails: {one_line(error)}"}
        with results.open("ab", buffering=0) as file:
            file.write(json.dumps(cells).encode() + b"\n")


def record(name: str, model_type: str, cells: dict[str, str]) -> None:
    """Store the results of a type; several processes may do so concurrently."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    with (RECORDS / f"{name}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = json.loads(file.read() or '{"types": {}}')
        packages = ("torch", "transformers", *getattr(load(name), "NEEDS", ()))
        data |= {package: version(package).split("+")[0] for package in packages}
        data["types"][model_type] = cells
        data["types"] = dict(sorted(data["types"].items()))
        file.truncate(0)
        file.write(json.dumps(data, indent=1) + "\n")


def recorded(name: str) -> dict[str, dict[str, str]]:
    """Return the recorded results of a sweep by model type."""
    file = RECORDS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["types"] if file.is_file() else {}


def section(name: str) -> str:
    """Return the section of the docs page about one sweep."""
    sweep, rows = load(name), recorded(name)
    versions = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    packages = [package for package in getattr(sweep, "NEEDS", ()) if package in versions]
    needed = "".join(f", {package} {versions[package]}" for package in packages)
    lines = [f"## {sweep.TITLE}", "", " ".join(sweep.TEXT.split()), ""]
    lines += [
        f"{len(rows)} types of transformers {versions['transformers']} on torch {versions['torch']}{needed}, "
        f"`python tools/sweep.py {name}`.",
        "",
        "| column | ok | refused | skipped | wrong | fails |",
        "|---|---|---|---|---|---|",
    ]
    for column in sweep.COLUMNS:
        count = Counter(kind(cells[column]) for cells in rows.values() if column in cells)
        counts = " | ".join(str(count[k]) for k in ("ok", "refused", "skipped", "wrong", "fails"))
        lines.append(f"| {column} | {counts} |")
    special = {n: c for n, c in rows.items() if any(cell != "ok" for cell in c.values())}
    if special:
        lines += ["", "| type | " + " | ".join(sweep.COLUMNS) + " |"]
        lines.append("|---" * (len(sweep.COLUMNS) + 1) + "|")
        for model_type, cells in special.items():
            shown = [cells.get(c, "").replace("|", "\\|") for c in sweep.COLUMNS]
            lines.append(f"| {model_type} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Write the docs page from all records."""
    parts = [section(name) for name in names() if (RECORDS / f"{name}.json").is_file()]
    PAGE.write_text("\n".join([PAGE_HEAD, *parts]), encoding="utf-8")


def main() -> None:
    """Run a sweep, or write the page, as the arguments request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--list", action="store_true", help="print the names of the sweeps")
    parser.add_argument("--page", action="store_true", help="write docs/results/sweeps.md")
    parser.add_argument("--record", action="store_true", help="record named types too")
    parser.add_argument("--missing", action="store_true", help="only types without a record")
    parser.add_argument("--containing", help="only types whose record contains this text")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th type, from the i-th on")
    given = parser.parse_args()
    if given.list:
        print("\n".join(runnable()))
        return
    if given.page:
        write_page()
        return
    if given.name not in names():
        sys.exit(f"no such sweep: {given.name}; there are {', '.join(runnable())}")
    if missing := missing_packages(given.name):
        words = " ".join(missing)
        sys.exit(f"the sweep {given.name} needs {words}, not installed\nhint: pip install {words}")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sweep, old = load(given.name), recorded(given.name)
    for module in getattr(sweep, "PRELOADED", ()):
        importlib.import_module(module)
    part, parts = map(int, given.shard.split("/"))
    chosen = (given.types or sweep.model_types())[part::parts]
    counts: Counter[str] = Counter()
    if given.missing:
        chosen = [name for name in chosen if name not in old]
    if given.containing:
        chosen = [name for name in chosen if given.containing in json.dumps(old.get(name))]
    for model_type, cells in run_types(sweep, chosen):
        print(model_type, json.dumps(cells), flush=True)
        counts.update(kind(cell) for cell in cells.values())
        if given.record or not given.types:
            record(given.name, model_type, cells)
    print(dict(counts.most_common()))
    sys.exit(1 if counts["wrong"] or counts["fails"] else 0)


if __name__ == "__main__":
    main()
