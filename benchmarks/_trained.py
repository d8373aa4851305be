"""Runs of `hyper-parallel train` in processes of their own, for benchmarks of what a user gets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def train(
    recipe: Path, out: Path, words: Sequence[str], enough: Callable[[Rows], bool] | None = None
) -> Rows:
    """Rows of metrics.jsonl of one run, with words of the command line; its output goes to stderr.

    A run whose rows are `enough` is told to end, as by a scheduler; it is looked at every second.
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
    """Whole lines of a file that may be written to."""
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
