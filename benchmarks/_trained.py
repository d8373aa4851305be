"""Runs of `hyper-parallel train` in separate processes, for end-to-end benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def train(recipe: Path, out: Path, words: Sequence[str], enough: Callable[[Rows], bool] | None = None) -> Rows:
    """Run the command on a recipe with further arguments, and return the rows of metrics.jsonl.

    The command's output goes to stderr. `enough` is called with the rows once a second; when it returns True, the run
    receives a signal to end.
    """
    command = [sys.executable, "-m", "hyper_parallel", "-q", "train", str(recipe), "--no-calibrate"]
    command += [*words, f"output_dir={out}"]
    metrics, ended = out / "metrics.jsonl", False
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        while process.poll() is None:
            time.sleep(1)
            if enough and not ended and metrics.exists() and enough(_rows(metrics)):
                process.terminate()
                ended = True
    if process.returncode and not ended:
        raise subprocess.CalledProcessError(process.returncode, command)
    return _rows(metrics)


def _rows(metrics: Path) -> Rows:
    """Return the records in the complete lines of a file to which a run still writes."""
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
