"""`--quiet` leaves results and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import CONFIG, write_functions

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.slow
@pytest.mark.e2e
def test_quiet_training_says_one_line(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    write_functions(tmp_path / "text.txt", 400)
    (tmp_path / "r.yaml").write_text(
        "model: {path: model.json}\n"
        "data: {source: text.txt, seq_len: 32, vocab_size: 384, cache_dir: cache}\n"
        "training: {steps: 2, dtype: float32, tokens_per_step: 64, warmup_steps: 0}\n"
        "checkpoint: {export: false}\nparallel: {dp_shard: 1}\noutput_dir: run\n"
    )
    command = [sys.executable, "-m", "hyper_parallel", "-q", "train", "r.yaml", "--no-calibrate"]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 steps in ")
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "run/report.html").is_file()
