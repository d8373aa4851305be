"""Every tutorial runs as printed, block by block, in a fresh folder, and prints the numbers that it states."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(sh|yaml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of YAML or Python whose first line is `# NAME` is a file; lines of a block `sh` are commands."""
QUANTITY = re.compile(r"\d+\.\d+ (?:s|ms|GiB)\b")


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_runs_as_printed(page: Path, tmp_path: Path) -> None:
    commands = 0
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        name = re.match(r"# (\S+\.\w+)\n", body)
        if language != "sh":
            if name is not None:
                (tmp_path / name[1]).write_text(body, encoding="utf-8")
            continue
        for line in body.splitlines():
            done = run(line, tmp_path)
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            commands += 1
    assert commands > 3


def test_a_plan_has_the_numbers_that_its_tutorial_states(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "plan_a_cluster.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:\$ )?(hyper-parallel plan .*)$", page, re.MULTILINE)
    assert len(lines) > 6
    done = [run(line.split(">")[0], tmp_path) for line in lines]
    printed = " ".join(" ".join((each.stdout + each.stderr).split()) for each in done)
    blocks = re.findall(r"^```(?:text|console)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    stated = {" ".join(line.split()) for block in blocks for line in block.splitlines() if "hyper-parallel" not in line}
    assert sorted(line for line in stated | set(QUANTITY.findall(page)) if line not in printed) == []
