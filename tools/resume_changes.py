"""Test of changes between a checkpoint and the run that resumes from it: `make resume-changes`.

    python tools/resume_changes.py [--only base,stream] [--dir DIRECTORY] [--write]

Each case trains a small model for four steps, returns to the checkpoint of step 2, applies one change, and resumes. Its
outcome is `equal` (the curve of the unchanged run), `refused` (a coded error before a step), or `said` (a printed line
names the change). `SILENT` is a different curve without a message. `FAILS` is an error without a code, or an outcome
that the case does not allow. The last line is JSON; the exit status is 1 when a case is silent or fails. `--write`
records the table in docs/results/resume_changes.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from resume_cases import CASES, Case, Place, base_model, reward_model
from small_runs import run_command_and_exit

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "resume_changes.json"
TIMEOUT_S = 300
TOLERANCE = 1e-10
_CRASHES = ("HP601", "HP621")
"""Codes of an error without a code on a rank, and of a failed last restart."""
_MODULES = (
    "hyper_parallel.cli", "hyper_parallel.trainer.run_start", "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor.experimental", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


def prepare() -> None:
    """Import the modules that commands need, and disable report pages, which no case uses."""
    for module in _MODULES:
        importlib.import_module(module)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from hyper_parallel import reports

    get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand patterns
    reports.write_report = lambda run: (Path(run) / "report.html", Path(run) / "trace.json")
    gc.collect()
    gc.freeze()


def command(words: list[str], place: Path, environment: dict[str, str], log: Path) -> int:
    """Run the command in a forked process that has already imported torch, and return its exit status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(words, place, environment, log)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, 9)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.02)


def _child(words: list[str], place: Path, environment: dict[str, str], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))  # a test may capture both
    os.chdir(place)
    os.environ.update(environment)
    sys.path.append(str(place))
    run_command_and_exit(words)


def curve(run: Path) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step of a run."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["loss"], row["grad_norm"]) for row in rows]


def is_equal(mine: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Return whether two curves are equal to ten digits."""
    pairs = [(a, b) for one, two in zip(mine, other, strict=False) for a, b in zip(one, two, strict=True)]
    return len(mine) == len(other) and all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0) for a, b in pairs)


def outcome(case: Case, root: Path, base: Path, reward: Path) -> tuple[str, str]:
    """Return the outcome of a case, and the relevant output."""
    place = Place(root / case.name.replace(" ", "_"), base, reward)
    case.scene(place)
    run, log = place.root / "run", place.root / "log"
    words = ["train", "recipe.yaml", "output_dir=run", "--no-calibrate", *case.before]
    if command([*words, "checkpoint.every=2"], place.root, {}, log):
        return "FAILS", f"before the change: {_tail(log)}"
    whole = curve(run)
    if case.is_interrupted:
        shutil.rmtree(run / "checkpoints" / "step_00000004")
    more = case.change(place) or []
    words = words[: len(words) - len(case.before)] + [w for w in case.before if w not in case.left_out]
    words = case.command or [*words, "checkpoint.every=2", *more]
    status = command(words, place.root, case.environment, log)
    run = run if run.is_dir() else place.root / "gone"
    text = log.read_text(errors="replace")
    code = re.search(r"error\[(HP\d+)\]: (.*)", text)
    if status:
        is_refused = status == 1 and code is not None and code[1] not in _CRASHES
        return ("refused", f"{code[1]}: {code[2]}") if is_refused else ("FAILS", _tail(log))
    if case.command:
        return "SILENT", "the command accepted the change"
    changed = re.search(r"changed since then: (.*)|nothing is left to train.*without effect: (.*)", text)
    said = next(filter(None, changed.groups())) if changed else ""
    if is_equal(curve(run), whole):
        return "equal", said
    return ("said", said) if case.key and case.key in said else ("SILENT", said)


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-300:]


def main() -> int:
    """Run the cases, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="parts of names, with commas between them")
    parser.add_argument("--dir", type=Path, help="directory for the runs; they are kept there")
    parser.add_argument("--write", action="store_true", help=f"record the table in {RESULT.name}")
    given = parser.parse_args()
    import torch
    import transformers

    prepare()

    wanted = given.only.split(",") if given.only else [""]
    cases = [case for case in CASES if any(part in case.name for part in wanted)]
    root = (given.dir or Path(tempfile.mkdtemp(prefix="resume_changes_"))).absolute()
    root.mkdir(parents=True, exist_ok=True)
    base, reward = base_model(root / "shared", command), reward_model(root / "shared", command)
    rows = []
    for case in cases:
        begin = time.monotonic()
        found, said = outcome(case, root, base, reward)
        said = said.replace(str(root), "").replace(tempfile.gettempdir(), "")
        if found not in case.allowed and found not in ("SILENT", "FAILS"):
            found, said = "FAILS", f"{found}, not {' or '.join(case.allowed)}: {said}"
        rows.append({"change": case.name, "outcome": found, "said": said[:240]})
        print(f"{found:8} {case.name:58} {time.monotonic() - begin:5.1f} s  {said[:140]}", flush=True)
    counts = Counter(str(row["outcome"]) for row in rows)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if given.write:
        record = {"versions": versions, "counts": dict(counts), "cases": rows}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
    if given.dir is None:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"cases": len(rows), **counts}))
    return int(bool(counts["SILENT"] + counts["FAILS"]))


if __name__ == "__main__":
    sys.exit(main())
