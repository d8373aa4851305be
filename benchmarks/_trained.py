"""Runs of `hyper-parallel train` in processes of their own, for benchmarks of what a user gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train(recipe: Path, out: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of one run, with words of the command line; its output goes to stderr."""
    command = [sys.executable, "-m", "hyper_parallel", "-q", "train", str(recipe), "--no-calibrate"]
    subprocess.run([*command, *words, f"output_dir={out}"], check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
