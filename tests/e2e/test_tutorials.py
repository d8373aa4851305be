"""Every tutorial runs as printed, block by block, in a fresh folder."""

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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_runs_as_printed(page: Path, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    commands = 0
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        name = re.match(r"# (\S+\.\w+)\n", body)
        if language != "sh":
            if name is not None:
                (tmp_path / name[1]).write_text(body, encoding="utf-8")
            continue
        for line in body.splitlines():
            done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            commands += 1
    assert commands > 3
