"""The recipe of handwritten digits: its data, and a coded error without scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "data" / "vlm_digits.py"


def _write(folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join([*before, "import runpy", f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"])
    words = [sys.executable, "-c", program]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_without_scikit_learn_the_script_says_how_to_install_it(tmp_path: Path) -> None:
    done = _write(tmp_path, "import sys", "sys.modules['sklearn.datasets'] = None")
    assert done.returncode != 0
    assert "HP501" in done.stderr
    assert "pip install 'hyper-parallel[digits]'" in done.stderr


def test_the_script_writes_every_digit_with_its_word(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = _write(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "vlm_digits_data"
    records = [
        json.loads(line)
        for split in ("train", "holdout")
        for line in (folder / f"{split}.jsonl").read_text().splitlines()
    ]
    assert len(records) == 1797
    assert len({record["messages"][1]["content"] for record in records}) == 10
    assert all((folder / record["images"][0]).is_file() for record in records)
