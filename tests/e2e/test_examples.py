"""Every example runs as a reader would run it, and says what it promises."""

import os
import runpy
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.slow import slow_cells

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
    "08_offload_ranks.py": "DistributedDataParallel: the losses without a plan: True",
    "own_roles.py": "answers are better than by chance: True",
}


def test_every_example_is_listed() -> None:
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == set(PROMISES)


def _run(script: Path, stdout: Path, stderr: Path) -> None:
    os.chdir(stdout.parent)
    sys.stdout, sys.stderr = stdout.open("w"), stderr.open("w")
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


@slow_cells(
    "05_custom_objective.py",
    "08_offload_ranks.py",
    "03_parallelize.py",
    "04_own_loop_any_model.py",
    "06_save_and_load.py",
    "own_roles.py",
    "07_offload.py",
)
@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    """In a process forked from this one, which has imported what they import; the first one imports little."""
    script, said, errors = ROOT / "examples" / name, tmp_path / "stdout", tmp_path / "stderr"
    if name == "01_plan.py":
        words = [sys.executable, str(script)]
        with said.open("w") as stdout, errors.open("w") as stderr:
            status = subprocess.run(words, cwd=tmp_path, stdout=stdout, stderr=stderr).returncode
    else:
        process = get_context("fork").Process(target=_run, args=(script, said, errors))
        process.start()
        process.join(110)
        process.kill()
        status = process.exitcode
    assert status == 0, errors.read_text()
    assert PROMISES[name] in said.read_text()
