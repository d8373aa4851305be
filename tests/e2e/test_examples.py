"""Every example runs as a reader would run it, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
PROMISES = {
    "01_plan.py": "torch imported: False",
    "02_layouts.py": "all_gather over dp_shard: 14 MiB sent per rank",
    "03_parallelize.py": "equal to 10 digits",
    "04_own_loop_any_model.py": "gradient norms of every layout are equal to 10 digits",
    "05_custom_objective.py": "equal to 10 digits, and lower with every step: True",
    "06_save_and_load.py": "continues as if it had never stopped",
    "07_offload.py": "bit for bit the losses without a plan: True",
}


def test_every_example_is_listed() -> None:
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
